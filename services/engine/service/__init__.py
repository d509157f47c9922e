"""EngineService over gRPC: one stream per gateway process (this file), and the calls beside it.

AttachRequest ──▶ wire ──▶ loop.submit / abort           one task per stream
AttachResponse ◀── wire ◀── session.take ◀── loop emits   the stream itself

operator  pause, sleep, drain, reset
watches   the load, the cache, one request
opened    what all of them need
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import AsyncIterator

from protos import common_pb2, engine_pb2, engine_pb2_grpc
from services.common.channel import CHUNK_BYTES
from services.common.errors import InvalidArgument, NotFound, TriptychError, Unimplemented
from services.common.logs import Log
from services.common.server import Server
from services.engine.beats import until_next
from services.engine.config import EngineSettings
from services.engine.events import FINISH_ABORT, FINISH_STOP_STRING
from services.engine.service.opened import Context
from services.engine.service.operator import OperatorCalls
from services.engine.service.watches import WatchCalls
from services.engine.sessions import Session
from services.engine.wire import cards, submits
from services.engine.wire.columns import to_bytes
from services.engine.wire.frames import frames
from services.engine.workers import WorkerGroup

_log = Log("engine.service")


class EngineService(OperatorCalls, WatchCalls):
    """The contract."""

    def __init__(self, settings: EngineSettings, workers: WorkerGroup, incarnation: int, version: str) -> None:
        super().__init__(settings, workers, incarnation, version)
        self._grace_timers: dict[int, asyncio.TimerHandle] = {}

    def register(self, server: Server) -> None:
        """Puts the service on a server that has not started."""
        engine_pb2_grpc.add_EngineServiceServicer_to_server(self, server.grpc)

    async def Hello(
        self, request: engine_pb2.EngineServiceHelloRequest, context: Context
    ) -> engine_pb2.EngineServiceHelloResponse:
        """Who the engine is and what it serves, while its worker group stands."""
        loop = self._loop
        if not self._workers.stands:
            raise self._not_ready()
        standing, settings = loop.standing, self._settings
        return engine_pb2.EngineServiceHelloResponse(
            engine=self._peer,
            model=cards.model_message(standing.model),
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
            text_files=[cards.text_file_message(file) for file in standing.text_files],
        )

    async def GetTextFiles(
        self, request: engine_pb2.EngineServiceGetTextFilesRequest, context: Context
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
            info = cards.text_file_message(file)
            for offset in range(0, len(file.content) or 1, CHUNK_BYTES):
                data = file.content[offset : offset + CHUNK_BYTES]
                chunk = common_pb2.TextFileChunk(file=info, offset=offset, data=data)
                yield engine_pb2.EngineServiceGetTextFilesResponse(chunk=chunk)

    async def Attach(
        self, requests: AsyncIterator[engine_pb2.AttachRequest], context: Context
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
        if not gateway.contract_min <= cards.CONTRACT_VERSION <= gateway.contract_max:
            raise InvalidArgument(
                f"this engine speaks contract version {cards.CONTRACT_VERSION}", field="hello.gateway"
            )
        session = loop.sessions.open(gateway.incarnation, gateway.name)
        session.blob_address = first.hello.blob_address
        stream = self._attach(session)
        reader = asyncio.create_task(self._read(session, stream, requests))
        heart = asyncio.create_task(self._beat(session))
        try:
            yield engine_pb2.AttachResponse(welcome=self._welcome(session), load=self._load())
            async for frame in self._frames(session, stream, reader):
                yield frame
        finally:
            reader.cancel()
            heart.cancel()
            self._detach(session, stream)

    def _attach(self, session: Session) -> int:
        timer = self._grace_timers.pop(session.gateway, None)
        if timer is not None:
            timer.cancel()
        stream = session.attach()
        if self._loop.draining:
            session.drain(self._loop.grace_s)
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
            live_handle_u32le=to_bytes(array("I", session.records)),
        )

    async def _beat(self, session: Session) -> None:
        """Has a frame sent at every beat: one timer is cheaper than one for each frame."""
        while True:
            await asyncio.sleep(until_next(self._settings.heartbeat_s, time.monotonic()))
            session.wake.set()

    async def _frames(
        self, session: Session, stream: int, reader: asyncio.Task[None]
    ) -> AsyncIterator[engine_pb2.AttachResponse]:
        """All that the session has to tell, and a heartbeat where it has nothing, until the gateway hangs up."""
        reader.add_done_callback(lambda _: session.wake.set())
        while session.stream == stream:
            await session.wake.wait()
            if reader.done():
                reader.result()  # raises what the gateway did wrong
                return
            if session.stream != stream:
                return
            told = list(frames(session.take(), self._loop.step_id)) or [engine_pb2.AttachResponse()]
            told[-1].load.CopyFrom(self._load())
            for frame in told:
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
            spec = submits.to_spec(
                submit,
                session.gateway,
                model=loop.standing.model,
                max_n=self._settings.max_n,
                blob_address=session.blob_address,
            )
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
