"""The HTTP server: uvicorn inside our process, on our socket, ended by us and not by its own signals."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections import deque
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_UNSENT_BYTES = 128 * 1024
"""What the kernel keeps for a client that reads slowly (twice that): the rest waits as tokens, and is merged."""
OUTLET = "triptych.outlet"
"""The ASGI extension under which an endpoint finds the Outlet of its answer; for use after the start of a body
without a length."""
_AHEAD = 8
"""Requests that may wait behind the one that is answered, on one connection."""


class _Departures:
    """Connections that have something to send: it leaves after this turn of the loop, of all of them at once.

    What all requests have to say about a step is made first, then sent: system calls between would cool
    the caches down for everything in between.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: deque[_Writer] = deque()

    def add(self, writer: _Writer) -> None:
        """Flushes it soon, once."""
        self._waiting.append(writer)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._leave)

    def _leave(self) -> None:
        waiting = self._waiting
        try:
            while waiting:
                waiting.popleft().flush()
        finally:
            if waiting:
                asyncio.get_running_loop().call_soon(self._leave)


class _Writer(asyncio.Transport):
    """A connection whose writes of one turn of the loop leave together, as one packet where they fit in one."""

    def __init__(self, inner: asyncio.Transport, departures: _Departures) -> None:
        super().__init__()
        self._inner = inner
        self._departures = departures
        self._waiting: list[bytes] = []
        self.get_extra_info = inner.get_extra_info  # type: ignore[method-assign]
        self.is_closing = inner.is_closing  # type: ignore[method-assign]
        self.pause_reading = inner.pause_reading  # type: ignore[method-assign]
        self.resume_reading = inner.resume_reading  # type: ignore[method-assign]
        self.get_write_buffer_size = inner.get_write_buffer_size  # type: ignore[method-assign]

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Takes data; it leaves soon."""
        if not self._waiting:
            self._departures.add(self)
        self._waiting.append(bytes(data))

    def flush(self) -> None:
        """Sends what waits."""
        waiting, self._waiting = self._waiting, []
        if waiting and not self._inner.is_closing():
            self._inner.write(waiting[0] if len(waiting) == 1 else b"".join(waiting))

    def close(self) -> None:
        """Sends what waits, then closes."""
        self.flush()
        self._inner.close()


class _Outlet:
    """The body of an answer in chunks, past uvicorn's `send`: the same bytes, in a tenth of the time."""

    __slots__ = ("_cycle",)

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle

    def write(self, chunk: bytes) -> bool:
        """Takes a chunk; tells whether the client keeps up."""
        if chunk and not self._cycle.disconnected:
            self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk))
        return not self._cycle.flow.write_paused

    async def drained(self) -> None:
        """Returns when the client keeps up again, or is gone."""
        await self._cycle.flow.drain()


class _Protocol(HttpToolsProtocol):
    """A connection. A client that leaves is seen, also with other requests sent behind the one that is answered.

    uvicorn stops to read there, so that it would not see the end, and tells it to the last request only.
    A client that has sent more than `_AHEAD` requests, or 64 KiB of the next one's body, is not read until its
    answer is over: it is seen to leave when the next chunk is written.
    """

    _answered: RequestResponseCycle | None = None

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answered = cycle
        cycle.scope["extensions"] = {OUTLET: _Outlet(cycle)}  # type: ignore[dict-item]
        super()._start_asgi_task(cycle, app)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has come."""
        assert isinstance(self.config, _Config)
        super().connection_made(_Writer(transport, self.config.departures))

    def on_headers_complete(self) -> None:
        """A request has begun."""
        super().on_headers_complete()
        if 0 < len(self.pipeline) <= _AHEAD:
            self.flow.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client is gone."""
        self.pipeline.clear()
        if self._answered is not None and not self._answered.response_complete:
            self._answered.disconnected = True
            self._answered.message_event.set()
        super().connection_lost(exc)


class _Config(uvicorn.Config):
    """What all connections of a server share."""

    def __init__(self, app: ASGIApp, *, drain_s: float) -> None:
        super().__init__(
            app,
            http=_Protocol,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, math.ceil(drain_s)),
        )
        self.departures = _Departures()


class _Server(uvicorn.Server):
    def __init__(self, config: _Config) -> None:
        super().__init__(config)
        self.ending = asyncio.Event()

    async def main_loop(self) -> None:
        """Waits for the end. uvicorn's own looks ten times a second, which is half of what an idle gateway costs."""
        await self.on_tick(0)
        await self.ending.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process's main."""
        yield


def bind(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """A listening socket's address taken early, so that a port in use is an error at start. Raises OSError.

    A `shared` port may be listened on by other processes that share it too.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _UNSENT_BYTES)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise OSError(error.errno, f"{host}:{port}: {error.strerror}") from None
    bound.setblocking(False)
    return bound


class HttpServer:
    """Serves an ASGI application on a bound socket."""

    def __init__(self, app: ASGIApp, bound: socket.socket, *, drain_s: float = 2.0) -> None:
        self._socket = bound
        self.port: int = bound.getsockname()[1]
        self._server = _Server(_Config(app, drain_s=drain_s))
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens."""
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise RuntimeError("the HTTP server ended as it started")
            await asyncio.sleep(0.005)

    async def stop(self) -> None:
        """Closes the socket; answers that are being written get `drain_s`."""
        self._server.should_exit = True
        self._server.ending.set()
        if self._task is not None:
            await self._task
