"""The way to the engine: one Attach stream that carries every request of this process.

The engine may start later, die and come back: requests wait, and are submitted again with the
tokens that were received. A client sees a pause, or after `replay_budget_s` an error.

    connect ─▶ Hello ─▶ GetTextFiles ─▶ on_engine ─▶ Attach ─▶ frames … ─▶ lost ─▶ connect
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from itertools import islice

import grpc.aio
from grpc_health.v1 import health_pb2

from protos import engine_pb2, engine_pb2_grpc
from services.common.channel import backoff, connect
from services.common.errors import NotFound, TriptychError, Unavailable
from services.common.logs import Log
from services.common.server import error_of
from services.gateway import wire
from services.gateway.inflight import EngineRequest, TokenGap, Turns
from services.gateway.request import FinishReason, GenerateSpec
from services.gateway.router.inbox import Inbox
from services.gateway.router.outbox import Outbox, Stream
from services.gateway.wire import EngineInfo, Load, WireError

_log = Log("router")
_HANDLES = 2**32
_SLICE = 128
"""Rows, or positions of a prompt, that are handed on before the loop may do something else."""
_SILENCE_S = 10.0
"""An engine that sends no frame, not even a heartbeat, for this long is taken for lost."""

MEDIA_MISSING = "MEDIA_MISSING"
"""The reason of a request that failed because the worker did not find its media."""

OnEngine = Callable[[EngineInfo], Awaitable[None]]
PutBack = Callable[[Sequence[bytes]], Awaitable[None]]
"""Puts blobs back where a worker finds them, by hash; raises TriptychError where one of them can't be."""


class Router:
    """The engine as the gateway sees it. `run` keeps the connection; `submit` never waits for it."""

    def __init__(
        self,
        address: str,
        *,
        name: str,
        version: str,
        on_engine: OnEngine,
        replay_budget_s: float = 30.0,
        stall_ms: int = 10_000,
        put_back: PutBack | None = None,
    ) -> None:
        self._address = address
        self._peer = wire.peer(name, secrets.randbits(63) | 1, version)
        self._on_engine = on_engine
        self._budget_s = replay_budget_s
        self._stall_ms = stall_ms
        self._put_back = put_back
        self._channel = connect(address)
        self._stub = engine_pb2_grpc.EngineServiceStub(self._channel)
        self._files: dict[bytes, bytes] = {}
        self._handles = itertools.count(1)
        self._live: dict[int, EngineRequest] = {}
        self._turns = Turns()
        self._putting_back: dict[int, asyncio.Task[None]] = {}  # media of live requests, by handle
        self._outbox: Outbox | None = None
        self._info: EngineInfo | None = None
        self._waits_until = 0.0  # while the engine is away: end of the patience with it
        self._expiry: asyncio.TimerHandle | None = None
        self._draining = False
        self._serving = True  # as the engine's health says
        self.changed = asyncio.Event()  # set whenever `obstacle` may answer otherwise than before
        self.blob_address: str | None = None  # where workers fetch media; told to each engine
        self.load = Load()
        self.missing: str | None = f"engine at {address}: not connected yet"
        self.replays = 0
        self.aborts = 0

    @property
    def attached(self) -> bool:
        """Whether the stream to the engine stands."""
        return self._outbox is not None

    @property
    def live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def obstacle(self) -> str | None:
        """What keeps requests from running, or None."""
        if self._outbox is None:
            return self.missing
        if self._draining:
            return f"engine at {self._address} is draining"
        if not self._serving:
            return f"engine at {self._address} is attached but not ready"
        if self.load.silence_ms >= self._stall_ms:
            return f"engine at {self._address} has work but finished no step for {self.load.silence_ms} ms"
        return None

    def submit(self, spec: GenerateSpec) -> EngineRequest:
        """Starts a request. Raises Unavailable where no engine is there to wait for."""
        now = time.monotonic()
        if self._outbox is None and now >= self._waits_until:
            raise Unavailable(f"not ready: {self.missing}", reason="ENGINE_UNAVAILABLE", retry_after_ms=1000)
        request = EngineRequest(spec, self._next_handle(), now, self._abort, self._turns)
        self._live[request.handle] = request
        if self._outbox is not None:
            self._send(request)
        return request

    async def abort_by_token(self, token: bytes) -> bool:
        """Ends a request of this or any other gateway; False where none of that name runs."""
        for request in self._live.values():
            if secrets.compare_digest(request.token, token):
                request.abort()
                return True
        try:
            state = (await self.explain(token)).state
        except NotFound:
            return False
        if state == "finished" or self._outbox is None:
            return False
        self._outbox.put(wire.abort_token(token))
        return True

    async def explain(self, token: bytes) -> engine_pb2.EngineServiceExplainResponse:
        """Where a request stands, in the engine's words."""
        try:
            request = engine_pb2.EngineServiceExplainRequest(token=token)
            answer: engine_pb2.EngineServiceExplainResponse = await self._stub.Explain(request, timeout=5.0)
        except grpc.aio.AioRpcError as error:
            raise error_of(error) from None
        return answer

    def _next_handle(self) -> int:
        while True:
            handle = next(self._handles) % _HANDLES
            if handle and handle not in self._live:
                return handle

    def _send(self, request: EngineRequest) -> None:
        assert self._outbox is not None
        replay = request.replay()
        self.replays += bool(replay)
        deadline = request.remaining_ms(time.monotonic())
        self._outbox.put(wire.submit(request.handle, request.token, request.spec, deadline, replay))

    def _abort(self, request: EngineRequest, reason: FinishReason, choice: int | None, kept_tokens: int | None) -> None:
        if choice is None:
            self._live.pop(request.handle, None)
        if self._outbox is not None:
            self.aborts += 1
            self._outbox.put(wire.abort(request.handle, reason, choice, kept_tokens))

    async def run(self) -> None:
        """Connects, and connects again whenever the stream ends, until cancelled."""
        while True:
            async for attempt in backoff():
                if attempt == 0 and self._info is not None:
                    continue  # lost just now: the first try waits a moment
                try:
                    await self._session()
                except grpc.aio.AioRpcError as error:
                    self._say(error_of(error).message or error.code().name)
                except (TriptychError, WireError, TimeoutError) as error:
                    self._say(str(error) or type(error).__name__)
                else:
                    self._say("the stream was closed")
                if self._outbox is not None:
                    self._lost()
                    break

    def _say(self, why: str) -> None:
        missing = f"engine at {self._address}: {why}"
        if missing != self.missing or self.attached:
            _log.warning("waiting for the engine", missing=missing)
        self.missing = missing
        self.changed.set()

    async def _session(self) -> None:
        hello = await self._stub.Hello(engine_pb2.EngineServiceHelloRequest(gateway=self._peer), timeout=10.0)
        info = wire.engine_info(hello, await self._text_files(hello))
        await self._on_engine(info)
        call: Stream = self._stub.Attach()
        outbox = Outbox()
        hello_frame = engine_pb2.AttachHello(gateway=self._peer, blob_address=self.blob_address)
        outbox.put(engine_pb2.AttachRequest(hello=hello_frame))
        pump = asyncio.create_task(outbox.pump(call))
        health = asyncio.create_task(self._watch_health())
        inbox = Inbox(call, _SILENCE_S)
        try:
            first = await inbox.read()
            if first is None or not first.HasField("welcome"):
                raise WireError("the engine did not answer with a welcome")
            self._attach(outbox, info, first.welcome)
            while (frame := await inbox.read()) is not None:
                await self._take(frame)
        finally:
            pump.cancel()
            health.cancel()
            inbox.close()
            call.cancel()

    async def _watch_health(self) -> None:
        """Follows the engine's own readiness; an engine that has no such service is taken for ready."""
        self._serving = True
        watch = self._channel.unary_stream(
            "/grpc.health.v1.Health/Watch",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            async for answer in watch(health_pb2.HealthCheckRequest()):
                self._serving = answer.status == health_pb2.HealthCheckResponse.SERVING
                self.changed.set()
        except grpc.aio.AioRpcError:
            self._serving = True
            self.changed.set()

    async def _text_files(self, hello: engine_pb2.EngineServiceHelloResponse) -> dict[str, bytes]:
        """The model's text files, fetching only what no earlier answer held."""
        wanted = [file.name for file in hello.text_files if file.sha256 not in self._files]
        if wanted:
            parts: dict[bytes, bytearray] = {}
            stream = self._stub.GetTextFiles(engine_pb2.EngineServiceGetTextFilesRequest(names=wanted), timeout=60.0)
            async for answer in stream:
                data = parts.setdefault(answer.chunk.file.sha256, bytearray())
                if answer.chunk.offset != len(data):
                    raise WireError(f"{answer.chunk.file.name} came out of order")
                data += answer.chunk.data
            for digest, data in parts.items():
                if hashlib.sha256(data).digest() != digest:
                    raise WireError("a text file does not match its hash")
                self._files[digest] = bytes(data)
        named = {file.name: file.sha256 for file in hello.text_files}
        absent = [name for name, digest in named.items() if digest not in self._files]
        if absent:
            raise WireError(f"the engine listed but did not send {', '.join(absent)}")
        self._files = {digest: self._files[digest] for digest in named.values()}
        return {name: self._files[digest] for name, digest in named.items()}

    def _attach(self, outbox: Outbox, info: EngineInfo, welcome: engine_pb2.AttachWelcome) -> None:
        """The stream stands: everything that the engine does not run (any more) is submitted again."""
        before, self._info = self._info, info
        self._outbox, self._draining, self.missing = outbox, False, None
        self.changed.set()
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        kept = wire.live_handles(welcome)
        if before is not None and before.fingerprint != info.fingerprint:
            self._fail_all("the engine came back with another model")
        for handle in kept - self._live.keys():  # ended here while the stream was down
            outbox.put(wire.abort(handle, FinishReason.ABORT))
        there = kept | self._putting_back.keys()
        waiting = [request for handle, request in self._live.items() if handle not in there]
        for request in waiting:
            self._send(request)
        _log.info(
            "attached", engine=info.engine, model=info.name, incarnation=info.incarnation, resubmitted=len(waiting)
        )

    def _lost(self) -> None:
        """The stream is gone: live requests wait for the next one, but not for ever."""
        self._outbox = None
        self.load = Load()
        self.changed.set()
        self._waits_until = time.monotonic() + self._budget_s
        loop = asyncio.get_running_loop()
        self._expiry = loop.call_later(self._budget_s, self._fail_all, f"lost for {self._budget_s:g} s")

    def _fail_all(self, why: str) -> None:
        lost = Unavailable(f"engine at {self._address}: {why}", reason="ENGINE_LOST", retry_after_ms=1000)
        for request in self._live.values():
            request.fail(lost)
        self._live.clear()

    async def _take(self, frame: engine_pb2.AttachResponse) -> None:
        if frame.HasField("load"):
            self.load = wire.load(frame.load)
            self.changed.set()
        kind = frame.WhichOneof("frame")
        if kind == "outputs":
            await self._take_outputs(frame.outputs)
        elif kind == "rejected":
            self._fail(frame.rejected.handle, wire.failure(frame.rejected.failure))
        elif kind == "failed":
            choice = frame.failed.choice if frame.failed.HasField("choice") else None
            self._fail(frame.failed.handle, wire.failure(frame.failed.failure), choice)
        elif kind == "draining":
            self._draining = True
            self.changed.set()

    def _fail(self, handle: int, error: TriptychError, choice: int | None = None) -> None:
        request = self._live.pop(handle, None)
        if request is None:
            return
        siblings = choice is not None and request.unfinished > 1
        again = error.reason == MEDIA_MISSING and not request.media_put_back and self._put_back is not None
        if not again:
            request.fail(error)
        if siblings:
            self._abort(request, FinishReason.ERROR, None, None)
        if again and self._put_back is not None:
            request.media_put_back = True
            self._rename(request)
            self._putting_back[request.handle] = asyncio.create_task(self._try_again(request, self._put_back))

    async def _try_again(self, request: EngineRequest, put_back: PutBack) -> None:
        """Submits a request again whose media the worker did not find, once they are back; the client sees a pause."""
        _log.warning("media missing, submitting again", request_id=request.spec.request_id)
        try:
            await put_back([item.hash for item in request.spec.media])
        except TriptychError as error:
            self._live.pop(request.handle, None)
            request.fail(error)
        finally:
            del self._putting_back[request.handle]
        if request.handle in self._live and self._outbox is not None:
            self._send(request)

    async def _take_outputs(self, outputs: engine_pb2.StepOutputs) -> None:
        live = self._live
        for started in outputs.started:
            if (request := live.get(started.handle)) is not None:
                request.take_started(started.cached_tokens)
        for piece in outputs.prompt_logprobs:
            places, first = wire.positions(piece.logprobs), piece.first_position
            while part := list(islice(places, _SLICE)):
                if (request := live.get(piece.handle)) is not None:
                    request.take_prompt_logprobs(first, part)
                first += len(part)
                await asyncio.sleep(0)
        for pooled in outputs.pooled:
            if (request := live.pop(pooled.handle, None)) is not None:
                request.take_vector(wire.pooled(pooled))
        rows = wire.rows(outputs)
        while self._take_rows(islice(rows, _SLICE)) == _SLICE:  # noqa: ASYNC110 (others get their turn)
            await asyncio.sleep(0)

    def _take_rows(self, rows: Iterable[wire.Row]) -> int:
        """Hands rows on; answers how many there were."""
        live, number = self._live, 0
        for number, (handle, choice, first_index, ids, finish, logprobs) in enumerate(rows, 1):  # noqa: B007
            if (request := live.get(handle)) is not None:
                try:
                    request.take(choice, first_index, ids, finish, logprobs)
                except TokenGap as gap:
                    self._resubmit(request, gap)
                if not request.unfinished:
                    live.pop(handle, None)
        return number

    def _resubmit(self, request: EngineRequest, gap: TokenGap) -> None:
        """Starts a request again from what it has, under a new handle."""
        _log.error("tokens missing, submitting again", request_id=request.spec.request_id, gap=str(gap))
        del self._live[request.handle]
        assert self._outbox is not None
        self._outbox.put(wire.abort(request.handle, FinishReason.ABORT))
        self._rename(request)
        self._send(request)

    def _rename(self, request: EngineRequest) -> None:
        """A handle that the engine does not know: what still comes for the old one is dropped."""
        request.handle = self._next_handle()
        self._live[request.handle] = request

    async def close(self) -> None:
        """Fails what is live and closes the channel."""
        if self._expiry is not None:
            self._expiry.cancel()
        for task in self._putting_back.values():
            task.cancel()
        self._fail_all("this gateway is shutting down")
        await self._channel.close()
