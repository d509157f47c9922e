"""WorkerService over gRPC: the lease, the lifecycle of the model, and the stream of steps.

frames ── this loop: decode ──▶ step thread: run → encode ──▶ this loop ──▶ results, in order
                                         └▶ output thread: wait → encode, where a device runs it
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import grpc.aio

from protos import common_pb2, worker_pb2, worker_pb2_grpc
from services.common.channel import backoff
from services.common.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    Fenced,
    InvalidArgument,
    NotFound,
    TriptychError,
    Unavailable,
    Unimplemented,
)
from services.common.logs import Log
from services.common.server import Server
from services.worker import wire
from services.worker.blobs import Blobs
from services.worker.lease import Lease
from services.worker.lifecycle import Lifecycle
from services.worker.masks import MaskInbox, MasksLost, wait
from services.worker.metrics import WorkerMetrics
from services.worker.step import Masks, Runner, StepInput, StepOutput
from services.worker.stepper import Stepper
from services.worker.threads import Later, StepThread, outcome

_IDLE_S = 0.3
_SERVICE = "triptych.v1.WorkerService"
_log = Log("worker.service")
_Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(slots=True)
class _Stream:
    """One Execute stream."""

    incarnation: int
    lease_s: float
    last_frame: float
    answers: asyncio.Queue[worker_pb2.StepResult | Exception | None] = field(default_factory=asyncio.Queue)
    """What the stream gives: results in the order of the steps, then the error that ends it, or None for the end."""
    masks: MaskInbox[worker_pb2.StepMasks] = field(default_factory=MaskInbox)
    last_step: int = -1
    closed: bool = False  # read on the step thread: what is still queued is not run

    def check_order(self, step: worker_pb2.Step) -> None:
        """Raises InvalidArgument unless the step's number is above that of the one before."""
        if step.step_id <= self.last_step:
            raise InvalidArgument(f"step_id {step.step_id} does not come after {self.last_step}", field="step_id")
        self.last_step = step.step_id

    def close(self) -> None:
        """Nothing of it runs any more; a step that waits for masks goes on without them."""
        self.closed = True
        self.masks.close()

    def end(self, error: TriptychError) -> None:
        """Ends the stream with this status, without waiting for a step that may be stuck."""
        self.close()
        self.answers.put_nowait(error)


class WorkerService(worker_pb2_grpc.WorkerServiceServicer):  # type: ignore[misc]
    """One worker rank. The runner is touched on the step thread only."""

    def __init__(
        self,
        runner: Runner,
        metrics: WorkerMetrics,
        *,
        name: str,
        version: str,
        model_path: str,
        memory_bytes: int,
        blobs: Blobs,
        retry_s: float = 1.0,
    ) -> None:
        self._device = runner.device
        self._peer = common_pb2.Peer(
            role="worker",
            name=name,
            incarnation=secrets.randbits(63) | 1,
            contract_min=wire.CONTRACT_VERSION,
            contract_max=wire.CONTRACT_VERSION,
            version=version,
        )
        self._model_path = model_path
        self._memory_bytes = memory_bytes
        self._blobs = blobs
        self._thread = StepThread()
        self._stepper = Stepper(runner, metrics)
        self._lease = Lease()
        self._life = Lifecycle(runner, self._thread, self._stepper, metrics, retry_s=retry_s)
        self._stream: _Stream | None = None
        self.changed = self._life.changed  # set by steps too: readiness may be another than before

    # What __main__ asks for.

    async def start(self, server: Server) -> None:
        """Serves the contract on a server."""
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self, server.grpc)
        await server.start(_SERVICE)

    @property
    def silence_s(self) -> float:
        """Seconds since the last completed step while one is pending."""
        return self._stepper.silence_s

    @property
    def idle(self) -> bool:
        """Whether no step is pending."""
        return not self._stepper.pending

    @property
    def loaded(self) -> bool:
        """Whether a model is loaded and has not been put to sleep."""
        return self._life.model is not None and not self._life.asleep

    @property
    def missing(self) -> str:
        """What is missing before a step can run, for a person; empty: nothing."""
        return self._life.missing

    async def load(self, model_path: str, dtype: str | None) -> None:
        """Loads a model before any engine asks."""
        await self._life.load(model_path, dtype)

    async def drain(self, limit_s: float) -> None:
        """Lets the engine finish what runs: returns once steps stop coming, the stream ends, or time is up."""
        ends = time.monotonic() + limit_s
        async for _ in backoff(0.02, 0.02):
            if self._stream is None or self._stepper.idle_s > _IDLE_S or time.monotonic() > ends:
                return

    async def close(self) -> None:
        """Ends the stream, and the thread once its step is done."""
        if self._stream is not None:
            self._stream.end(Unavailable("the worker is ending"))
        self._thread.close()

    # The contract.

    async def Hello(
        self, request: worker_pb2.WorkerServiceHelloRequest, context: _Context
    ) -> worker_pb2.WorkerServiceHelloResponse:
        """Who the worker is and what it holds."""
        return worker_pb2.WorkerServiceHelloResponse(
            worker=self._peer,
            device=self._device,
            memory_bytes=self._memory_bytes,
            ranks=1,
            model=wire.model_info(self._life.model, self._life.created_s) if self._life.model else None,
            leased_to=self._lease.holder,
            model_path=self._model_path,
        )

    async def Load(self, request: worker_pb2.LoadRequest, context: _Context) -> worker_pb2.LoadResponse:
        """Takes the lease for the asking engine and loads. FAILED_PRECONDITION: it will fail again."""
        if request.tensor_size > 1 or request.pipeline_size > 1 or request.HasField("rendezvous"):
            raise Unimplemented("more than one rank is not supported by this worker", field="tensor_size")
        self._take(wire.incarnation_of(request.engine))
        model_path = request.model_path if request.HasField("model_path") else self._model_path
        model = await self._life.load(
            model_path,
            request.dtype if request.HasField("dtype") else None,
            request.quantization if request.HasField("quantization") else None,
        )
        return wire.load_response(model, self._life.created_s)

    async def PlanMemory(
        self, request: worker_pb2.PlanMemoryRequest, context: _Context
    ) -> worker_pb2.PlanMemoryResponse:
        """Measures the largest step; the same again answers from memory."""
        self._lease.check(request.engine_incarnation)
        kv_cache_bytes = request.kv_cache_bytes if request.HasField("kv_cache_bytes") else None
        return wire.plan_response(await self._life.plan_memory(wire.decode_shape(request), kv_cache_bytes))

    async def InitCache(self, request: worker_pb2.InitCacheRequest, context: _Context) -> worker_pb2.InitCacheResponse:
        """Allocates the KV cache; the same shape again keeps it."""
        self._lease.check(request.engine_incarnation)
        await self._life.init_cache(wire.decode_shape(request))
        return worker_pb2.InitCacheResponse()

    async def GetTextFiles(
        self, request: worker_pb2.WorkerServiceGetTextFilesRequest, context: _Context
    ) -> AsyncIterator[worker_pb2.WorkerServiceGetTextFilesResponse]:
        """The text files asked for, in pieces."""
        files = self._life.loaded().text_files
        for name in request.names:
            if name not in files:
                raise NotFound(f"the model has no text file {name!r}; it has {', '.join(files)}", field="names")
        wanted = {name: content for name, content in files.items() if not request.names or name in request.names}
        for chunk in wire.text_file_chunks(wanted):
            yield chunk

    async def Health(
        self, request: worker_pb2.WorkerServiceHealthRequest, context: _Context
    ) -> worker_pb2.WorkerServiceHealthResponse:
        """Progress."""
        return worker_pb2.WorkerServiceHealthResponse(
            silence_ms=int(self._stepper.silence_s * 1000), steps=self._stepper.steps, missing=self.missing
        )

    async def Profile(self, request: worker_pb2.WorkerServiceProfileRequest, context: _Context) -> None:
        """Refused by name."""
        raise Unimplemented("Profile is not supported by this worker")

    async def Sleep(
        self, request: worker_pb2.WorkerServiceSleepRequest, context: _Context
    ) -> worker_pb2.WorkerServiceSleepResponse:
        """Frees memory, once the steps that came before have run."""
        self._lease.check(request.engine_incarnation)
        return worker_pb2.WorkerServiceSleepResponse(freed_bytes=await self._life.sleep(request.level))

    async def WakeUp(
        self, request: worker_pb2.WorkerServiceWakeUpRequest, context: _Context
    ) -> worker_pb2.WorkerServiceWakeUpResponse:
        """Brings back what Sleep freed."""
        self._lease.check(request.engine_incarnation)
        await self._life.wake_up()
        return worker_pb2.WorkerServiceWakeUpResponse()

    async def Execute(
        self, requests: AsyncIterator[worker_pb2.ExecuteRequest], context: _Context
    ) -> AsyncIterator[worker_pb2.ExecuteResponse]:
        """The steps of one engine, until it hangs up, goes silent or is fenced."""
        stream = await self._open(requests)
        reader = asyncio.create_task(self._read(stream, requests))
        watch = asyncio.create_task(_watch(stream))
        try:
            yield worker_pb2.ExecuteResponse(opened=worker_pb2.ExecuteOpened(worker=self._peer))
            while (answer := await stream.answers.get()) is not None:
                if isinstance(answer, Exception):
                    raise answer
                yield worker_pb2.ExecuteResponse(result=answer)
        finally:
            stream.close()
            reader.cancel()
            watch.cancel()
            self._close(stream)

    # The stream.

    async def _open(self, requests: AsyncIterator[worker_pb2.ExecuteRequest]) -> _Stream:
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("frame") != "open":
            raise InvalidArgument("the first frame must be `open`", field="frame")
        if not first.open.lease_ms:
            raise InvalidArgument("open.lease_ms must be at least 1", field="lease_ms")
        incarnation = wire.incarnation_of(first.open.engine)
        if self._life.shape is None:
            raise FailedPrecondition(f"not ready to execute; missing: {self.missing}")
        self._take(incarnation)
        if self._stream is not None:
            self._stream.end(Fenced("another stream took this worker"))
        stream = _Stream(incarnation, first.open.lease_ms / 1000, time.monotonic())
        self._stream = stream
        await self._thread.run(self._stepper.reset)
        stream.last_frame = time.monotonic()
        _log.info("stream opened", engine=first.open.engine.name, incarnation=incarnation)
        return stream

    def _close(self, stream: _Stream) -> None:
        """Frees the rows of a stream that has ended, unless another one has begun; weights stay."""
        if self._stream is not stream:
            return
        self._stream = None
        self._lease.release(stream.incarnation)
        _ignore_result(self._thread.run(self._stepper.reset))
        _log.info("stream closed", incarnation=stream.incarnation)

    async def _read(self, stream: _Stream, requests: AsyncIterator[worker_pb2.ExecuteRequest]) -> None:
        """Hands each step to the step thread, which answers in their order."""
        async for request in requests:
            stream.last_frame = time.monotonic()
            kind = request.WhichOneof("frame")
            if kind == "heartbeat":
                continue
            try:
                if kind == "masks":
                    stream.masks.give(request.masks.step_id, request.masks)
                elif kind == "step":
                    stream.check_order(request.step)
                    self._take_step(stream, request.step)
                else:
                    raise InvalidArgument(f"unexpected frame {kind!r}", field="frame")
            except InvalidArgument as error:
                stream.end(error)
                return
        stream.masks.close()
        self._thread.post(lambda: None, stream.answers.put_nowait)

    def _take_step(self, stream: _Stream, step: worker_pb2.Step) -> None:
        if step.resync:
            stream.masks.expire(step.step_id)
        masks = stream.masks.expect(step.step_id) if wire.waits_for_masks(step) else None
        self._stepper.expect()
        self.changed.set()
        decoded = outcome(partial(self._decode, step, stream.last_frame))  # while the step before it runs
        encode = decoded.encode if isinstance(decoded, StepInput) else ()
        self._blobs.want(encode)

        def answered(result: worker_pb2.StepResult | Exception) -> None:
            self._blobs.done(encode)
            stream.answers.put_nowait(result)

        self._thread.post(partial(self._answer, stream, step, decoded, masks), answered)

    def _decode(self, step: worker_pb2.Step, received_s: float) -> StepInput | None:
        """The step, checked; None where there is nothing to run it on."""
        life = self._life
        if life.shape is None or life.model is None:
            return None
        return wire.decode_step(step, wire.bounds_of(life.shape, life.model), received_s)

    def _answer(
        self,
        stream: _Stream,
        step: worker_pb2.Step,
        decoded: StepInput | Exception | None,
        masks: Future[worker_pb2.StepMasks] | None,
    ) -> worker_pb2.StepResult | Later[worker_pb2.StepResult]:
        """One step, on the step thread. `masks` is there where the step's flags ask for it."""
        begun = time.monotonic_ns()

        def encode(output: StepOutput) -> worker_pb2.StepResult | None:
            return wire.encode_result(output, (time.monotonic_ns() - begun) // 1000)

        def run() -> worker_pb2.StepResult | Later[worker_pb2.StepResult | None] | None:
            life = self._life
            if life.asleep:
                raise FailedPrecondition(life.missing)
            if stream.closed or life.shape is None or life.model is None or decoded is None:
                return None
            if isinstance(decoded, Exception):
                raise decoded
            vocab_size = life.model.vocab_size

            def masks_of_step() -> Masks:
                assert masks is not None
                return wire.decode_masks(wait(masks), decoded, vocab_size)

            try:
                output = self._stepper.run_step(decoded, masks_of_step)
            except MasksLost:
                return None
            return output.then(encode) if isinstance(output, Later) else encode(output)

        def answer(result: worker_pb2.StepResult | TriptychError | None) -> worker_pb2.StepResult:
            if isinstance(result, TriptychError):
                return wire.encode_failed(step.step_id, result)
            return result or wire.encode_skipped(step.step_id)

        result = self._stepper.attempt(step.step_id, step.resync, run)
        return result.then(answer) if isinstance(result, Later) else answer(result)

    # Shared checks.

    def _take(self, incarnation: int) -> None:
        """Gives the lease to an engine; the stream of another one ends."""
        if self._lease.take(incarnation) and self._stream is not None:
            self._stream.end(Fenced(f"incarnation {self._stream.incarnation} is fenced: a newer engine came"))


async def _watch(stream: _Stream) -> None:
    """Ends the stream once no frame has come for the time of its lease."""
    while True:
        left = stream.last_frame + stream.lease_s - time.monotonic()
        if left <= 0:
            break
        await asyncio.sleep(left)
    stream.end(DeadlineExceeded(f"no frame for {stream.lease_s:g} s: the lease has ended"))


def _ignore_result(future: asyncio.Future[None]) -> None:
    """Nobody waits for it; a failure is logged where it happened."""
    future.add_done_callback(lambda done: None if done.cancelled() else done.exception())
