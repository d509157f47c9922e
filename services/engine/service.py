"""EngineService over gRPC: one stream per gateway process, and the calls of an operator.

AttachRequest ──▶ wire ──▶ loop.submit / abort          (this file, one task per stream)
AttachResponse ◀── wire ◀── session.take ◀── loop emits  (this file, the stream itself)
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from protos import common_pb2, engine_pb2, engine_pb2_grpc
from services.common.channel import CHUNK_BYTES
from services.common.errors import InvalidArgument, NotFound, TriptychError, Unavailable, Unimplemented
from services.common.logs import Log
from services.common.server import Server
from services.engine import wire
from services.engine.config import EngineSettings
from services.engine.events import FINISH_ABORT, FINISH_STOP_STRING
from services.engine.loop import EngineLoop
from services.engine.sessions import Session
from services.engine.workers import WorkerGroup

_Context = grpc.aio.ServicerContext[Any, Any]
_RETRY_MS = 500
_WATCH_MS = 100
_log = Log("engine.service")


class EngineService(engine_pb2_grpc.EngineServiceServicer):  # type: ignore[misc]
    """The contract. Before `open` nothing but the reason why not is answered."""

    def __init__(self, settings: EngineSettings, workers: WorkerGroup, incarnation: int, version: str) -> None:
        self._settings = settings
        self._workers = workers
        self._peer = wire.peer(settings.name, incarnation, version)
        self._opened: EngineLoop | None = None
        self._grace_timers: dict[int, asyncio.TimerHandle] = {}

    def register(self, server: Server) -> None:
        """Puts the service on a server that has not started."""
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self, server.grpc)

    def open(self, loop: EngineLoop) -> None:
        """The worker group stands for the first time: requests are taken from now on."""
        self._opened = loop

    @property
    def _loop(self) -> EngineLoop:
        if self._opened is None:
            raise Unavailable(f"not ready; missing: {self._workers.missing}", retry_after_ms=_RETRY_MS)
        return self._opened

    async def Hello(
        self, request: engine_pb2.EngineServiceHelloRequest, context: _Context
    ) -> engine_pb2.EngineServiceHelloResponse:
        """Who the engine is and what it serves, while its worker group stands."""
        loop = self._loop
        if not self._workers.stands:
            raise Unavailable(f"not ready; missing: {self._workers.missing}", retry_after_ms=_RETRY_MS)
        standing, settings = loop.standing, self._settings
        return engine_pb2.EngineServiceHelloResponse(
            engine=self._peer,
            model=wire.model_message(standing.model),
            limits=engine_pb2.EngineLimits(
                max_model_len=loop.context_len,
                block_size=standing.block_size,
                kv_capacity_tokens=standing.kv_capacity_tokens,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens,
                max_n=settings.max_n,
                tensor_size=1,
                pipeline_size=1,
            ),
            text_files=[wire.text_file_message(file) for file in standing.text_files],
        )

    async def GetTextFiles(
        self, request: engine_pb2.EngineServiceGetTextFilesRequest, context: _Context
    ) -> AsyncIterator[engine_pb2.EngineServiceGetTextFilesResponse]:
        """The text files that the worker gave, in pieces."""
        files = self._loop.standing.text_files
        known = {file.name for file in files}
        for name in request.names:
            if name not in known:
                raise NotFound(f"the model has no text file {name!r}", field="names")
        for file in files:
            if request.names and file.name not in request.names:
                continue
            info = wire.text_file_message(file)
            for offset in range(0, len(file.content) or 1, CHUNK_BYTES):
                data = file.content[offset : offset + CHUNK_BYTES]
                chunk = common_pb2.TextFileChunk(file=info, offset=offset, data=data)
                yield engine_pb2.EngineServiceGetTextFilesResponse(chunk=chunk)

    async def Attach(
        self, requests: AsyncIterator[engine_pb2.AttachRequest], context: _Context
    ) -> AsyncIterator[engine_pb2.AttachResponse]:
        """One gateway process. A newer stream of the same process takes over from an older one.

        What is live is told again from its first token, since nobody knows what the last stream
        still delivered; the gateway drops by first_index what it has, and submits again what the
        welcome does not list.
        """
        loop = self._loop
        first = await anext(aiter(requests), None)
        if first is None or first.WhichOneof("frame") != "hello":
            raise InvalidArgument("the first frame has to be hello", field="frame")
        gateway = first.hello.gateway
        if not gateway.incarnation:
            raise InvalidArgument("hello.gateway.incarnation must not be 0", field="hello.gateway.incarnation")
        if not gateway.contract_min <= wire.CONTRACT_VERSION <= gateway.contract_max:
            raise InvalidArgument(f"this engine speaks contract version {wire.CONTRACT_VERSION}", field="hello.gateway")
        session = loop.sessions.open(gateway.incarnation, gateway.name)
        stream = self._attach(session)
        reader = asyncio.create_task(self._read(session, stream, requests))
        try:
            yield engine_pb2.AttachResponse(welcome=self._welcome(session), load=self._load())
            async for frame in self._frames(session, stream, reader):
                yield frame
        finally:
            reader.cancel()
            self._detach(session, stream)

    def _attach(self, session: Session) -> int:
        timer = self._grace_timers.pop(session.gateway, None)
        if timer is not None:
            timer.cancel()
        stream = session.attach()
        if self._loop.draining:
            session.drain()
        _log.info("gateway attached", gateway=session.name, incarnation=session.gateway, live=len(session.records))
        return stream

    def _detach(self, session: Session, stream: int) -> None:
        """Keeps a gateway's requests for the time of grace, unless a newer stream has taken over."""
        if not session.detach(stream):
            return
        _log.info("gateway detached", gateway=session.name, incarnation=session.gateway, live=len(session.records))
        if not session.records:
            self._loop.sessions.close(session)
            return
        self._grace_timers[session.gateway] = asyncio.get_running_loop().call_later(
            self._settings.gateway_grace_s, self._give_up, session
        )

    def _give_up(self, session: Session) -> None:
        self._grace_timers.pop(session.gateway, None)
        self._loop.give_up(session)

    def _welcome(self, session: Session) -> engine_pb2.AttachWelcome:
        return engine_pb2.AttachWelcome(
            engine=self._peer,
            heartbeat_ms=int(self._settings.heartbeat_s * 1000),
            live_handle_u32le=wire.to_bytes(array("I", session.records)),
        )

    def _load(self) -> common_pb2.Load:
        loop = self._loop
        return wire.load_message(loop.load, loop.silence_s)

    async def _frames(
        self, session: Session, stream: int, reader: asyncio.Task[None]
    ) -> AsyncIterator[engine_pb2.AttachResponse]:
        """All that the session has to tell, a heartbeat where it has nothing, until the gateway hangs up."""
        reader.add_done_callback(lambda _: session.wake.set())
        while session.stream == stream:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.heartbeat_s):
                    await session.wake.wait()
            if reader.done():
                reader.result()  # raises what the gateway did wrong
                return
            if session.stream != stream:
                return
            frames = list(wire.frames(session.take(), self._loop.step_id)) or [engine_pb2.AttachResponse()]
            frames[-1].load.CopyFrom(self._load())
            for frame in frames:
                yield frame

    async def _read(self, session: Session, stream: int, requests: AsyncIterator[engine_pb2.AttachRequest]) -> None:
        async for request in requests:
            if session.stream != stream:
                return
            kind = request.WhichOneof("frame")
            if kind == "submit":
                self._submit(session, request.submit)
            elif kind == "abort":
                self._abort(session, request.abort)
            elif kind == "acknowledge":
                self._acknowledge(session, request.acknowledge)
            elif kind == "resume":
                refused = Unimplemented("taking over another gateway's request is not built", field="resume")
                session.reject(request.resume.handle, refused)
            else:
                raise InvalidArgument(f"unexpected frame {kind!r}", field="frame")

    def _submit(self, session: Session, submit: engine_pb2.Submit) -> None:
        loop = self._loop
        try:
            vocab_size = loop.standing.model.vocab_size
            spec = wire.to_spec(submit, session.gateway, vocab_size=vocab_size, max_n=self._settings.max_n)
            loop.submit(session, spec)
        except TriptychError as error:
            session.reject(submit.handle, error)

    def _abort(self, session: Session, request: engine_pb2.AbortRows) -> None:
        """Ends what is named; whoever has ended already is passed over."""
        if request.HasField("handle"):
            record = session.records.get(request.handle)
        else:
            record = self._loop.sessions.by_token(request.token)
        if record is None or (request.HasField("choice") and request.choice >= record.spec.n):
            return
        stopped = request.reason == common_pb2.FINISH_REASON_STOP_STRING
        self._loop.abort(
            record,
            request.choice if request.HasField("choice") else None,
            FINISH_STOP_STRING if stopped else FINISH_ABORT,
            request.kept_tokens if request.HasField("kept_tokens") else None,
        )

    def _acknowledge(self, session: Session, request: engine_pb2.Acknowledge) -> None:
        record = session.records.get(request.handle)
        if record is not None and request.choice < record.spec.n:
            record.choices[request.choice].acknowledge(request.tokens)

    async def WatchLoad(
        self, request: engine_pb2.WatchLoadRequest, context: _Context
    ) -> AsyncIterator[engine_pb2.WatchLoadResponse]:
        """The load now, and then whenever it has changed."""
        loop = self._loop
        pause_s = (request.interval_ms if request.HasField("interval_ms") else _WATCH_MS) / 1000
        changed = loop.watch()
        told: common_pb2.Load | None = None
        try:
            while True:
                changed.clear()
                load = self._load()
                if load != told:
                    told = load
                    yield engine_pb2.WatchLoadResponse(load=load)
                await asyncio.sleep(pause_s)
                await changed.wait()
        finally:
            loop.unwatch(changed)

    async def Explain(
        self, request: engine_pb2.EngineServiceExplainRequest, context: _Context
    ) -> engine_pb2.EngineServiceExplainResponse:
        """Why a request is where it is."""
        found = self._loop.explain(request.token)
        if found is None or found.tenant != request.tenant:
            raise NotFound("no request has that token", field="token")
        return engine_pb2.EngineServiceExplainResponse(
            state=found.state,
            reason=found.reason,
            position=found.position,
            prompt_tokens=found.prompt_tokens,
            computed_tokens=found.computed_tokens,
            output_tokens=found.output_tokens,
            preemptions=found.preemptions,
        )

    async def Drain(self, request: engine_pb2.DrainRequest, context: _Context) -> engine_pb2.DrainResponse:
        """Refuses new requests from now on."""
        if request.HasField("grace_ms"):
            raise Unimplemented("ending live requests after a time is not built", field="grace_ms")
        self._loop.drain()
        return engine_pb2.DrainResponse(live=self._loop.sessions.live)

    async def Pause(self, request: engine_pb2.PauseRequest, context: _Context) -> engine_pb2.PauseResponse:
        """Stops scheduling; what runs keeps its KV."""
        if request.preempt:
            raise Unimplemented("preempting what runs in a pause is not built", field="preempt")
        self._loop.pause(True)
        return engine_pb2.PauseResponse()

    async def Unpause(self, request: engine_pb2.UnpauseRequest, context: _Context) -> engine_pb2.UnpauseResponse:
        """Schedules again."""
        self._loop.pause(False)
        return engine_pb2.UnpauseResponse()

    async def ResetPrefixCache(
        self, request: engine_pb2.ResetPrefixCacheRequest, context: _Context
    ) -> engine_pb2.ResetPrefixCacheResponse:
        """Forgets cached prefixes."""
        return engine_pb2.ResetPrefixCacheResponse(blocks=self._loop.reset_prefix_cache(request.preempt))

    async def WatchCache(self, request: engine_pb2.WatchCacheRequest, context: _Context) -> None:
        """Refused by name."""
        raise Unimplemented("WatchCache is not built")

    async def Sleep(self, request: engine_pb2.EngineServiceSleepRequest, context: _Context) -> None:
        """Refused by name."""
        raise Unimplemented("Sleep is not built")

    async def WakeUp(self, request: engine_pb2.EngineServiceWakeUpRequest, context: _Context) -> None:
        """Refused by name."""
        raise Unimplemented("WakeUp is not built")

    async def Profile(self, request: engine_pb2.EngineServiceProfileRequest, context: _Context) -> None:
        """Refused by name."""
        raise Unimplemented("Profile is not built")
