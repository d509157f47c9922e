"""The worker group comes, goes, hangs and comes back; a client sees a pause and the same tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import common_pb2, engine_pb2, worker_pb2, worker_pb2_grpc
from services.common.errors import FailedPrecondition
from services.common.server import LOOK_S, Server
from services.engine.__main__ import Engine
from services.engine.config import EngineSettings
from services.engine.events import FINISH_LENGTH
from services.engine.workers import WorkerGroup
from tests.engine.cluster import Answer, Gateway, WorkerProcess, running_engine

PROMPTS = {handle: [handle, *range(20 * handle)] for handle in (1, 2, 3)}
SAMPLING: dict[int, dict[str, Any]] = {1: {}, 2: {"n": 2}, 3: {"logprobs": 1, "prompt_logprobs": 0}}
KNOBS: dict[str, Any] = {"num_blocks": 300, "max_num_batched_tokens": 48}


@pytest.fixture
def own_worker(sockets: Path) -> Iterator[WorkerProcess]:
    """A worker that a test may kill; not started yet."""
    process = WorkerProcess(f"unix:{sockets}/own.sock", "--simulated-step-us", "3000")
    yield process
    process.stop()


async def submit_all(gateway: Gateway, max_tokens: int = 60) -> dict[int, Answer]:
    return {
        handle: await gateway.submit(handle, prompt, max_tokens=max_tokens, sampling=dict(SAMPLING[handle]))
        for handle, prompt in PROMPTS.items()
    }


async def all_finished(gateway: Gateway) -> None:
    await asyncio.gather(*(gateway.finished(handle, n=SAMPLING[handle].get("n", 1)) for handle in PROMPTS))


def told(answers: dict[int, Answer]) -> list[Any]:
    return [(answer.tokens, answer.finish, answer.logprobs, answer.prompt_logprobs) for answer in answers.values()]


async def ready(gateway: Gateway, wanted: bool) -> None:
    stub = health_pb2_grpc.HealthStub(gateway.channel)
    status = health_pb2.HealthCheckResponse.SERVING if wanted else health_pb2.HealthCheckResponse.NOT_SERVING
    async for answer in stub.Watch(health_pb2.HealthCheckRequest(), timeout=20):
        if answer.status == status:
            return


async def test_the_engine_may_start_before_its_worker(own_worker: WorkerProcess, listen: str) -> None:
    async with running_engine(own_worker.address, listen, **KNOBS):
        gateway = Gateway(listen)
        await ready(gateway, False)
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await gateway.stub.Hello(engine_pb2.EngineServiceHelloRequest())
        assert missing.value.code() == grpc.StatusCode.UNAVAILABLE
        assert own_worker.address in (missing.value.details() or "")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await gateway.stub.Attach().read()
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        own_worker.start()
        await gateway.wait_until_served()
        await ready(gateway, True)
        await gateway.attach()
        assert (await gateway.generate([1, 2])).finish == {0: FINISH_LENGTH}
        await gateway.close()


async def test_a_killed_worker_is_a_pause_and_the_same_tokens(own_worker: WorkerProcess, listen: str) -> None:
    own_worker.start()
    async with running_engine(own_worker.address, listen, **KNOBS) as engine:
        gateway = Gateway(listen)
        await gateway.wait_until_served()
        await gateway.attach()
        answers = await submit_all(gateway)
        await all_finished(gateway)
        undisturbed = told(answers)

        answers = await submit_all(gateway)
        await gateway.until(lambda: len(answers[1].tokens.get(0, ())) > 15)
        own_worker.kill()
        await ready(gateway, False)
        with pytest.raises(grpc.aio.AioRpcError):
            await gateway.stub.Hello(engine_pb2.EngineServiceHelloRequest())
        assert not any(answer.finish for answer in answers.values())
        waiting = await gateway.submit(9, [4, 5])
        await gateway.until(lambda: gateway.loads[-1].waiting == 5)
        expired = await gateway.submit(10, [4, 5], deadline_ms=20)
        await gateway.finished(10)
        assert expired.failed is not None
        own_worker.start()
        await all_finished(gateway)
        await gateway.finished(9)
        assert told(answers) == undisturbed
        assert waiting.finish == {0: FINISH_LENGTH}
        await gateway.until(lambda: gateway.loads[-1].free_blocks == 300)
        assert engine.workers.stands
        await gateway.close()


async def test_an_engine_that_starts_again_takes_the_worker_over(worker: str, listen: str) -> None:
    whole: list[Any] = []
    for _ in range(2):
        async with running_engine(worker, listen, **KNOBS):
            gateway = Gateway(listen)
            await gateway.wait_until_served()
            await gateway.attach()
            await gateway.submit(5, [1], max_tokens=3000)
            await gateway.until(lambda: gateway.answers[5].tokens)  # noqa: B023
            whole.append((await gateway.generate([1, 2, 3])).tokens)
            await gateway.close()
    assert whole[0] == whole[1]


async def test_a_small_pool_preempts_and_gives_the_same_tokens(worker: str, listen: str) -> None:
    results = []
    for blocks in (600, 12):
        async with running_engine(worker, listen, num_blocks=blocks, output_reserve_blocks=0) as engine:
            gateway = Gateway(listen)
            await gateway.wait_until_served()
            await gateway.attach()
            answers = [await gateway.submit(handle, [handle] * 20, max_tokens=80) for handle in range(1, 6)]
            await gateway.finished(*range(1, 6))
            results.append([answer.tokens for answer in answers])
            assert engine.loop is not None
            labels = {"model_name": engine.loop.standing.model.name, "engine": "engine"}
            preemptions = engine.registry.get_sample_value("vllm:num_preemptions_total", labels)
            assert preemptions is not None
            assert bool(preemptions) == (blocks == 12)
            await gateway.close()
    assert results[0] == results[1]


async def test_an_engine_that_idles_sees_that_its_worker_is_gone(own_worker: WorkerProcess, listen: str) -> None:
    own_worker.start()
    async with running_engine(own_worker.address, listen, **KNOBS):
        gateway = Gateway(listen)
        await ready(gateway, True)
        await asyncio.sleep(1.2 * LOOK_S[True])  # nobody looks any more
        own_worker.kill()
        await ready(gateway, False)
        await gateway.close()


async def test_a_stuck_step_is_a_lost_worker(sockets: Path, listen: str, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"otherwise": {"random": True, "hang_at": 5, "hang_ms": 1500, "times": 1}}))
    process = WorkerProcess(f"unix:{sockets}/stuck.sock", "--script", str(script))
    process.start()
    try:
        async with running_engine(process.address, listen, step_timeout_s=0.6, ready_silence_s=0.3, **KNOBS):
            gateway = Gateway(listen)
            await gateway.wait_until_served()
            await gateway.attach()
            answer = await gateway.submit(1, [1, 2, 3], max_tokens=20)
            await ready(gateway, False)
            await gateway.finished(1)
            assert len(answer.tokens[0]) == 20
            assert (await gateway.generate([1, 2, 3], max_tokens=20)).tokens == answer.tokens
            await ready(gateway, True)
            await gateway.close()
    finally:
        process.stop()


async def test_a_request_that_fails_its_step_fails_alone(sockets: Path, listen: str, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(
        json.dumps({"requests": [{"prompt": [7], "fail_at": 3}, {"prompt": [8], "nan_at": 2}], "otherwise": {}})
    )
    process = WorkerProcess(f"unix:{sockets}/fails.sock", "--script", str(script))
    process.start()
    try:
        async with running_engine(process.address, listen, **KNOBS):
            gateway = Gateway(listen)
            await gateway.wait_until_served()
            await gateway.attach()
            for handle, first in ((1, 5), (2, 7), (3, 8), (4, 6)):
                await gateway.submit(handle, [first, 0, 0], max_tokens=20)
            await gateway.finished(1, 2, 3, 4)
            failed = [gateway.answers[handle].failed for handle in (2, 3)]
            assert all(failure is not None and failure.code == 13 for failure in failed)
            assert [len(gateway.answers[handle].tokens[0]) for handle in (1, 2, 3, 4)] == [20, 3, 2, 20]
            await gateway.until(lambda: gateway.loads[-1].free_blocks == 300)
            await gateway.close()
    finally:
        process.stop()


class OddWorker(worker_pb2_grpc.WorkerServiceServicer):  # type: ignore[misc]
    """Answers as a test wants it to."""

    def __init__(self) -> None:
        self.model = common_pb2.ModelInfo(vocab_size=300, max_model_len=100, fingerprint="f")
        self.peer = common_pb2.Peer(role="worker", incarnation=3, contract_min=1, contract_max=1)
        self.blocks = 10
        self.files = {"config.json": b"{}"}
        self.result: worker_pb2.StepResult | None = None
        self.heartbeats = 0
        self.opened = 0

    async def Hello(self, request: Any, context: Any) -> worker_pb2.WorkerServiceHelloResponse:
        return worker_pb2.WorkerServiceHelloResponse(worker=self.peer, model_path="/m/Odd-1.5B")

    async def Load(self, request: Any, context: Any) -> worker_pb2.LoadResponse:
        files = [common_pb2.TextFileInfo(name=name, size=1, sha256=b"?") for name in self.files]
        return worker_pb2.LoadResponse(model=self.model, kv_groups=[worker_pb2.KvGroup()], text_files=files)

    async def WakeUp(self, request: Any, context: Any) -> worker_pb2.WorkerServiceWakeUpResponse:
        assert request.engine_incarnation
        return worker_pb2.WorkerServiceWakeUpResponse()

    async def PlanMemory(self, request: Any, context: Any) -> worker_pb2.PlanMemoryResponse:
        return worker_pb2.PlanMemoryResponse(num_blocks=self.blocks, bytes_per_block=4, summary="the sum")

    async def InitCache(self, request: Any, context: Any) -> worker_pb2.InitCacheResponse:
        return worker_pb2.InitCacheResponse()

    async def GetTextFiles(self, request: Any, context: Any) -> Any:
        for name, data in self.files.items():
            chunk = common_pb2.TextFileChunk(file=common_pb2.TextFileInfo(name=name), data=data)
            yield worker_pb2.WorkerServiceGetTextFilesResponse(chunk=chunk)

    async def Execute(self, requests: Any, context: Any) -> Any:
        self.opened += 1
        yield worker_pb2.ExecuteResponse(opened=worker_pb2.ExecuteOpened(worker=self.peer))
        async for request in requests:
            self.heartbeats += request.WhichOneof("frame") == "heartbeat"
            if request.WhichOneof("frame") == "step" and self.result is not None:
                yield worker_pb2.ExecuteResponse(result=self.result)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda odd: odd.peer.MergeFrom(common_pb2.Peer(contract_min=2, contract_max=4)), "contract versions 2 to 4"),
        (lambda odd: setattr(odd, "blocks", 5), "8 KV blocks are wanted, 5 fit: the sum"),
        (lambda odd: setattr(odd.model, "max_model_len", 60), "max_model_len is 64, the model was made for 60"),
        (lambda odd: None, "does not match its hash"),
    ],
)
async def test_what_is_missing_is_said(sockets: Path, change: Callable[[OddWorker], None], word: str) -> None:
    odd = OddWorker()
    change(odd)
    address = f"unix:{sockets}/odd.sock"
    server = Server([address])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(odd, server.grpc)
    await server.start("triptych.v1.WorkerService")
    group = WorkerGroup(EngineSettings.build(worker=address, num_blocks=8, max_model_len=64), 1, "v")
    standing = asyncio.create_task(group.stand(None))
    try:
        await until(lambda: word in group.missing)
        assert not group.stands
    finally:
        standing.cancel()
        await group.close()
        await server.stop(0)


async def until(condition: Callable[[], bool]) -> None:
    async def wait() -> None:
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)

    await asyncio.wait_for(wait(), 20)


async def with_odd_engine(
    sockets: Path, listen: str, body: Callable[[OddWorker, Engine, Gateway], Awaitable[None]]
) -> None:
    odd = OddWorker()
    odd.files = {}
    address = f"unix:{sockets}/odd.sock"
    server = Server([address])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(odd, server.grpc)
    await server.start("triptych.v1.WorkerService")
    try:
        async with running_engine(address, listen, lease_s=0.3) as engine:
            gateway = Gateway(listen)
            await gateway.wait_until_served()
            await gateway.attach()
            await body(odd, engine, gateway)
            await gateway.close()
    finally:
        await server.stop(0)


async def test_the_lease_is_kept_while_nothing_runs(sockets: Path, listen: str) -> None:
    async def body(odd: OddWorker, engine: Engine, gateway: Gateway) -> None:
        hello = await gateway.wait_until_served()
        assert hello.model.name == "Odd-1.5B"
        await until(lambda: odd.heartbeats >= 2)
        assert engine.workers.stands

    await with_odd_engine(sockets, listen, body)


async def test_a_result_that_makes_no_sense_is_a_lost_worker(sockets: Path, listen: str) -> None:
    async def body(odd: OddWorker, engine: Engine, gateway: Gateway) -> None:
        odd.result = worker_pb2.StepResult(step_id=1, status=1, row_i32le=b"abc")
        opened = odd.opened
        answer = await gateway.submit(1, [1, 2])
        await until(lambda: odd.opened > opened)
        assert answer.failed is None
        assert answer.tokens == {}
        odd.model.fingerprint = "another"
        await until(lambda: "another model" in engine.workers.missing)

    await with_odd_engine(sockets, listen, body)


def test_more_than_one_rank_is_refused_by_name() -> None:
    with pytest.raises(FailedPrecondition, match="rank"):
        WorkerGroup(EngineSettings.build(worker="a:1,b:2"), 1, "v")
