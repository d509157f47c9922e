"""What becomes of the prefix index, for those who watch from afar: numbered messages. Pure.

    KvCache ── take_events ──▶ poll ──▶ messages 18 19 20 21   to everybody who watches
                                          └─ ring, bounded ─┘
    since(19)    19 20 21 again
    since(22)    nothing: 22 will be the next
    since(None), since(3), since(40)    a snapshot, which ends with number 21

How it is driven: made when the first one watches (nothing is noted before), and kept. After each step
the messages of `poll` go to all watchers. A new one gets those of `since`, and from then on what
`poll` gives; if nothing awaits between the two, it misses nothing and gets nothing twice. Where an empty
core takes the place of another, `follow` its cache; everybody hears then that all is void.

A large change and a snapshot come in parts. Parts of a change have numbers of their own. Those of a
snapshot have number 0, but for the last one: somebody who was cut off in the midst of a snapshot knows
no number to go on from, and gets another one. The message numbered 1 voids all, so it may be replayed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from services.engine.kv.blocks import CacheChange
from services.engine.kv.manager import KvCache

PART = 8192
"""Names in one message at most; with their parents they take half a MiB."""
KEPT = 1 << 17
"""Names in the messages kept for replay, together."""


class CacheMessage(NamedTuple):
    """The columns of a WatchCacheResponse. No name is both stored and removed."""

    sequence: int
    cleared: bool  # everything before is void
    stored: bytes  # names that can be found now, 32 bytes each
    parents: bytes  # theirs, in the same order; zero bytes for the first block of a prompt
    removed: bytes  # names that cannot be found any more


class CacheEvents:
    """Numbers the changes of one cache's index, from 1, and knows what they add up to."""

    def __init__(self, cache: KvCache, kept: int = KEPT) -> None:
        self._kept = kept
        self._index: dict[bytes, bytes] = {}  # a name that listeners know, and its parent
        self._ring: deque[CacheMessage] = deque()
        self._ring_names = 0
        self._next = 1
        self.follow(cache)

    def follow(self, cache: KvCache) -> None:
        """Watches this cache from now on, and no other."""
        self._cache = cache
        self._first: CacheChange | None = cache.watch()

    def poll(self) -> list[CacheMessage]:
        """What has happened since the last call; mostly nothing."""
        messages: list[CacheMessage] = []
        for change in (self._first, self._cache.take_events()):
            if change is not None:
                messages += self._number(change)
        self._first = None
        return messages

    def since(self, sequence: int | None) -> list[CacheMessage]:
        """The messages from this number on; a snapshot where they are no longer there, or None is asked for."""
        if sequence is not None:
            oldest = self._ring[0].sequence if self._ring else self._next
            if oldest <= sequence <= self._next:
                return [message for message in self._ring if message.sequence >= sequence]
        parts = list(_parts(_parents_first(self._index), [])) or [([], [])]
        numbers = [0] * (len(parts) - 1) + [self._next - 1]
        return [self._message(number, at == 0, *parts[at]) for at, number in enumerate(numbers)]

    def _number(self, change: CacheChange) -> list[CacheMessage]:
        """Leaves out what came and went unseen."""
        if change.cleared:
            self._index.clear()
        index = self._index
        stored = {name: parent for name, parent in change.names.items() if parent is not None and name not in index}
        removed = [name for name, parent in change.names.items() if parent is None and name in index]
        for name in removed:
            del index[name]
        index.update(stored)
        messages = []
        cleared = change.cleared
        for part in list(_parts(list(stored), removed)) or [([], [])] * cleared:
            messages.append(self._message(self._next, cleared, *part))
            self._next += 1
            cleared = False
        self._keep(messages)
        return messages

    def _keep(self, messages: list[CacheMessage]) -> None:
        self._ring += messages
        self._ring_names += sum(map(_size, messages))
        while self._ring_names > self._kept:
            self._ring_names -= _size(self._ring.popleft())

    def _message(self, sequence: int, cleared: bool, stored: list[bytes], removed: list[bytes]) -> CacheMessage:
        parents = b"".join([self._index[name] for name in stored])
        return CacheMessage(sequence, cleared, b"".join(stored), parents, b"".join(removed))


def _size(message: CacheMessage) -> int:
    """Names in a message; one without any takes room too."""
    return max(1, (len(message.stored) + len(message.removed)) // 32)


def _parts(stored: list[bytes], removed: list[bytes]) -> Iterator[tuple[list[bytes], list[bytes]]]:
    """Both lists cut so that no part has more than PART names."""
    for start in range(0, len(stored) + len(removed), PART):
        end = start + PART
        yield stored[start:end], removed[max(0, start - len(stored)) : max(0, end - len(stored))]


def _parents_first(index: dict[bytes, bytes]) -> list[bytes]:
    """All names, each behind its parent where that is known."""
    order: dict[bytes, None] = {}
    for last in index:
        chain, name = [], last
        while name in index and name not in order:
            chain.append(name)
            name = index[name]
        order.update(dict.fromkeys(reversed(chain)))
    return list(order)
