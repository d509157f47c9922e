"""The HTTP server: uvicorn inside our process, on our socket, ended by us and not by its own signals."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp


class _Server(uvicorn.Server):
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
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            date_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=max(1, math.ceil(drain_s)),
        )
        self._server = _Server(config)
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
        if self._task is not None:
            await self._task
