"""The worker group as the engine drives it: made to stand, kept, lost, and made to stand again.

    stand    Hello → Load → WakeUp → PlanMemory → InitCache → GetTextFiles → Execute opened
    execute  steps go out, outcomes come back in order; heartbeats keep the lease in between
    sleep    its memory is freed, its stream and its lease stay; a group that is lost asleep stands up asleep
    lost     the stream broke, a result made no sense, or a step took too long

The group has one rank. What is sent and what comes back is plain data; nothing here decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import grpc
import grpc.aio

from protos import common_pb2, worker_pb2, worker_pb2_grpc
from services.common.channel import connect
from services.common.errors import FailedPrecondition, InvalidArgument, NotFound, TriptychError, Unavailable
from services.common.logs import Log
from services.common.server import error_of
from services.engine.beats import until_next
from services.engine.config import EngineSettings
from services.engine.plan import StepMasks, StepOutcome, StepPlan
from services.engine.standing import Standing, TextFile
from services.engine.wire import cards, steps

_CALL_TIMEOUT_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
_LONGEST_PAUSE_REFUSED_S = 30.0
_REFUSED = (FailedPrecondition, InvalidArgument, NotFound)
_RETRY_MS = 500
_SAID_BY_PEER = "grpc-status-details-bin"  # a status with details was sent; a broken connection has none
_log = Log("engine.workers")


class WorkerLost(Exception):
    """The group no longer stands; every row on it is gone.

    `died` where a process of it ended or got stuck by itself, so that what it was computing may be the cause.
    """

    def __init__(self, reason: str, died: bool) -> None:
        super().__init__(reason)
        self.died = died


class WorkerGroup:
    """One worker rank. `changed` is set when an outcome or a loss is there to be taken."""

    def __init__(self, settings: EngineSettings, incarnation: int, version: str) -> None:
        if "," in settings.worker:
            raise FailedPrecondition("more than one worker rank is not built: name one worker", field="worker")
        self._settings = settings
        self._engine = cards.peer(settings.name, incarnation, version)
        self._channel = connect(settings.worker)
        self._stub = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._call: Any = None
        self._writing = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._outcomes: deque[StepOutcome] = deque()
        self._lost: WorkerLost | None = None
        self._progress_at = 0.0
        self._written_at = 0.0
        self._files: tuple[TextFile, ...] = ()
        self._sleeping = asyncio.Lock()  # one change of sleep at a time
        self.asleep = 0  # the level; 0 is awake
        self.in_flight = 0
        self.changed = asyncio.Event()
        self.missing = f"the worker at {settings.worker} has not answered yet"

    @property
    def stands(self) -> bool:
        """Whether steps can be sent."""
        return not self.missing

    @property
    def silence_s(self) -> float:
        """Time since the last outcome while a step is out; 0 when none is."""
        return time.monotonic() - self._progress_at if self.in_flight else 0.0

    async def stand(self, before: Standing | None) -> Standing:
        """Waits until the worker can execute. `before` is what it held in an earlier life: the same is asked."""
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                standing = await self._try_to_stand(before)
            except grpc.aio.AioRpcError as error:
                reason = error_of(error)
                self._miss(f"the worker at {self._settings.worker}: {reason.message or error.code().name}")
            except TriptychError as error:
                reason = error
                self._miss(f"the worker at {self._settings.worker}: {error.message}")
            else:
                self.missing = ""
                _log.info("worker group stands", worker=self._settings.worker, blocks=standing.num_blocks)
                return standing
            await self.drop()
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, longest_pause_s(reason))

    def _miss(self, reason: str) -> None:
        if reason != self.missing:
            _log.warning("worker group does not stand", missing=reason)
        self.missing = reason

    async def _try_to_stand(self, before: Standing | None) -> Standing:
        hello = await self._stub.Hello(
            worker_pb2.WorkerServiceHelloRequest(engine=self._engine), timeout=_CALL_TIMEOUT_S, wait_for_ready=False
        )
        self._check_contract(hello.worker)
        loaded = await self._stub.Load(worker_pb2.LoadRequest(engine=self._engine))
        await self._wake_up()  # an engine that is gone may have left it asleep
        settings, model = self._settings, loaded.model
        max_model_len = model.max_model_len
        if settings.max_model_len is not None:
            if settings.max_model_len > max_model_len:
                raise FailedPrecondition(
                    f"max_model_len is {settings.max_model_len}, the model was made for {max_model_len}",
                    field="max_model_len",
                )
            max_model_len = settings.max_model_len
        if before is not None and before.model.fingerprint != model.fingerprint:
            raise FailedPrecondition("it serves another model than before; restart the engine to serve it")
        block_size = settings.on(hello.device).block_size if before is None else before.block_size
        plan = await self._plan_memory(max_model_len, block_size, before)
        num_blocks = self._choose_blocks(plan, before)
        await self._stub.InitCache(
            worker_pb2.InitCacheRequest(
                engine_incarnation=self._engine.incarnation,
                num_blocks=num_blocks,
                block_size=block_size,
                max_num_seqs=settings.max_num_seqs,
                max_model_len=max_model_len,
                max_num_batched_tokens=settings.max_num_batched_tokens,
            )
        )
        await self._fetch_text_files(loaded.text_files)
        await self._open(hello.worker.incarnation)
        async with self._sleeping:
            if self.asleep:
                await self._sleep(self.asleep)
        name = settings.served_model_name or _model_name(hello.model_path) or model.name
        return Standing(
            model=cards.to_card(model, name),
            device=hello.device,
            kv_windows=cards.to_windows(loaded.kv_groups),
            num_blocks=num_blocks,
            block_size=block_size,
            bytes_per_block=plan.bytes_per_block,
            max_model_len=max_model_len,
            text_files=self._files,
        )

    def _check_contract(self, worker: common_pb2.Peer) -> None:
        if not worker.contract_min <= cards.CONTRACT_VERSION <= worker.contract_max:
            spoken = f"{worker.contract_min} to {worker.contract_max}"
            raise FailedPrecondition(f"it speaks contract versions {spoken}, not {cards.CONTRACT_VERSION}")

    async def _plan_memory(
        self, max_model_len: int, block_size: int, before: Standing | None
    ) -> worker_pb2.PlanMemoryResponse:
        settings = self._settings
        if before is not None:  # requests are held to what the pool can hold, so it need not hold more
            max_model_len = min(max_model_len, before.kv_capacity_tokens)
        wanted = settings.kv_cache_bytes if before is None else before.num_blocks * before.bytes_per_block
        plan: worker_pb2.PlanMemoryResponse = await self._stub.PlanMemory(
            worker_pb2.PlanMemoryRequest(
                engine_incarnation=self._engine.incarnation,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_num_seqs=settings.max_num_seqs,
                max_model_len=max_model_len,
                block_size=block_size,
                kv_cache_bytes=wanted or None,
                encoder_budget=settings.encoder_budget,
                encoder_cache_size=settings.encoder_cache_size,
            )
        )
        _log.info("memory planned", summary=plan.summary)
        return plan

    def _choose_blocks(self, plan: worker_pb2.PlanMemoryResponse, before: Standing | None) -> int:
        wanted = before.num_blocks if before is not None else self._settings.num_blocks or plan.num_blocks
        if wanted > plan.num_blocks:
            raise FailedPrecondition(f"{wanted} KV blocks are wanted, {plan.num_blocks} fit: {plan.summary}")
        if wanted < 1:
            raise FailedPrecondition(f"no KV block fits: {plan.summary}")
        return wanted

    async def _fetch_text_files(self, listing: Any) -> None:
        """Fetches what the hashes say is not here yet."""
        if [info.sha256 for info in listing] == [file.sha256 for file in self._files] and self._files:
            return
        contents: dict[str, bytearray] = {info.name: bytearray() for info in listing}
        async for answer in self._stub.GetTextFiles(worker_pb2.WorkerServiceGetTextFilesRequest()):
            content = contents.get(answer.chunk.file.name)
            if content is None or answer.chunk.offset != len(content):
                raise Unavailable(f"text file {answer.chunk.file.name!r} came out of order")
            content += answer.chunk.data
        files = tuple(TextFile(info.name, info.sha256, bytes(contents[info.name])) for info in listing)
        for file in files:
            if hashlib.sha256(file.content).digest() != file.sha256:
                raise Unavailable(f"text file {file.name!r} does not match its hash")
        self._files = files

    async def _open(self, incarnation: int) -> None:
        """Opens the Execute stream; all rows are empty afterwards."""
        call = self._stub.Execute()
        opening = worker_pb2.ExecuteOpen(engine=self._engine, lease_ms=int(self._settings.lease_s * 1000))
        try:
            await call.write(worker_pb2.ExecuteRequest(open=opening))
            answer = await asyncio.wait_for(call.read(), _CALL_TIMEOUT_S)
        except (TimeoutError, asyncio.InvalidStateError):
            call.cancel()
            raise Unavailable("it did not open the step stream") from None
        if answer is grpc.aio.EOF or answer.WhichOneof("frame") != "opened":
            call.cancel()
            raise Unavailable("it did not open the step stream")
        if answer.opened.worker.incarnation != incarnation:
            call.cancel()
            raise Unavailable("it restarted while it was made ready")
        self._call, self._lost, self.in_flight = call, None, 0
        self._outcomes.clear()
        self._written_at = self._progress_at = time.monotonic()
        self._tasks = [asyncio.create_task(self._read(call)), asyncio.create_task(self._keep(call))]

    async def execute(self, plan: StepPlan) -> None:
        """Sends a step. Its outcome comes by `take`."""
        if self.in_flight == 0:
            self._progress_at = time.monotonic()
        self.in_flight += 1
        await self._write(steps.step_message(plan))

    async def send_masks(self, masks: StepMasks) -> None:
        """Sends the grammar masks of a step that is out."""
        await self._write(steps.masks_message(masks))

    async def sleep(self, level: int) -> int:
        """Frees the KV cache, at level 2 the weights too; the bytes freed. Every row is empty afterwards."""
        async with self._sleeping:
            if not self.stands:
                raise Unavailable(f"not ready; missing: {self.missing}", retry_after_ms=_RETRY_MS)
            if level <= self.asleep:
                return 0
            with _as_told():
                freed = await self._sleep(level)
            self.asleep = level
            return freed

    async def wake_up(self) -> None:
        """Brings back what `sleep` freed. A group that does not stand just stands up awake."""
        async with self._sleeping:
            if self.asleep and self._call is not None:
                with _as_told():
                    await self._wake_up()
            self.asleep = 0

    async def _sleep(self, level: int) -> int:
        answer = await self._stub.Sleep(
            worker_pb2.WorkerServiceSleepRequest(level=level, engine_incarnation=self._engine.incarnation)
        )
        return int(answer.freed_bytes)

    async def _wake_up(self) -> None:
        await self._stub.WakeUp(worker_pb2.WorkerServiceWakeUpRequest(engine_incarnation=self._engine.incarnation))

    async def _write(self, frame: worker_pb2.ExecuteRequest) -> None:
        try:
            async with self._writing:
                self._written_at = time.monotonic()
                await self._call.write(frame)
        except grpc.aio.AioRpcError as error:
            self._broke(error)
        except asyncio.InvalidStateError:
            pass  # the stream has ended, and its reader is about to say why
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            self._lose("the step stream was given up")  # grpc says so of a call that was cancelled

    def take(self) -> list[StepOutcome]:
        """The outcomes that have come. Raises WorkerLost once the group is lost and they have all been taken."""
        if self._lost is not None:
            if not self._outcomes:
                raise self._lost
            self.changed.set()
        outcomes = list(self._outcomes)
        self._outcomes.clear()
        return outcomes

    async def _read(self, call: Any) -> None:
        try:
            while (frame := await call.read()) is not grpc.aio.EOF:
                outcome = steps.to_outcome(frame.result)
                self.in_flight -= 1
                self._progress_at = time.monotonic()
                self._outcomes.append(outcome)
                self.changed.set()
            self._lose("the worker ended the step stream: " + ((await call.details()) or "no reason given"))
        except grpc.aio.AioRpcError as error:
            self._broke(error)
        except TriptychError as error:
            self._lose(f"the worker sent a result that makes no sense: {error.message}")

    async def _keep(self, call: Any) -> None:
        """Heartbeats while no step is sent, and an eye on steps that are stuck."""
        pause = min(self._settings.lease_s / 3, self._settings.heartbeat_s)  # with the gateways', on one beat
        heartbeat = worker_pb2.ExecuteRequest(heartbeat=worker_pb2.ExecuteHeartbeat())
        while self._lost is None:
            await asyncio.sleep(until_next(min(pause, self._settings.step_timeout_s / 3), time.monotonic()))
            if self.silence_s > self._settings.step_timeout_s:
                self._lose(f"a step got no result for {self._settings.step_timeout_s:g} s", died=True)
                call.cancel()
            elif time.monotonic() - self._written_at >= pause:
                await self._write(heartbeat)

    def _broke(self, error: grpc.aio.AioRpcError) -> None:
        died = all(key != _SAID_BY_PEER for key, _ in error.trailing_metadata() or ())
        self._lose(f"the step stream broke: {error_of(error).message or error.code().name}", died)

    def _lose(self, reason: str, died: bool = False) -> None:
        if self._lost is None:
            self._lost = WorkerLost(f"the worker at {self._settings.worker} is lost: {reason}", died)
            self._miss(str(self._lost))
            self.changed.set()

    async def drop(self) -> None:
        """Gives the step stream up, so that `stand` can begin again with empty rows."""
        if not self.missing:
            self.missing = "the step stream is being opened again"
        if self._call is not None:
            self._call.cancel()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self._tasks, self._call, self.in_flight = [], None, 0
        self._outcomes.clear()

    async def close(self) -> None:
        """Ends the stream and the channel."""
        await self.drop()
        await self._channel.close()


def _model_name(path: str) -> str:
    """A GGUF file's name without its ending, or a folder's name (which may have dots)."""
    name = PurePath(path).name
    return name.removesuffix(".gguf")


def longest_pause_s(reason: TriptychError) -> float:
    """How long a group that does not stand is left alone at most: asking again for what was refused seldom helps."""
    return _LONGEST_PAUSE_REFUSED_S if isinstance(reason, _REFUSED) else _LONGEST_PAUSE_S


@contextlib.contextmanager
def _as_told() -> Iterator[None]:
    """What a worker refuses is passed on in its own words."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from error
