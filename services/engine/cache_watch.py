"""Who watches the prefix index, each with a line of its own of what it has yet to be told.

A line is bounded: a watcher that lags loses it whole, and is told a snapshot when it reads again.
"""

from __future__ import annotations

import asyncio
from collections import deque

from services.engine.cache_events import CacheEvents, CacheMessage
from services.engine.kv.manager import KvCache

LINE_BYTES = 4 * 1024 * 1024
"""Bytes of changes that wait for one watcher at most, beside the snapshot that it reads."""


class Watcher:
    """One who watches. `wake` is set while there is something to take."""

    def __init__(self, events: CacheEvents, from_sequence: int | None) -> None:
        self.wake = asyncio.Event()
        self._events = events
        self._line = deque(events.since(from_sequence))
        self._bytes = 0  # of what was added since the line was begun
        self._lost = False
        self._show()

    def add(self, messages: list[CacheMessage]) -> None:
        """What has happened; it is for the watcher to take."""
        if self._lost:
            return
        self._line += messages
        self._bytes += sum(len(each.stored) + len(each.parents) + len(each.removed) for each in messages)
        if self._bytes > LINE_BYTES:
            self._line.clear()
            self._lost = True
        self._show()

    def take(self) -> CacheMessage | None:
        """The next message; None when there is none."""
        if self._lost:
            self._line.extend(self._events.since(None))
            self._lost = False
        message = self._line.popleft() if self._line else None
        if not self._line:
            self._bytes = 0
        self._show()
        return message

    def _show(self) -> None:
        if self._line or self._lost:
            self.wake.set()
        else:
            self.wake.clear()


class CacheWatch:
    """All watchers of one engine's prefix index. Nothing is noted before the first one comes."""

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        self._events: CacheEvents | None = None
        self._watchers: set[Watcher] = set()

    def open(self, from_sequence: int | None) -> Watcher:
        """A new watcher, who gets the messages from this number on, or a snapshot."""
        if self._events is None:
            self._events = CacheEvents(self._cache)
        self.poll()
        watcher = Watcher(self._events, from_sequence)
        self._watchers.add(watcher)
        return watcher

    def close(self, watcher: Watcher) -> None:
        """Ends a watch."""
        self._watchers.discard(watcher)

    def poll(self) -> None:
        """Tells the watchers what has happened since the last call. To be called after every change."""
        if self._events is None:
            return
        messages = self._events.poll()
        if messages:
            for watcher in self._watchers:
                watcher.add(messages)

    def follow(self, cache: KvCache) -> None:
        """Another cache takes the place of the one before; everything told before is void."""
        self._cache = cache
        if self._events is not None:
            self._events.follow(cache)
