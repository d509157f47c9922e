"""What an operator asks of a running engine, over real gRPC: pause, sleep, drain, reset, and back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import common_pb2, engine_pb2, worker_pb2, worker_pb2_grpc
from services.common.channel import connect
from services.engine.__main__ import Engine
from services.engine.events import FINISH_ABORT, FINISH_LENGTH
from tests.engine.cluster import LONG, Answer, Gateway, WorkerProcess, all_blocks_free, attached, running_engine

TOKEN = b"e" * 16
KV_BYTES_PER_TOKEN = 1024  # of the simulated model


@pytest.fixture
def own_worker(sockets: Path) -> Iterator[WorkerProcess]:
    """A worker that a test may kill."""
    process = WorkerProcess(f"unix:{sockets}/own.sock", "--simulated-step-us", "2000")
    process.start()
    yield process
    process.stop()


async def pause(gateway: Gateway, preempt: bool = False) -> None:
    await gateway.stub.Pause(engine_pb2.PauseRequest(preempt=preempt))


async def unpause(gateway: Gateway) -> None:
    await gateway.stub.Unpause(engine_pb2.UnpauseRequest())


async def sleep(gateway: Gateway, level: int) -> int:
    answer = await gateway.stub.Sleep(engine_pb2.EngineServiceSleepRequest(level=level))
    return int(answer.freed_bytes)


async def wake_up(gateway: Gateway) -> None:
    await gateway.stub.WakeUp(engine_pb2.EngineServiceWakeUpRequest())


async def load(gateway: Gateway) -> common_pb2.Load:
    """The load now, and not as of the last frame."""
    watch = gateway.stub.WatchLoad(engine_pb2.WatchLoadRequest())
    first = await watch.read()
    watch.cancel()
    return first.load


async def explained(gateway: Gateway, tenant: str = "") -> engine_pb2.EngineServiceExplainResponse:
    return await gateway.stub.Explain(engine_pb2.EngineServiceExplainRequest(token=TOKEN, tenant=tenant))


async def under_way(gateway: Gateway, handle: int = 1, max_tokens: int = 200) -> Answer:
    """A request that has given its first tokens."""
    answer = await gateway.submit(handle, [handle, 2, 3], max_tokens=max_tokens, token=TOKEN)
    await gateway.until(lambda: len(answer.tokens.get(0, ())) > 3)
    return answer


async def test_a_pause_keeps_what_runs_and_takes_what_comes(gateway: Gateway) -> None:
    whole = (await gateway.generate([1, 2, 3], max_tokens=200)).tokens
    answer = await under_way(gateway)
    await pause(gateway)
    await pause(gateway)
    held = await load(gateway)
    assert (held.running, held.waiting) == (1, 0)
    assert held.free_blocks < held.total_blocks
    before = (await explained(gateway)).output_tokens
    later = await gateway.submit(2, [4, 5])
    await gateway.until(lambda: gateway.loads[-1].waiting == 1)
    await asyncio.sleep(0.3)
    told = await explained(gateway)
    assert (told.state, told.reason, told.output_tokens) == ("running", "the engine is paused", before)
    assert (await load(gateway)).silence_ms == 0, "a pause is no standstill: the engine stays ready"
    await unpause(gateway)
    await unpause(gateway)
    await gateway.finished(1, 2)
    assert answer.tokens == whole
    assert later.finish == {0: FINISH_LENGTH}
    await all_blocks_free(gateway)


async def test_no_step_is_in_flight_once_a_pause_is_answered(engine: Engine, gateway: Gateway) -> None:
    await under_way(gateway, max_tokens=LONG)
    for _ in range(20):
        await pause(gateway)
        assert engine.loop is not None
        assert engine.workers.in_flight == engine.loop._core.steps_in_flight == 0
        await unpause(gateway)


async def test_a_pause_that_preempts_frees_all_kv_and_changes_no_token(gateway: Gateway) -> None:
    whole = (await gateway.generate([1, 2, 3], max_tokens=200)).tokens
    answer = await under_way(gateway)
    await pause(gateway)
    assert (await load(gateway)).running == 1
    await pause(gateway, preempt=True)
    freed = await load(gateway)
    assert (freed.running, freed.waiting, freed.free_blocks) == (0, 1, freed.total_blocks)
    assert (await explained(gateway)).state == "waiting"
    await unpause(gateway)
    await gateway.finished(1)
    assert answer.tokens == whole


async def test_a_pause_can_be_explained_to_the_own_tenant_only(gateway: Gateway) -> None:
    await pause(gateway)
    await gateway.submit(1, [1, 2, 3], token=TOKEN)
    await gateway.until(lambda: gateway.loads and gateway.loads[-1].waiting == 1)
    told = await explained(gateway)
    assert (told.state, told.prompt_tokens, told.output_tokens) == ("waiting", 3, 0)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await explained(gateway, tenant="other")
    assert refused.value.code() == grpc.StatusCode.NOT_FOUND
    await unpause(gateway)
    await gateway.finished(1)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await explained(gateway)
    assert ended.value.code() == grpc.StatusCode.NOT_FOUND


async def test_resetting_the_prefix_cache_by_value(gateway: Gateway) -> None:
    async def reset(preempt: bool) -> int:
        request = engine_pb2.ResetPrefixCacheRequest(preempt=preempt)
        return int((await gateway.stub.ResetPrefixCache(request)).blocks)

    await reset(False)
    await gateway.generate(list(range(100)), max_tokens=1)  # 100 tokens have their KV in 6 full blocks of 16
    assert await reset(False) == 6
    assert await reset(False) == 0
    whole = (await gateway.generate([7] * 40, max_tokens=300)).tokens
    assert await reset(True) == 21  # 339 tokens have their KV
    answer = await gateway.submit(1, [7] * 40, max_tokens=300, token=TOKEN)
    await gateway.until(lambda: len(answer.tokens.get(0, ())) > 20)
    assert await reset(False) == 0, "a running request holds all that there is"
    assert await reset(True) >= 3
    await gateway.finished(1)
    assert answer.tokens == whole


@asynccontextmanager
async def sleeper(worker: str, listen: str, **knobs: Any) -> AsyncIterator[tuple[Engine, Gateway]]:
    async with running_engine(worker, listen, num_blocks=100, **knobs) as engine:
        gateway = await attached(listen)
        yield engine, gateway
        await gateway.close()


@pytest.mark.parametrize("level", [1, 2])
async def test_asleep_requests_wait_and_awake_they_go_on(worker: str, listen: str, level: int) -> None:
    async with sleeper(worker, listen, lease_s=0.6) as (_, gateway):
        whole = (await gateway.generate([1, 2, 3], max_tokens=200)).tokens
        await wake_up(gateway)
        answer = await under_way(gateway)
        assert await sleep(gateway, level) == 100 * 16 * KV_BYTES_PER_TOKEN
        assert await sleep(gateway, 1) == 0
        later = await gateway.submit(2, [1, 2, 3] * 10)
        await gateway.until(lambda: gateway.loads[-1].waiting == 2)
        now = await load(gateway)
        assert (now.running, now.free_blocks, now.silence_ms) == (0, 100, 0)
        assert (await explained(gateway)).reason == "the engine sleeps"
        await asyncio.sleep(1.0)  # longer than the lease
        before = answer.frames
        await wake_up(gateway)
        await wake_up(gateway)
        await gateway.finished(1, 2)
        assert answer.frames > before
        assert answer.tokens == whole
        assert later.started is not None
        assert later.started.cached_tokens == 0
        await all_blocks_free(gateway)


async def test_the_cached_prefixes_are_forgotten_in_a_sleep(gateway: Gateway) -> None:
    prompt = list(range(64))
    for cached in (0, 48):
        answer = await gateway.generate(prompt)
        assert answer.started is not None
        assert answer.started.cached_tokens in {cached, 63}
    await sleep(gateway, 1)
    await wake_up(gateway)
    answer = await gateway.generate(prompt)
    assert answer.started is not None
    assert answer.started.cached_tokens == 0


@pytest.mark.parametrize("level", [0, 3])
async def test_another_level_is_refused_by_name(gateway: Gateway, level: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await sleep(gateway, level)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "level" in (refused.value.details() or "")
    assert (await gateway.generate([1])).finish == {0: FINISH_LENGTH}, "and the engine goes on"


async def test_a_deeper_sleep_follows_a_light_one(gateway: Gateway) -> None:
    assert await sleep(gateway, 1) > 0
    assert await sleep(gateway, 2) == 0, "the simulated model has no weights to free"
    await wake_up(gateway)
    assert (await gateway.generate([1])).finish == {0: FINISH_LENGTH}


async def test_a_pause_and_a_sleep_are_apart(gateway: Gateway) -> None:
    await pause(gateway)
    await sleep(gateway, 1)
    answer = await gateway.submit(1, [1, 2], token=TOKEN)
    await gateway.until(lambda: gateway.loads[-1].waiting == 1)
    await wake_up(gateway)
    assert (await explained(gateway)).reason == "the engine is paused"
    await sleep(gateway, 1)
    await unpause(gateway)
    assert (await explained(gateway)).reason == "the engine sleeps"
    assert answer.tokens == {}
    await wake_up(gateway)
    await gateway.finished(1)


async def missing_at(worker: str) -> str:
    async with connect(worker) as channel:
        stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        return str((await stub.Health(worker_pb2.WorkerServiceHealthRequest(), wait_for_ready=True)).missing)


async def test_a_worker_that_is_lost_asleep_stands_up_asleep(own_worker: WorkerProcess, listen: str) -> None:
    async with sleeper(own_worker.address, listen) as (engine, gateway):
        whole = (await gateway.generate([1, 2, 3], max_tokens=60)).tokens
        answer = await under_way(gateway, max_tokens=60)
        await sleep(gateway, 2)
        assert "sleeps" in await missing_at(own_worker.address)
        await lost(engine, own_worker)
        own_worker.start()
        await gateway.wait_until_served()
        assert "sleeps" in await missing_at(own_worker.address)
        assert not answer.finish
        await wake_up(gateway)
        await gateway.finished(1)
        assert answer.tokens == whole


async def lost(engine: Engine, worker: WorkerProcess) -> None:
    """Kills the worker and waits until the engine knows."""
    worker.kill()
    while engine.workers.stands:  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.slow
async def test_what_is_lost_can_be_woken_and_then_stands_up_awake(own_worker: WorkerProcess, listen: str) -> None:
    async with sleeper(own_worker.address, listen) as (engine, gateway):
        answer = await under_way(gateway, max_tokens=30)
        await sleep(gateway, 1)
        await lost(engine, own_worker)
        await wake_up(gateway)
        own_worker.start()
        await gateway.finished(1)
        assert answer.finish == {0: FINISH_LENGTH}


@pytest.mark.slow
async def test_what_is_lost_cannot_be_put_to_sleep_and_goes_on_later(own_worker: WorkerProcess, listen: str) -> None:
    async with sleeper(own_worker.address, listen) as (engine, gateway):
        answer = await under_way(gateway, max_tokens=30)
        await lost(engine, own_worker)
        assert "is lost" in (await explained(gateway)).reason
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await sleep(gateway, 1)
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        own_worker.start()
        await gateway.finished(1)
        assert answer.finish == {0: FINISH_LENGTH}


async def test_an_engine_that_starts_again_wakes_the_worker(own_worker: WorkerProcess, listen: str) -> None:
    async with sleeper(own_worker.address, listen) as (_, gateway):
        await sleep(gateway, 2)
    async with sleeper(own_worker.address, listen) as (_, gateway):
        assert (await gateway.generate([1])).finish == {0: FINISH_LENGTH}


async def test_draining_ends_what_lives_after_the_time_of_grace(gateway: Gateway, listen: str) -> None:
    answer = await under_way(gateway, max_tokens=LONG)
    assert (await gateway.stub.Drain(engine_pb2.DrainRequest(grace_ms=300))).live == 1
    await gateway.until(lambda: gateway.draining)
    assert gateway.draining is not None
    assert gateway.draining.grace_ms == 300
    refused = await gateway.submit(2, [1])
    late = Gateway(listen)
    await late.attach()
    await late.until(lambda: late.draining)
    assert late.draining is not None
    assert 0 <= late.draining.grace_ms <= 300
    await gateway.finished(1, 2)
    assert refused.rejected is not None
    assert (refused.rejected.code, refused.rejected.reason) == (14, "DRAINING")
    assert answer.finish == {0: FINISH_ABORT}
    await all_blocks_free(gateway)
    assert (await gateway.stub.Drain(engine_pb2.DrainRequest())).live == 0
    await late.close()


async def test_the_latest_time_of_grace_holds(gateway: Gateway) -> None:
    answer = await under_way(gateway, max_tokens=300)
    await gateway.stub.Drain(engine_pb2.DrainRequest(grace_ms=100))
    await gateway.stub.Drain(engine_pb2.DrainRequest())
    await gateway.until(lambda: gateway.draining and not gateway.draining.HasField("grace_ms"))
    await gateway.finished(1)
    assert answer.finish == {0: FINISH_LENGTH}


async def test_no_grace_ends_all_at_once(gateway: Gateway) -> None:
    answer = await under_way(gateway, max_tokens=LONG)
    await gateway.stub.Drain(engine_pb2.DrainRequest(grace_ms=0))
    await gateway.finished(1)
    assert answer.finish == {0: FINISH_ABORT}
