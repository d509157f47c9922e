"""Numbered changes of the prefix index: a listener that applies them has exactly the index."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine import cache_events
from services.engine.cache_events import CacheEvents, CacheMessage
from services.engine.kv.blocks import NO_PARENT
from services.engine.kv.manager import KvCache
from services.engine.report import Counters


class Listener:
    """What a router keeps: it knows messages alone."""

    def __init__(self) -> None:
        self.index: dict[bytes, bytes] = {}
        self.sequence = 0

    def hear(self, message: CacheMessage) -> None:
        stored = [message.stored[at : at + 32] for at in range(0, len(message.stored), 32)]
        parents = [message.parents[at : at + 32] for at in range(0, len(message.parents), 32)]
        removed = [message.removed[at : at + 32] for at in range(0, len(message.removed), 32)]
        assert not set(stored) & set(removed)
        if message.cleared:
            self.index.clear()
        self.index.update(zip(stored, parents, strict=True))
        for name in removed:
            del self.index[name]
        self.sequence = message.sequence

    def hear_all(self, messages: Iterable[CacheMessage]) -> None:
        for message in messages:
            self.hear(message)


def index_of(cache: KvCache) -> dict[bytes, bytes]:
    """Names and parents, read off the pool's blocks."""
    pool = cache.pool
    named = [(block, name) for block, name in enumerate(pool.names) if name and pool._groups[block] == 0]
    return {name: pool._parents[block] for block, name in named}


def name_of(number: int) -> bytes:
    """No name is all zeros: that stands for no parent."""
    return (number + 1).to_bytes(32, "big")


def make_cache(num_blocks: int = 6) -> KvCache:
    return KvCache(num_blocks, 4, max_num_batched_tokens=8, reserve_blocks=0, prefix_caching=True, counters=Counters())


def store(cache: KvCache, *numbers: int) -> list[int]:
    """Holds new blocks with these names, each the parent of the next."""
    blocks = cache.pool.take(len(numbers))
    for at, (block, number) in enumerate(zip(blocks, numbers, strict=True)):
        cache.pool.index(block, name_of(number), name_of(numbers[at - 1]) if at else NO_PARENT)
    return blocks


def test_the_first_message_voids_all_and_has_what_is_there() -> None:
    cache = make_cache()
    store(cache, 1, 2)
    events = CacheEvents(cache)
    (message,) = events.poll()
    assert message == (1, True, name_of(1) + name_of(2), NO_PARENT + name_of(1), b"")
    assert events.poll() == []


def test_messages_count_up_and_say_what_changed() -> None:
    cache = make_cache(2)
    events = CacheEvents(cache)
    assert events.poll() == [(1, True, b"", b"", b"")]
    blocks = store(cache, 1, 2)
    assert events.poll() == [(2, False, name_of(1) + name_of(2), NO_PARENT + name_of(1), b"")]
    cache.pool.drop(reversed(blocks))
    assert events.poll() == []
    store(cache, 3)
    assert events.poll() == [(3, False, name_of(3), NO_PARENT, name_of(2))]
    assert cache.pool.forget_free() == 1
    assert events.poll() == [(4, False, b"", b"", name_of(1))]


def test_what_came_and_went_between_two_looks_is_not_told() -> None:
    cache = make_cache(1)
    events = CacheEvents(cache)
    cache.pool.drop(store(cache, 1))
    events.poll()
    cache.pool.drop(store(cache, 2))
    cache.pool.drop(store(cache, 1))
    assert events.poll() == []


def test_a_reset_is_one_clear() -> None:
    cache = make_cache()
    events = CacheEvents(cache)
    cache.pool.drop(store(cache, 1, 2, 3))
    events.poll()
    cache.pool.drop(store(cache, 4))
    cache.reset()
    assert events.poll() == [(3, True, b"", b"", b"")]
    cache.reset()
    assert events.poll() == []


def test_replay_from_a_number_or_a_snapshot() -> None:
    cache = make_cache(20)
    events = CacheEvents(cache, kept=3)
    messages = events.poll()
    for number in range(1, 6):
        store(cache, number)
        messages += events.poll()
    assert [message.sequence for message in messages] == [1, 2, 3, 4, 5, 6]
    assert events.since(5) == messages[4:]
    assert events.since(4) == messages[3:]
    assert events.since(7) == []
    for gone in (None, 0, 3, 8, 2**63):
        (snapshot,) = events.since(gone)
        assert snapshot.sequence == 6
        assert snapshot.cleared
        assert len(snapshot.stored) == 5 * 32


def test_a_snapshot_of_nothing_is_a_clear() -> None:
    events = CacheEvents(make_cache())
    events.poll()
    assert events.since(None) == [(1, True, b"", b"", b"")]


def test_large_changes_and_snapshots_come_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "PART", 3)
    cache, listener = make_cache(20), Listener()
    events = CacheEvents(cache)
    blocks = store(cache, *range(1, 9))
    first = events.poll()
    assert [(message.sequence, message.cleared) for message in first] == [(1, True), (2, False), (3, False), (4, False)]
    cache.pool.drop(blocks[4:])
    cache.pool.take(12)
    store(cache, 11, 12)
    parts = events.poll()
    assert [(len(each.stored) // 32, len(each.removed) // 32) for each in parts] == [(2, 1), (0, 1)]
    snapshot = events.since(None)
    assert [message.sequence for message in snapshot] == [0, 0, 6]
    assert [message.cleared for message in snapshot] == [True, False, False]
    listener.hear_all(snapshot)
    assert listener.index == index_of(cache)


def test_parents_come_before_their_children_in_a_snapshot() -> None:
    """Also where a parent was lost and found again, and where it is not there at all."""
    cache = make_cache()
    pool = cache.pool
    events = CacheEvents(cache)
    head, tail, orphan = pool.take(3)
    pool.index(tail, name_of(2), name_of(1))
    pool.index(orphan, name_of(9), name_of(8))
    events.poll()
    pool.index(head, name_of(1), NO_PARENT)
    events.poll()
    (snapshot,) = events.since(None)
    assert snapshot.stored == name_of(1) + name_of(2) + name_of(9)
    assert snapshot.parents == NO_PARENT + name_of(1) + name_of(8)


def test_another_cache_takes_its_place() -> None:
    events, listener = CacheEvents(make_cache()), Listener()
    store(events._cache, 1, 2)
    listener.hear_all(events.poll())
    cache = make_cache()
    events.follow(cache)
    listener.hear_all(events.poll())
    assert listener.index == {}
    assert listener.sequence == 3
    store(cache, 3)
    listener.hear_all(events.poll())
    assert listener.index == index_of(cache) != {}


@given(
    st.lists(st.tuples(st.sampled_from(("store", "store", "drop", "poll", "poll", "reset", "join")), st.integers(0, 9)))
)
def test_listeners_have_the_index_wherever_they_joined(calls: list[tuple[str, int]]) -> None:
    cache = make_cache()
    events, listeners, held = CacheEvents(cache, kept=6), [Listener()], list[int]()
    for verb, number in [*calls, ("poll", 0)]:
        if verb == "store" and cache.pool.num_free:
            held += store(cache, number)
        elif verb == "drop" and held:
            cache.pool.drop([held.pop(number % len(held))])
        elif verb == "reset":
            cache.pool.drop(held)
            held.clear()
            cache.reset()
        elif verb == "join":  # one that heard all up to some message, or nothing, and lost its stream since
            listener = Listener()
            if number:
                listener.hear_all(message for message in events.since(None) if number > 3)
            listener.hear_all(events.since(listener.sequence + 1 if number % 2 else None))
            listeners.append(listener)
        elif verb == "poll":
            messages = events.poll()
            for listener in listeners:
                listener.hear_all(messages)
                assert listener.index == index_of(cache)
