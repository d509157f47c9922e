"""The gateway's process: everything is made and wired here, and ended in order."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence

import uvloop

from services.common import logs
from services.common.logs import Log
from services.common.server import LOOK_S, Server, tune_interpreter, wait_for_signal
from services.common.settings import SettingsError
from services.gateway import metrics, service
from services.gateway.config import GatewaySettings
from services.gateway.front import Front
from services.gateway.media.building import Media
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import Models
from services.gateway.prompts import TextSettings
from services.gateway.rest import asgi, facade
from services.gateway.rest.http import HttpServer, bind
from services.gateway.rest.renderer import Renderer
from services.gateway.router import Router
from services.gateway.service.blobs import BlobDoor, host_port
from services.gateway.trace import release

_log = Log("gateway")


class Gateway:
    """One gateway: the way to its engine, two servers in front of it, and a private one at its side."""

    def __init__(self, settings: GatewaySettings, http_socket: socket.socket, version: str) -> None:
        self.settings = settings
        texts = TextSettings(settings.tool_parser, settings.reasoning_parser, settings.allow_chat_template)
        self.metrics = GatewayMetrics()
        self.media = Media(settings, self.metrics.media)
        self.blobs = BlobDoor(lambda: self.media.store, settings.blob_host, settings.blob_port, settings.blob_announce)
        self.models = Models(settings.tokenizer_threads, texts, self.media.door)
        self.metrics.introduce(settings.name, version)
        self.router = Router(
            settings.engine,
            name=settings.name,
            version=version,
            on_engine=self.models.update,
            replay_budget_s=settings.replay_budget_s,
            stall_ms=round(settings.ready_silence_s * 1000),
            put_back=self.blobs.put_back,
        )
        self.front = Front(self.models, self.router, self.metrics, settings.max_concurrent_requests)
        renderer = Renderer(self.front)
        site = asgi.Site(
            renderer, version, self._scrape, metrics.CONTENT_TYPE, settings.max_body_bytes, self.metrics.http_answered
        )
        self.http = HttpServer(asgi.application(site), http_socket)
        self.private: HttpServer | None = None
        if settings.private_port is not None:
            self.private = HttpServer(asgi.private(site), bind(settings.private_host, settings.private_port))
        shared = [("grpc.so_reuseport", int(settings.reuse_port))]
        self.server = Server([host_port(settings.host, settings.grpc_port)], options=shared)
        service.GatewayService(self.front, self.media.uploads).add_to(self.server)
        facade.OpenAiRest(renderer).add_to(self.server)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def grpc_port(self) -> int:
        """The port of the gRPC API."""
        return self.server.ports[0]

    async def start(self) -> None:
        """Listens, and begins to look for the engine."""
        await self.server.start(service.SERVICE, facade.SERVICE)
        await self.http.start()
        if self.private is not None:
            await self.private.start()
            _log.info("listening privately", port=self.private.port)
        await self.blobs.start()
        self.router.blob_address = self.blobs.address
        self._tasks = [asyncio.create_task(self.router.run()), asyncio.create_task(self._watch_readiness())]
        _log.info("listening", http_port=self.http.port, grpc_port=self.grpc_port, engine=self.settings.engine)

    async def failed(self) -> None:
        """Returns, by raising, only when a part that must run for ever has ended."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _watch_readiness(self) -> None:
        ready, changed = False, self.router.changed
        while True:
            changed.clear()
            obstacle = self.front.obstacle()
            if (obstacle is None) != ready:
                ready = obstacle is None
                await self.server.set_ready(ready)
                self.metrics.ready.set(ready)
                _log.info("ready" if ready else "not ready", missing=obstacle)
            await asyncio.sleep(LOOK_S[ready])
            await changed.wait()

    def _scrape(self) -> bytes:
        self.metrics.live.set(self.router.live)
        self.metrics.replays.set(self.router.replays)
        self.metrics.aborts.set(self.router.aborts)
        self.metrics.media.made.set(self.media.made)
        self.metrics.media.found.set(self.media.found)
        return self.metrics.render()

    async def drain(self) -> None:
        """Refuses new requests and lets live ones finish for the time that the settings give them."""
        self.front.draining = True
        self.router.changed.set()
        await self.server.set_ready(False)
        left = await self.front.drain(self.settings.drain_s)
        _log.info("drained", left=left)

    async def close(self) -> None:
        """Ends what still runs and frees the ports."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.router.close()
        await self.http.stop()
        await self.server.stop(0.2)
        await self.blobs.stop()
        if self.private is not None:
            await self.private.stop()
        self.models.close()
        await self.media.close()


async def serve(settings: GatewaySettings) -> int:
    """Runs a gateway until a signal asks it to end."""
    try:
        http_socket = bind(settings.host, settings.http_port, shared=settings.reuse_port)
        gateway = Gateway(settings, http_socket, release())
    except (OSError, RuntimeError) as error:
        _log.error("cannot listen", reason=str(error))
        return 1
    await gateway.start()
    asked = asyncio.create_task(wait_for_signal())
    failed = asyncio.create_task(gateway.failed())
    try:
        await asyncio.wait((asked, failed), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
        _log.info("draining", limit_s=settings.drain_s)
        await gateway.drain()
    finally:
        for task in (asked, failed):
            task.cancel()
        await asyncio.gather(asked, failed, return_exceptions=True)
        await gateway.close()
    return 0


async def main(argv: Sequence[str]) -> int:
    """`python -m services.gateway`; the exit status."""
    try:
        settings = GatewaySettings.load(argv, "triptych gateway")
    except SettingsError as error:
        print(f"triptych gateway: {error}", file=sys.stderr)
        return 2
    logs.configure("gateway", settings.name, settings.log_level, settings.log_style)
    tune_interpreter()
    return await serve(settings)


if __name__ == "__main__":
    sys.exit(uvloop.run(main(sys.argv[1:])))
