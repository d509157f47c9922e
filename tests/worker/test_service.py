"""The service over real gRPC with a simulated runner: lifecycle, steps, lease, failures."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from protos import common_pb2, worker_pb2
from services.common.channel import backoff
from services.worker.simulated import Cost, SimulatedRunner
from services.worker.step import LoadedModel
from tests.worker.columns import SHAPE, frame, new_row, pack, unpack
from tests.worker.harness import Worker, peer, serving, simulated, texts

OK, FAILED, SKIPPED = worker_pb2.STEP_STATUS_OK, worker_pb2.STEP_STATUS_FAILED, worker_pb2.STEP_STATUS_SKIPPED


@pytest.fixture
async def worker(tmp_path: Path) -> AsyncIterator[Worker]:
    script = tmp_path / "script.json"
    entries = [
        {"contains": "fail", "fail_at": 1, "text": "abc", "times": 1},
        {"contains": "hang", "hang_at": 0},
        {"contains": "nan", "nan_at": 0},
    ]
    script.write_text(json.dumps({"requests": entries, "otherwise": {"text": "hello", "then": "repeat"}}))
    runner = simulated(script)
    async with serving(runner, tmp_path) as standing:
        yield standing
        runner.release()


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def ended(stream: Any) -> tuple[grpc.StatusCode, str]:
    """How the worker ended the stream; answers before its end do not matter."""
    while True:
        try:
            assert await stream.call.read() is not grpc.aio.EOF
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Waits for something that the worker will do."""
    async for _ in backoff(0.001):
        if await condition():
            return


class TestLifecycle:
    async def test_hello_before_and_after_a_model(self, worker: Worker) -> None:
        hello = await worker.stub.Hello(worker_pb2.WorkerServiceHelloRequest(engine=peer(5)))
        assert (hello.device, hello.ranks, hello.worker.role) == ("simulated", 1, "worker")
        assert not hello.HasField("model")
        assert not hello.HasField("leased_to")
        assert "a model" in (await worker.stub.Health(worker_pb2.WorkerServiceHealthRequest())).missing
        await worker.prepare()
        hello = await worker.stub.Hello(worker_pb2.WorkerServiceHelloRequest(engine=peer(5)))
        assert hello.model.vocab_size == 259
        assert hello.leased_to == 5
        health = await worker.stub.Health(worker_pb2.WorkerServiceHealthRequest())
        assert (health.missing, health.silence_ms, health.steps) == ("", 0, 0)

    async def test_load_is_idempotent_and_names_its_files(self, worker: Worker) -> None:
        first = await worker.stub.Load(worker_pb2.LoadRequest(engine=peer(5)))
        again = await worker.stub.Load(worker_pb2.LoadRequest(engine=peer(5)))
        assert first == again
        assert [group.bytes_per_token for group in first.kv_groups] == [1024]
        assert len(first.model.fingerprint) == 64

    async def test_memory_is_planned_or_refused_with_the_sum(self, worker: Worker) -> None:
        await worker.stub.Load(worker_pb2.LoadRequest(engine=peer(5)))
        request = worker_pb2.PlanMemoryRequest(
            engine_incarnation=5,
            max_num_batched_tokens=32,
            max_num_seqs=4,
            max_model_len=64,
            block_size=4,
            kv_cache_bytes=1 << 20,
        )
        plan = await worker.stub.PlanMemory(request)
        assert (plan.num_blocks, plan.bytes_per_block, plan.kv_cache_bytes) == (256, 4096, 1 << 20)
        assert "256 blocks" in plan.summary
        request.kv_cache_bytes = 4 * 4096
        code, message = await refused(worker.stub.PlanMemory(request))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert "needs 16 blocks" in message
        request.kv_cache_bytes = 100
        assert "not even one KV block" in (await refused(worker.stub.PlanMemory(request)))[1]

    async def test_text_files_arrive_whole(self, worker: Worker) -> None:
        loaded = await worker.stub.Load(worker_pb2.LoadRequest(engine=peer(5)))
        files: dict[str, bytes] = {}
        async for message in worker.stub.GetTextFiles(worker_pb2.WorkerServiceGetTextFilesRequest()):
            files[message.chunk.file.name] = files.get(message.chunk.file.name, b"") + message.chunk.data
        for info in loaded.text_files:
            assert (len(files[info.name]), hashlib.sha256(files[info.name]).digest()) == (info.size, info.sha256)
        request = worker_pb2.WorkerServiceGetTextFilesRequest(names=["tokenizer.jsn"])
        code, message = await refused(worker.stub.GetTextFiles(request).read())
        assert code == grpc.StatusCode.NOT_FOUND
        assert "tokenizer.json" in message

    async def test_what_is_missing_is_said(self, worker: Worker) -> None:
        code, _ = await refused(worker.stub.InitCache(worker.shape(5)))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        stream = worker.stub.Execute()
        await stream.write(worker_pb2.ExecuteRequest(open=worker_pb2.ExecuteOpen(engine=peer(5), lease_ms=1)))
        code, message = await refused(stream.read())
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert "a model" in message

    async def test_what_is_not_built_is_refused_by_name(self, worker: Worker) -> None:
        calls = {
            "Profile": worker.stub.Profile(worker_pb2.WorkerServiceProfileRequest(start=True)),
            "rank": worker.stub.Load(worker_pb2.LoadRequest(engine=peer(5), tensor_size=2)),
        }
        for name, call in calls.items():
            code, message = await refused(call)
            assert code == grpc.StatusCode.UNIMPLEMENTED
            assert name in message

    async def test_an_engine_of_another_contract_is_refused(self, worker: Worker) -> None:
        engine = common_pb2.Peer(role="engine", incarnation=5, contract_min=2, contract_max=3)
        code, message = await refused(worker.stub.Load(worker_pb2.LoadRequest(engine=engine)))
        assert code == grpc.StatusCode.FAILED_PRECONDITION
        assert "contract 1" in message

    async def test_hello_answers_while_a_model_is_loading(self, tmp_path: Path) -> None:
        gate = _Gate()
        async with serving(gate, tmp_path) as worker:
            loading = asyncio.ensure_future(worker.stub.Load(worker_pb2.LoadRequest(engine=peer(5))))

            async def being_loaded() -> bool:
                return "is being loaded" in (await worker.stub.Health(worker_pb2.WorkerServiceHealthRequest())).missing

            await until(being_loaded)
            gate.open.set()
            assert (await loading).model.vocab_size == 259


class _Gate(SimulatedRunner):
    """Loads once it is let."""

    def __init__(self) -> None:
        super().__init__("", Cost(), SHAPE.max_model_len)
        self.open = threading.Event()

    def load(self, model_path: str, dtype: str | None, quantization: str | None = None) -> LoadedModel:
        self.open.wait()
        return super().load(model_path, dtype, quantization)


class TestSteps:
    async def test_two_in_flight_from_the_first_token_on(self, worker: Worker) -> None:
        """The second step is sent before the first is answered: its input is the token that it samples."""
        await worker.prepare()
        stream = await worker.open()
        await stream.send(step=frame(1, [(0, 0, 3)], [new_row(0, [1, 2, 3], epoch=11)]))
        results = []
        for number in range(2, 12):
            await stream.send(step=frame(number, [(0, number + 1, 1)]))
            results.append(await stream.result())
        results.append(await stream.result())
        assert [result.step_id for result in results] == list(range(1, 12))
        assert texts(results) == b"hellohelloh"
        assert {result.status for result in results} == {OK}
        assert worker.metric("triptych:worker_sampled_tokens_total") == 11
        assert worker.metric("triptych:worker_step_tokens_count") == 11
        assert worker.metric("triptych:worker_step_tokens_sum") == 13
        assert (await worker.stub.Health(worker_pb2.WorkerServiceHealthRequest())).steps == 11

    async def test_a_row_given_to_another_request_answers_with_its_own_epoch(self, worker: Worker) -> None:
        await worker.prepare()
        stream = await worker.open()
        first = await stream.run(frame(1, [(0, 0, 2), (1, 0, 2)], [new_row(0, [1, 2], 21), new_row(1, [1, 2], 22)]))
        assert first.epoch_u64le == (21).to_bytes(8, "little") + (22).to_bytes(8, "little")
        await stream.send(step=frame(2, [(0, 2, 1), (1, 2, 1)]))
        await stream.send(step=frame(3, [(0, 0, 2), (1, 3, 1)], [new_row(0, [7, 8], 23)], freed=[0]))
        assert (await stream.result()).epoch_u64le[:8] == (21).to_bytes(8, "little")
        third = await stream.result()
        assert third.epoch_u64le == (23).to_bytes(8, "little") + (22).to_bytes(8, "little")
        assert texts([third]) == b"hl"

    async def test_a_chunk_that_does_not_sample_gives_no_row(self, worker: Worker) -> None:
        await worker.prepare()
        stream = await worker.open()
        result = await stream.run(frame(1, [(0, 0, 2)], [new_row(0, [1, 2, 3])], flags=0))
        assert (result.status, result.row_i32le, result.token_id_i32le) == (OK, b"", b"")

    async def test_single_bad_rows_fail_alone(self, worker: Worker) -> None:
        """A request at fault, one with NaN, one whose ids are not known, and a good one, in one step."""
        await worker.prepare()
        stream = await worker.open()
        new = [new_row(0, [5], 31, temperature=-1.0), new_row(1, b"nan", 32), new_row(2, [5], 33)]
        result = await stream.run(frame(1, [(0, 0, 1), (1, 0, 3), (3, 0, 1), (2, 0, 1)], new))
        assert result.status == OK
        assert unpack(result.row_i32le) == [0, 1, 3, 2]
        assert result.row_status_u8 == bytes([3, 1, 3, 0])
        assert unpack(result.token_count_i32le) == [0, 0, 0, 1]
        again = await stream.run(frame(2, [(0, 1, 1), (2, 1, 1)], freed=[1]))
        assert again.row_status_u8 == bytes([3, 0])
        assert texts([again]) == b"e"
        assert worker.metric("triptych:worker_failed_rows_total", reason="failed") == 3
        assert worker.metric("triptych:worker_failed_rows_total", reason="not_finite") == 1

    async def test_failed_skipped_resync(self, worker: Worker) -> None:
        await worker.prepare()
        stream = await worker.open()
        assert texts([await stream.run(frame(1, [(0, 0, 4)], [new_row(0, b"fail", 41)]))]) == b"a"
        await stream.send(step=frame(2, [(0, 4, 1)]))
        await stream.send(step=frame(3, [(0, 5, 1)]))
        failed, skipped = await stream.result(), await stream.result()
        assert (failed.step_id, failed.status, failed.failure.code) == (2, FAILED, 13)
        assert failed.failure.error_id in failed.failure.message
        assert (skipped.step_id, skipped.status) == (3, SKIPPED)
        assert (await stream.run(frame(4, [(0, 5, 1)]))).status == SKIPPED
        resumed = new_row(0, b"faila", 42, prompt_len=4)
        result = await stream.run(frame(5, [(0, 0, 5)], [resumed], freed=[0], resync=True))
        assert (result.status, texts([result])) == (OK, b"b")

    async def test_a_malformed_frame_is_answered_and_the_worker_goes_on(self, worker: Worker) -> None:
        await worker.prepare()
        stream = await worker.open()
        bad = frame(1, [(0, 0, 2)], [new_row(0, [1, 2])])
        bad.num_tokens_i32le = pack(2, 2)
        failed = await stream.run(bad)
        assert (failed.status, failed.failure.code, failed.failure.field) == (FAILED, 3, "num_tokens_i32le")
        encoding = frame(2, [(0, 0, 2)], [new_row(0, [1, 2])], flags=8, resync=True)
        masked = await stream.run(encoding)
        assert (masked.status, masked.failure.code, masked.failure.field) == (FAILED, 3, "flags_u8")
        good = await stream.run(frame(3, [(0, 0, 2)], [new_row(0, [1, 2])], resync=True))
        assert (good.status, texts([good])) == (OK, b"h")

    async def test_frames_out_of_place_end_the_stream(self, worker: Worker) -> None:
        await worker.prepare()
        wrong = {
            "step_id": (grpc.StatusCode.INVALID_ARGUMENT, {"step": frame(0)}),
            "masks": (grpc.StatusCode.INVALID_ARGUMENT, {"masks": worker_pb2.StepMasks(step_id=1)}),
            "frame": (grpc.StatusCode.INVALID_ARGUMENT, {}),
        }
        for name, (code, kind) in wrong.items():
            stream = await worker.open()
            await stream.run(frame(0))
            await stream.send(**kind)
            assert (await ended(stream))[0] == code, name
        first = worker.stub.Execute()
        await first.write(worker_pb2.ExecuteRequest(step=frame(1)))
        code, message = await refused(first.read())
        assert (code, "open" in message) == (grpc.StatusCode.INVALID_ARGUMENT, True)

    async def test_draining_waits_for_steps_and_not_for_ever(self, worker: Worker) -> None:
        await worker.service.drain(60)
        await worker.prepare()
        stream = await worker.open()
        await stream.run(frame(1, [(0, 0, 2)], [new_row(0, [1, 2])]))
        await worker.service.drain(60)
        await stream.send(step=frame(2, [(1, 0, 4)], [new_row(1, b"hang")]))
        await worker.service.drain(0.05)

    async def test_silence_is_seen_while_a_step_is_stuck(self, worker: Worker) -> None:
        await worker.prepare()
        stream = await worker.open()
        await stream.send(step=frame(1, [(0, 0, 4)], [new_row(0, b"hang")]))

        async def silent() -> bool:
            return (await worker.stub.Health(worker_pb2.WorkerServiceHealthRequest())).silence_ms >= 5

        await until(silent)


class TestLease:
    async def test_a_newer_engine_fences_the_older_one(self, worker: Worker) -> None:
        await worker.prepare(5)
        old = await worker.open(5)
        await old.run(frame(1, [(0, 0, 2)], [new_row(0, [1, 2])]))
        await worker.prepare(6)
        assert (await ended(old))[0] == grpc.StatusCode.ABORTED
        new = await worker.open(6)
        result = await new.run(frame(1, [(0, 0, 1)]))
        assert result.row_status_u8 == b"\3"  # the rows of the older engine are gone
        for call in (
            worker.stub.Load(worker_pb2.LoadRequest(engine=peer(5))),
            worker.stub.InitCache(worker.shape(5)),
        ):
            assert (await refused(call))[0] == grpc.StatusCode.ABORTED
        again = worker.stub.Execute()
        await again.write(worker_pb2.ExecuteRequest(open=worker_pb2.ExecuteOpen(engine=peer(5), lease_ms=1000)))
        assert (await refused(again.read()))[0] == grpc.StatusCode.ABORTED
        assert (await new.run(frame(2, [(1, 0, 1)], [new_row(1, [4])]))).status == OK

    async def test_a_fenced_stream_ends_although_its_step_is_stuck(self, worker: Worker) -> None:
        await worker.prepare(5)
        old = await worker.open(5)
        await old.send(step=frame(1, [(0, 0, 4)], [new_row(0, b"hang")]))
        await worker.stub.Load(worker_pb2.LoadRequest(engine=peer(6)))
        assert (await ended(old))[0] == grpc.StatusCode.ABORTED

    async def test_without_frames_the_lease_ends_and_the_model_stays(self, worker: Worker) -> None:
        await worker.prepare()
        stream = await worker.open(lease_ms=50)
        assert (await ended(stream))[0] == grpc.StatusCode.DEADLINE_EXCEEDED
        hello = await worker.stub.Hello(worker_pb2.WorkerServiceHelloRequest(engine=peer(5)))
        assert not hello.HasField("leased_to")
        assert hello.HasField("model")
        again = await worker.open()
        assert (await again.run(frame(1, [(0, 0, 1)], [new_row(0, [4])]))).status == OK

    async def test_heartbeats_keep_it(self, worker: Worker) -> None:
        await worker.prepare()
        stream = await worker.open(lease_ms=1500)
        for _ in range(8):
            await stream.send(heartbeat=worker_pb2.ExecuteHeartbeat())
            await asyncio.sleep(0.2)
        assert (await stream.run(frame(1, [(0, 0, 1)], [new_row(0, [4])]))).status == OK

    async def test_the_same_engine_may_open_again_with_empty_rows(self, worker: Worker) -> None:
        await worker.prepare()
        first = await worker.open()
        await first.run(frame(9, [(0, 0, 1)], [new_row(0, [4])]))
        second = await worker.open()
        assert (await ended(first))[0] == grpc.StatusCode.ABORTED
        result = await second.run(frame(1, [(0, 1, 1)]))
        assert result.row_status_u8 == b"\3"

    async def test_an_engine_that_hangs_up_gives_the_lease_back(self, worker: Worker) -> None:
        await worker.prepare()
        stream = await worker.open()
        stream.call.cancel()

        async def free() -> bool:
            hello = await worker.stub.Hello(worker_pb2.WorkerServiceHelloRequest(engine=peer(5)))
            return not hello.HasField("leased_to")

        await until(free)

    async def test_only_the_holder_plans_memory(self, worker: Worker) -> None:
        await worker.prepare(5)
        code, message = await refused(worker.stub.InitCache(worker.shape(99)))
        assert (code, "call Load first" in message) == (grpc.StatusCode.FAILED_PRECONDITION, True)
