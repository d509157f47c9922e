"""A real worker process (simulated model), a real engine in this process, and a plain gateway."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from protos import common_pb2, engine_pb2, engine_pb2_grpc
from services.common.channel import connect
from services.engine.__main__ import Engine
from services.engine.config import EngineSettings

ROOT = Path(__file__).resolve().parents[2]
VOCABULARY = 259
EOS = 258
LONG = 4000  # output tokens of a request that outlives its test


class WorkerProcess:
    """A worker on a unix socket, simulated unless told otherwise; killed and started again at will."""

    def __init__(self, address: str, *options: str, simulated: bool = True) -> None:
        self.address = address
        self._options = ("--simulated", *options) if simulated else options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "services.worker", "--listen", self.address]
        command += ["--metrics-port", "0", "--log-level", "warning", *self._options]
        self._process = subprocess.Popen(command, cwd=ROOT)

    @property
    def ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()


@asynccontextmanager
async def running_engine(worker: str, listen: str, **knobs: Any) -> AsyncIterator[Engine]:
    """An engine in this process, served on a socket."""
    engine = Engine(EngineSettings.build(worker=worker, listen=listen, **{"heartbeat_s": 0.2, **knobs}))
    task = asyncio.create_task(engine.run())
    try:
        yield engine
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await engine.close()


@dataclass
class Answer:
    """What a gateway has been told about one request."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    finish: dict[int, int] = field(default_factory=dict)
    logprobs: list[tuple[int, float, int]] = field(default_factory=list)
    prompt_logprobs: dict[int, int] = field(default_factory=dict)  # position → entries
    vector: list[float] | None = None
    started: engine_pb2.Started | None = None
    rejected: common_pb2.Failure | None = None
    failed: common_pb2.Failure | None = None
    frames: int = 0


class Gateway:
    """Speaks Attach as the contract has it, and drops by first_index what it has."""

    def __init__(self, address: str, incarnation: int | None = None) -> None:
        self.incarnation = incarnation or secrets.randbits(63) | 1
        self.channel = connect(address)
        self.stub: Any = engine_pb2_grpc.EngineServiceStub(self.channel)
        self.answers: dict[int, Answer] = {}
        self.loads: list[common_pb2.Load] = []
        self.welcome: engine_pb2.AttachWelcome | None = None
        self.draining: engine_pb2.Draining | None = None
        self.broken: Exception | None = None
        self._call: Any = None
        self._reader: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()

    async def wait_until_served(self) -> engine_pb2.EngineServiceHelloResponse:
        while True:
            try:
                return await self.stub.Hello(engine_pb2.EngineServiceHelloRequest(), wait_for_ready=True)
            except Exception:
                await asyncio.sleep(0.02)

    async def attach(self) -> None:
        self._call = self.stub.Attach()
        peer = common_pb2.Peer(
            role="gateway", name="test", incarnation=self.incarnation, contract_min=1, contract_max=1
        )
        await self._call.write(engine_pb2.AttachRequest(hello=engine_pb2.AttachHello(gateway=peer)))
        first = await self._call.read()
        self.welcome = first.welcome
        self._reader = asyncio.create_task(self._read(self._call))

    async def detach(self) -> None:
        assert self._reader is not None
        self._call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def close(self) -> None:
        if self._call is not None:
            await self.detach()
        await self.channel.close()

    @property
    def live_handles(self) -> list[int]:
        assert self.welcome is not None
        return list(array("I", self.welcome.live_handle_u32le))

    async def submit(
        self, handle: int, prompt: Sequence[int], *, max_tokens: int = 8, token: bytes | None = None, **fields: Any
    ) -> Answer:
        asked = {"max_tokens": max_tokens, "temperature": 0, "eos_token_ids": [EOS]} | fields.pop("sampling", {})
        sampling = common_pb2.SamplingParams(**asked)
        answer = Answer()
        for index, replay in enumerate(fields.get("replay", ())):
            answer.tokens[index] = list(array("i", replay.token_id_i32le))
        self.answers[handle] = answer
        submit = engine_pb2.Submit(
            handle=handle,
            token=token or os.urandom(16),
            request_id=f"r{handle}",
            prompt_id_i32le=array("i", prompt).tobytes(),
            sampling=sampling,
            **fields,
        )
        await self._call.write(engine_pb2.AttachRequest(submit=submit))
        return answer

    async def send(self, **frame: Any) -> None:
        await self._call.write(engine_pb2.AttachRequest(**frame))

    async def until(self, condition: Any) -> None:
        """Waits for frames until the condition holds; a frame that breaks the contract raises here."""

        async def wait() -> None:
            async with self._changed:
                await self._changed.wait_for(lambda: self.broken or condition())

        await asyncio.wait_for(wait(), 120)
        if self.broken:
            raise self.broken

    async def finished(self, *handles: int, n: int = 1) -> None:
        def ended(answer: Answer) -> bool:
            return bool(answer.rejected or answer.failed or answer.vector) or len(answer.finish) == n

        await self.until(lambda: all(ended(self.answers[handle]) for handle in handles))

    async def generate(self, prompt: Sequence[int], handle: int = 1, **fields: Any) -> Answer:
        answer = await self.submit(handle, prompt, **fields)
        await self.finished(handle, n=fields.get("sampling", {}).get("n", 1))
        return answer

    async def _read(self, call: Any) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):  # the stream may be broken by a test
            while frame := await call.read():
                async with self._changed:
                    try:
                        self._take(frame)
                    except Exception as error:
                        self.broken = error
                    self._changed.notify_all()

    def _take(self, frame: engine_pb2.AttachResponse) -> None:
        if frame.HasField("load"):
            self.loads.append(frame.load)
        kind = frame.WhichOneof("frame")
        if kind == "outputs":
            self._take_outputs(frame.outputs)
        elif kind == "rejected":
            self.answers[frame.rejected.handle].rejected = frame.rejected.failure
        elif kind == "failed":
            self.answers[frame.failed.handle].failed = frame.failed.failure
        elif kind == "draining":
            self.draining = frame.draining

    def _take_outputs(self, outputs: engine_pb2.StepOutputs) -> None:
        for started in outputs.started:
            self.answers[started.handle].started = started
        for piece in outputs.prompt_logprobs:
            for offset, count in enumerate(array("i", piece.logprobs.count_i32le)):
                self.answers[piece.handle].prompt_logprobs[piece.first_position + offset] = count
        for pooled in outputs.pooled:
            assert self.answers[pooled.handle].vector is None, "a vector was told twice"
            self.answers[pooled.handle].vector = array("f", pooled.values_f32le).tolist()
        columns = [
            array("I", column)
            for column in (
                outputs.handle_u32le,
                outputs.choice_u32le,
                outputs.first_index_u32le,
                outputs.token_count_u32le,
            )
        ]
        ids = array("i", outputs.token_id_i32le).tolist()
        position = 0
        entries = _entries(outputs.logprobs) if outputs.HasField("logprobs") else []
        for handle, choice, first, count, finish in zip(*columns, outputs.finish_u8, strict=True):
            answer = self.answers[handle]
            answer.frames += 1
            have = answer.tokens.setdefault(choice, [])
            assert first <= len(have), "a gap in the tokens"
            assert count or finish
            new = ids[position : position + count][len(have) - first :]
            if entries:
                for position_entries in entries[position : position + count][len(have) - first :]:
                    answer.logprobs += position_entries
            have += new
            position += count
            if finish:
                answer.finish[choice] = finish
        assert position == len(ids)


async def attached(address: str) -> Gateway:
    """A gateway on its stream, once the engine serves."""
    gateway = Gateway(address)
    await gateway.wait_until_served()
    await gateway.attach()
    return gateway


async def all_blocks_free(gateway: Gateway) -> None:
    await gateway.until(lambda: gateway.loads[-1].free_blocks == gateway.loads[-1].total_blocks)
    assert gateway.loads[-1].running == gateway.loads[-1].waiting == 0


def _entries(logprobs: common_pb2.Logprobs) -> list[list[tuple[int, float, int]]]:
    flat = list(
        zip(
            array("i", logprobs.token_id_i32le),
            array("f", logprobs.logprob_f32le),
            array("i", logprobs.rank_i32le),
            strict=True,
        )
    )
    result, start = [], 0
    for count in array("i", logprobs.count_i32le):
        result.append(flat[start : start + count])
        start += count
    return result
