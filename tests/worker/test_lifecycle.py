"""A model that cannot be loaded, and a worker that is put to sleep and woken, over gRPC."""

from __future__ import annotations

import asyncio
import gc
import logging
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import worker_pb2
from services.common.errors import FailedPrecondition, InvalidArgument, NotFound, TriptychError, Unavailable
from services.common.server import error_of
from services.worker.config import WorkerSettings
from services.worker.lifecycle import CANNOT_LOAD
from services.worker.runner import TorchRunner
from services.worker.simulated import Cost, SimulatedRunner
from services.worker.step import LoadedModel
from tests.worker.columns import SHAPE, frame, new_row, unpack
from tests.worker.harness import Worker, peer, serving, simulated
from tests.worker.tiny_llama import PROMPT, tiny_llama

BLOCK_BYTES = SHAPE.block_size * 1024


async def refused(call: Any) -> TriptychError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_of(caught.value)


def load(worker: Worker, incarnation: int = 5, **changes: Any) -> Any:
    return worker.stub.Load(worker_pb2.LoadRequest(engine=peer(incarnation), **changes))


async def sleep(worker: Worker, level: int, incarnation: int = 5) -> int:
    request = worker_pb2.WorkerServiceSleepRequest(level=level, engine_incarnation=incarnation)
    return int((await worker.stub.Sleep(request)).freed_bytes)


async def wake_up(worker: Worker, incarnation: int = 5) -> None:
    await worker.stub.WakeUp(worker_pb2.WorkerServiceWakeUpRequest(engine_incarnation=incarnation))


async def missing(worker: Worker) -> str:
    return str((await worker.stub.Health(worker_pb2.WorkerServiceHealthRequest())).missing)


class Faulty(SimulatedRunner):
    """Fails to load with each of these errors in turn, then loads."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__("", Cost(), SHAPE.max_model_len)
        self.errors = list(errors)
        self.loads = 0

    def load(self, model_path: str, dtype: str | None, quantization: str | None = None) -> LoadedModel:
        self.loads += 1
        self.asked = (model_path, dtype, quantization)
        if self.errors:
            raise self.errors.pop(0)
        return super().load(model_path, dtype)


class TestFailedLoad:
    @pytest.mark.parametrize("error", [NotFound("no such file"), InvalidArgument("no", field="dtype")])
    async def test_what_will_fail_again_is_a_failed_precondition(self, tmp_path: Path, error: TriptychError) -> None:
        async with serving(Faulty(error), tmp_path) as worker:
            told = await refused(load(worker))
            assert (type(told), told.reason) == (FailedPrecondition, CANNOT_LOAD)
            assert (told.message, told.field) == (error.message, error.field)
            assert f"failed to load: {error.message}" in await missing(worker)

    async def test_what_may_pass_is_unavailable(self, tmp_path: Path) -> None:
        async with serving(Faulty(OSError("disk asleep")), tmp_path) as worker:
            told = await refused(load(worker))
            assert isinstance(told, Unavailable)
            assert "OSError: disk asleep" in told.message

    async def test_it_is_not_tried_again_before_a_pause(self, tmp_path: Path) -> None:
        runner = Faulty(NotFound("no such file"))
        async with serving(runner, tmp_path, retry_s=3600) as worker:
            first = await refused(load(worker))
            assert (await refused(load(worker))).message == first.message
            assert runner.loads == 1

    async def test_another_question_is_tried_at_once(self, tmp_path: Path) -> None:
        runner = Faulty(NotFound("no such file"))
        async with serving(runner, tmp_path, retry_s=3600) as worker:
            await refused(load(worker))
            assert (await load(worker, dtype="float16")).model.dtype == "float16"

    async def test_a_quantization_is_part_of_the_question(self, tmp_path: Path) -> None:
        runner = Faulty(NotFound("no such file"))
        async with serving(runner, tmp_path, retry_s=3600) as worker:
            await refused(load(worker, model_path="m"))
            for _ in range(2):
                await load(worker, model_path="", dtype="float16", quantization="int8")
            assert (runner.loads, runner.asked) == (2, ("", "float16", "int8"))

    async def test_who_has_no_weights_refuses_a_quantization(self, tmp_path: Path) -> None:
        async with serving(simulated(), tmp_path) as worker:
            told = await refused(load(worker, quantization="int8"))
            assert (told.field, told.reason) == ("quantization", CANNOT_LOAD)

    async def test_one_line_per_reason(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(logging.getLogger("triptych"), "propagate", True)
        runner = Faulty(NotFound("one"), NotFound("one"), NotFound("two"), OSError("two"), NotFound("one"))
        async with serving(runner, tmp_path, retry_s=0) as worker:
            for _ in range(5):
                await refused(load(worker))
            assert (await load(worker)).model.vocab_size == 259
        assert runner.loads == 6
        told = [record.__dict__["fields"]["error"] for record in caplog.records if record.levelname == "ERROR"]
        assert told == ["one", "two", "one"]


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    async with serving(simulated(), tmp_path) as standing:
        await standing.prepare()
        yield standing


class TestSleep:
    async def test_frees_once_per_level_and_wakes_with_the_same_cache(self, worker: Worker) -> None:
        assert await sleep(worker, 1) == SHAPE.num_blocks * BLOCK_BYTES
        assert "sleeps at level 1" in await missing(worker)
        assert await sleep(worker, 1) == 0
        assert await sleep(worker, 2) == 0  # a simulated worker has no weights
        assert await sleep(worker, 1) == 0
        assert "sleeps at level 2" in await missing(worker)
        await wake_up(worker)
        assert await missing(worker) == ""
        await wake_up(worker)
        assert await sleep(worker, 2) == SHAPE.num_blocks * BLOCK_BYTES

    @pytest.mark.parametrize("level", [0, 3])
    async def test_other_levels_are_refused(self, worker: Worker, level: int) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await sleep(worker, level)
        told = error_of(caught.value)
        assert isinstance(told, InvalidArgument)
        assert (told.field, f"level {level}" in told.message) == ("level", True)
        assert await missing(worker) == ""

    async def test_only_the_holder_sends_it_to_sleep(self, worker: Worker) -> None:
        for call in (sleep(worker, 1, incarnation=9), wake_up(worker, incarnation=9)):
            assert "does not hold this worker" in (await refused(call)).message
        assert await missing(worker) == ""

    @pytest.mark.parametrize("level", [1, 2])
    async def test_the_stream_goes_on_and_steps_are_refused_until_it_wakes(self, worker: Worker, level: int) -> None:
        stream = await worker.open()
        assert (await stream.run(frame(1, [(0, 0, 2)], [new_row(0, b"ab")]))).status == worker_pb2.STEP_STATUS_OK
        await sleep(worker, level)
        failed = await stream.run(frame(2, [(0, 2, 1)]))
        assert (failed.status, failed.failure.code) == (worker_pb2.STEP_STATUS_FAILED, 9)
        assert "WakeUp" in failed.failure.message
        await wake_up(worker)
        result = await stream.run(frame(3, [(0, 2, 1), (1, 0, 2)], [new_row(1, b"ab")], resync=True))
        assert result.row_status_u8 == b"\3\0"  # the rows were emptied

    async def test_steps_sent_before_are_run_before(self, worker: Worker) -> None:
        stream = await worker.open()
        await stream.send(step=frame(1, [(0, 0, 2)], [new_row(0, b"ab")]))
        assert (await stream.result()).status == worker_pb2.STEP_STATUS_OK
        await stream.send(step=frame(2, [(0, 2, 1)]))
        second = asyncio.ensure_future(stream.result())
        await sleep(worker, 1)
        assert (await second).status in (worker_pb2.STEP_STATUS_OK, worker_pb2.STEP_STATUS_FAILED)

    async def test_an_engine_that_comes_anew_wakes_it_by_what_it_does_anyway(self, worker: Worker) -> None:
        await sleep(worker, 2)
        plan = worker_pb2.PlanMemoryRequest(
            engine_incarnation=5, max_num_batched_tokens=32, max_num_seqs=4, max_model_len=64, block_size=4
        )
        for call in (worker.stub.PlanMemory(plan), worker.stub.InitCache(worker.shape(5))):
            assert "no weights" in (await refused(call)).message
        first = worker.stub.Execute()
        await first.write(worker_pb2.ExecuteRequest(open=worker_pb2.ExecuteOpen(engine=peer(5), lease_ms=1000)))
        assert "sleeps at level 2" in (await refused(first.read())).message
        await worker.prepare(6)
        assert await missing(worker) == ""
        stream = await worker.open(6)
        assert (await stream.run(frame(1, [(0, 0, 1)], [new_row(0, [4])]))).status == worker_pb2.STEP_STATUS_OK

    async def test_nothing_to_free_without_a_model(self, tmp_path: Path) -> None:
        async with serving(simulated(), tmp_path) as worker:
            await load(worker)
            assert await sleep(worker, 1) == 0
            await wake_up(worker)
            assert "KV cache" in await missing(worker)

    async def test_metrics_follow(self, worker: Worker) -> None:
        plan = worker_pb2.PlanMemoryRequest(
            engine_incarnation=5,
            max_num_batched_tokens=32,
            max_num_seqs=4,
            max_model_len=64,
            block_size=4,
            kv_cache_bytes=64 * BLOCK_BYTES,
        )
        await worker.stub.PlanMemory(plan)
        assert worker.metric("triptych:worker_memory_bytes", part="kv") == 64 * BLOCK_BYTES
        await sleep(worker, 1)
        assert worker.metric("triptych:worker_memory_bytes", part="kv") == 0
        await wake_up(worker)
        assert worker.metric("triptych:worker_memory_bytes", part="kv") == 64 * BLOCK_BYTES


class TestRealModel:
    async def test_the_tensors_go_and_the_same_tokens_come_back(self, tmp_path: Path) -> None:
        path = str(tiny_llama(tmp_path / "tiny"))
        runner = TorchRunner(WorkerSettings.build(threads=1, deterministic=True))
        (tmp_path / "sockets").mkdir()
        async with serving(runner, tmp_path / "sockets") as worker:
            loaded = await load(worker, model_path=path)
            await worker.stub.InitCache(worker.shape(5))
            stream = await worker.open()
            whole = frame(1, [(0, 0, len(PROMPT))], [new_row(0, PROMPT, temperature=0.0)])
            right = unpack((await stream.run(whole)).token_id_i32le)
            kv_bytes = SHAPE.num_blocks * SHAPE.block_size * loaded.kv_groups[0].bytes_per_token
            for number, level in enumerate((1, 2)):
                cache, (model, _) = runner._cache, runner._model_of("test")
                assert cache is not None
                tensors = [weakref.ref(cache.tensor), weakref.ref(model._weights.embedding)]
                del cache, model
                assert await sleep(worker, level) == kv_bytes + (loaded.weight_bytes if level == 2 else 0)
                gc.collect()
                assert [tensor() is None for tensor in tensors] == [True, level == 2]
                await wake_up(worker)
                whole.step_id, whole.resync = 2 + number, True
                assert unpack((await stream.run(whole)).token_id_i32le) == right
