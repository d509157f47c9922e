"""Those who look on, over real gRPC: the load, and what becomes of the prefix index."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest

from protos import engine_pb2
from services.engine import cache_watch
from services.engine.__main__ import Engine
from tests.engine.cluster import Gateway

NO_PARENT = bytes(32)


async def test_the_load_comes_at_once_and_then_when_it_changed(gateway: Gateway) -> None:
    watch = gateway.stub.WatchLoad(engine_pb2.WatchLoadRequest(interval_ms=1))
    idle = (await watch.read()).load
    assert idle.free_blocks == idle.total_blocks == 600
    await gateway.submit(1, [1, 2], max_tokens=50)
    busy = (await watch.read()).load
    while not busy.running:
        busy = (await watch.read()).load
    assert busy.free_blocks < 600
    before = busy
    while busy.running:
        busy = (await watch.read()).load
        assert busy != before, "only changes are told"
        before = busy
    assert busy.free_blocks == 600
    pending = asyncio.ensure_future(watch.read())
    await asyncio.sleep(0.3)
    assert not pending.done(), "nothing changes, so nothing is told"
    watch.cancel()
    await asyncio.gather(pending, return_exceptions=True)


async def test_the_load_never_comes_faster_than_asked(gateway: Gateway) -> None:
    watch = gateway.stub.WatchLoad(engine_pb2.WatchLoadRequest(interval_ms=60))
    await watch.read()
    begun, messages = time.monotonic(), 0

    async def count() -> None:
        nonlocal messages
        while await watch.read():
            messages += 1

    counting = asyncio.create_task(count())
    await gateway.generate([1, 2], max_tokens=300)
    watch.cancel()
    await asyncio.gather(counting, return_exceptions=True)
    assert 1 <= messages <= (time.monotonic() - begun) / 0.060 + 1


@pytest.mark.parametrize("interval_ms", [0, 3_600_001])
async def test_an_interval_that_makes_no_sense_is_refused(gateway: Gateway, interval_ms: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await gateway.stub.WatchLoad(engine_pb2.WatchLoadRequest(interval_ms=interval_ms)).read()
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "interval_ms" in (refused.value.details() or "")


class Index:
    """The prefix index as a watcher knows it."""

    def __init__(self) -> None:
        self.parents: dict[bytes, bytes] = {}
        self.sequence = 0
        self.cleared = 0

    def take(self, message: Any) -> None:
        if message.cleared:
            self.parents.clear()
            self.cleared += 1
        elif message.sequence:
            assert message.sequence == self.sequence + 1
        for removed in _hashes(message.removed_hashes):
            del self.parents[removed]
        self.parents.update(zip(_hashes(message.stored_hashes), _hashes(message.stored_parents), strict=True))
        self.sequence = message.sequence or self.sequence
        assert message.ByteSize() < 1024 * 1024

    async def until(self, watch: Any, condition: Any) -> None:
        while not condition():
            self.take(await asyncio.wait_for(watch.read(), 20))


def _hashes(column: bytes) -> list[bytes]:
    assert len(column) % 32 == 0
    return [column[start : start + 32] for start in range(0, len(column), 32)]


async def test_watchers_know_the_index_whenever_they_come(gateway: Gateway) -> None:
    first, second, third = Index(), Index(), Index()
    watch = gateway.stub.WatchCache(engine_pb2.WatchCacheRequest())
    await first.until(watch, lambda: first.sequence)
    assert (first.parents, first.cleared) == ({}, 1)
    await gateway.generate(list(range(50)), max_tokens=1)
    await first.until(watch, lambda: len(first.parents) == 3)
    assert first.cleared == 1
    chain = list(first.parents.items())
    assert [parent for _, parent in chain] == [NO_PARENT, chain[0][0], chain[1][0]]

    later = gateway.stub.WatchCache(engine_pb2.WatchCacheRequest())
    await second.until(later, lambda: second.sequence == first.sequence)
    assert second.parents == first.parents

    third.sequence = first.sequence
    third.parents = dict(first.parents)
    await gateway.generate(list(range(50, 90)), max_tokens=1)
    await first.until(watch, lambda: len(first.parents) == 5)
    again = gateway.stub.WatchCache(engine_pb2.WatchCacheRequest(from_sequence=third.sequence + 1))
    await third.until(again, lambda: third.sequence == first.sequence)
    assert (third.parents, third.cleared) == (first.parents, 0), "what was missed is told again, and no more"

    await gateway.stub.ResetPrefixCache(engine_pb2.ResetPrefixCacheRequest())
    await first.until(watch, lambda: not first.parents)
    await third.until(again, lambda: not third.parents)
    for each in (watch, later, again):
        each.cancel()


async def test_a_sleep_voids_all(gateway: Gateway) -> None:
    index = Index()
    watch = gateway.stub.WatchCache(engine_pb2.WatchCacheRequest())
    await index.until(watch, lambda: index.sequence)
    await gateway.generate(list(range(50)), max_tokens=1)
    await index.until(watch, lambda: len(index.parents) == 3)
    await gateway.stub.Sleep(engine_pb2.EngineServiceSleepRequest(level=1))
    await index.until(watch, lambda: index.cleared == 2)
    assert index.parents == {}
    await gateway.stub.WakeUp(engine_pb2.EngineServiceWakeUpRequest())
    watch.cancel()


async def test_an_unknown_number_gets_a_snapshot(gateway: Gateway) -> None:
    index = Index()
    watch = gateway.stub.WatchCache(engine_pb2.WatchCacheRequest(from_sequence=10_000))
    await index.until(watch, lambda: index.cleared)
    watch.cancel()


async def test_an_empty_core_voids_all(engine: Engine, gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index()
    watch = gateway.stub.WatchCache(engine_pb2.WatchCacheRequest())
    await gateway.generate(list(range(50)), max_tokens=1)
    await index.until(watch, lambda: len(index.parents) == 3)
    assert engine.loop is not None

    def broken(*_: object) -> None:
        raise KeyError("bug")

    monkeypatch.setattr(engine.loop._core, "apply", broken)
    await gateway.generate([1], handle=2)
    await index.until(watch, lambda: not index.parents)
    watch.cancel()


async def test_who_lags_is_told_a_snapshot_instead(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    while engine.loop is None:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    monkeypatch.setattr(cache_watch, "LINE_BYTES", 64 * 2)
    pool, cache = engine.loop._core.kv.pool, engine.loop.cache
    watcher = cache.open(None)
    assert watcher.wake.is_set()
    first = watcher.take()
    assert first is not None
    assert first.cleared
    assert watcher.take() is None
    assert not watcher.wake.is_set()
    blocks = pool.take(4)
    for number, block in enumerate(blocks):
        pool.index(block, bytes([number + 1]) * 32)
        cache.poll()
    assert watcher.wake.is_set()
    snapshot = watcher.take()
    assert snapshot is not None
    assert snapshot.cleared
    assert len(snapshot.stored) == 4 * 32
    assert watcher.take() is None
    pool.index(pool.take(1)[0], b"x" * 32)
    cache.poll()
    change = watcher.take()
    assert change is not None
    assert (change.cleared, change.stored, change.sequence) == (False, b"x" * 32, snapshot.sequence + 1)
    cache.close(watcher)
