"""The worker group at its edges: what it says of a loss, whom a loss is blamed on, and how it waits."""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from protos import engine_pb2, worker_pb2, worker_pb2_grpc
from services.common.errors import (
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    TriptychError,
    Unavailable,
)
from services.common.server import Server
from services.engine import workers
from services.engine.__main__ import Engine
from services.engine.config import EngineSettings
from services.engine.events import FINISH_LENGTH
from services.engine.workers import WorkerGroup, WorkerLost, longest_pause_s
from tests.engine.cluster import Gateway, WorkerProcess, running_engine
from tests.engine.test_workers import OddWorker, until


class AnsweringWorker(OddWorker):
    """Gives token 7 to whoever samples, and keeps the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.files = {}
        self.steps: list[worker_pb2.Step] = []
        self.refusal: TriptychError | None = None
        self.loads = 0
        self._epochs: dict[int, int] = {}

    async def Load(self, request: Any, context: Any) -> worker_pb2.LoadResponse:
        self.loads += 1
        if self.refusal is not None:
            raise self.refusal
        return await super().Load(request, context)

    async def Execute(self, requests: Any, context: Any) -> Any:
        yield worker_pb2.ExecuteResponse(opened=worker_pb2.ExecuteOpened(worker=self.peer))
        async for request in requests:
            if self.refusal is not None:
                raise self.refusal
            if request.WhichOneof("frame") == "step":
                yield worker_pb2.ExecuteResponse(result=self._answer(request.step))

    def _answer(self, step: worker_pb2.Step) -> worker_pb2.StepResult:
        self.steps.append(step)
        self._epochs.update({new.row: new.epoch for new in step.new_rows})
        rows = [row for row, flags in zip(array("i", step.row_i32le), step.flags_u8, strict=True) if flags & 1]
        return worker_pb2.StepResult(
            step_id=step.step_id,
            status=worker_pb2.STEP_STATUS_OK,
            row_i32le=array("i", rows).tobytes(),
            epoch_u64le=array("Q", [self._epochs[row] for row in rows]).tobytes(),
            row_status_u8=bytes(len(rows)),
            token_count_i32le=array("i", [1] * len(rows)).tobytes(),
            token_id_i32le=array("i", [7] * len(rows)).tobytes(),
        )


@asynccontextmanager
async def served(worker: AnsweringWorker, address: str) -> AsyncIterator[None]:
    server = Server([address])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(worker, server.grpc)
    await server.start("triptych.v1.WorkerService")
    try:
        yield
    finally:
        await server.stop(0)


async def test_rows_are_freed_even_if_nothing_runs_after_them(sockets: Path, listen: str) -> None:
    answering, address = AnsweringWorker(), f"unix:{sockets}/answers.sock"
    async with served(answering, address), running_engine(address, listen):
        gateway = Gateway(listen)
        await gateway.wait_until_served()
        await gateway.attach()
        answer = await gateway.generate([1, 2, 3], max_tokens=4)
        assert answer.tokens == {0: [7] * 4}
        await until(lambda: not answering.steps[-1].row_i32le)
        last = answering.steps[-1]
        assert list(array("i", last.freed_row_i32le)) == [0]
        assert (await gateway.generate([4], handle=2, max_tokens=2)).finish == {0: FINISH_LENGTH}
        await gateway.close()


@pytest.mark.parametrize("kind", [FailedPrecondition, InvalidArgument, NotFound])
def test_what_is_refused_is_asked_for_seldom(kind: type[TriptychError]) -> None:
    assert longest_pause_s(kind("no model")) == 30
    assert longest_pause_s(Unavailable("not yet")) == 1


async def test_a_reason_is_logged_once(
    sockets: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(workers, "_FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(workers, "_LONGEST_PAUSE_REFUSED_S", 0.02)
    answering, address = AnsweringWorker(), f"unix:{sockets}/refuses.sock"
    answering.refusal = NotFound("there is no model at /nowhere")
    group = WorkerGroup(EngineSettings.build(worker=address, num_blocks=8), 1, "v")
    async with served(answering, address):
        standing = asyncio.create_task(group.stand(None))
        await until(lambda: answering.loads >= 5)
        assert "there is no model at /nowhere" in group.missing
        answering.refusal = FailedPrecondition("another reason")
        await until(lambda: "another reason" in group.missing)
        answering.refusal = None
        await standing
        await group.close()
    said = [record for record in caplog.records if record.getMessage() == "worker group does not stand"]
    assert len(said) == 2
    assert all(record.levelno == logging.WARNING for record in said)


async def lost(group: WorkerGroup) -> WorkerLost:
    """Waits for the loss."""
    while True:
        await group.changed.wait()
        group.changed.clear()
        try:
            group.take()
        except WorkerLost as loss:
            return loss


async def test_an_end_that_the_worker_announces_is_no_death(sockets: Path) -> None:
    answering, address = AnsweringWorker(), f"unix:{sockets}/ends.sock"
    group = WorkerGroup(EngineSettings.build(worker=address, num_blocks=8, lease_s=0.3), 1, "v")
    async with served(answering, address):
        await group.stand(None)
        answering.refusal = Unavailable("the worker is ending")
        loss = await lost(group)
        assert not loss.died
        assert "the worker is ending" in str(loss)
        assert "the worker is ending" in group.missing
    await group.close()


async def test_a_killed_process_is_a_death(sockets: Path) -> None:
    process = WorkerProcess(f"unix:{sockets}/dies.sock")
    process.start()
    group = WorkerGroup(EngineSettings.build(worker=process.address, num_blocks=8), 1, "v")
    try:
        await group.stand(None)
        process.kill()
        assert (await lost(group)).died
    finally:
        await group.close()
        process.stop()


@asynccontextmanager
async def supervised(process: WorkerProcess) -> AsyncIterator[Callable[[], int]]:
    """Starts the worker again whenever it has died; how often that was."""
    deaths = 0

    async def watch() -> None:
        nonlocal deaths
        while True:
            await asyncio.sleep(0.02)
            if process.ended:
                deaths += 1
                process.start()

    process.start()
    watching = asyncio.create_task(watch())
    try:
        yield lambda: deaths
    finally:
        watching.cancel()
        process.stop()


async def with_gateway(engine: Engine, listen: str) -> Gateway:
    gateway = Gateway(listen)
    await gateway.wait_until_served()
    await gateway.attach()
    return gateway


async def test_a_request_that_kills_workers_fails_and_the_others_end_as_if_alone(
    sockets: Path, listen: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"requests": [{"prompt": [7], "die_at": 0}], "otherwise": {"random": True}}))
    process = WorkerProcess(f"unix:{sockets}/poison.sock", "--script", str(script))
    async with supervised(process) as deaths, running_engine(process.address, listen, num_blocks=300) as engine:
        gateway = await with_gateway(engine, listen)
        alone = {handle: (await gateway.generate([handle, 0], handle=handle)).tokens for handle in (1, 2)}
        await gateway.stub.Pause(engine_pb2.PauseRequest())
        for handle, first in ((1, 1), (2, 2), (3, 7)):
            await gateway.submit(handle, [first, 0])
        await gateway.until(lambda: gateway.loads[-1].waiting == 3)
        await gateway.stub.Unpause(engine_pb2.UnpauseRequest())
        await gateway.finished(1, 2, 3)
        failed = gateway.answers[3].failed
        assert failed is not None
        assert failed.code == 13
        assert "workers died over the request" in failed.message
        assert {handle: gateway.answers[handle].tokens for handle in (1, 2)} == alone
        assert deaths() == 3, "twice together, once alone"
        await gateway.close()
