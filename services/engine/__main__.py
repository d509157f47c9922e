"""The engine's process: everything is made and wired here, and ended in order."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import sys
from collections.abc import Sequence
from importlib import metadata

import uvloop
from prometheus_client import CollectorRegistry

from services.common import logs
from services.common.errors import TriptychError
from services.common.logs import Log
from services.common.metrics import Scrape
from services.common.server import LOOK_S, Server, tune_interpreter, wait_for_signal
from services.common.settings import SettingsError
from services.engine.config import EngineSettings
from services.engine.control import Control
from services.engine.core import EngineCore
from services.engine.grammars import Grammars
from services.engine.loop import EngineLoop, core_config
from services.engine.metrics import EngineMetrics
from services.engine.service import EngineService
from services.engine.standing import Standing
from services.engine.workers import WorkerGroup

SERVICE = "triptych.v1.EngineService"
_log = Log("engine")


class Engine:
    """One engine: its server, its worker group, and the loop between them once the group stands."""

    def __init__(self, settings: EngineSettings) -> None:
        incarnation = secrets.randbits(63) | 1
        version = _version()
        self.settings = settings
        self.registry = CollectorRegistry()
        self.workers = WorkerGroup(settings, incarnation, version)
        self.service = EngineService(settings, self.workers, incarnation, version)
        self.server = Server([settings.listen])
        self.loop: EngineLoop | None = None
        self._grammars: Grammars | None = None
        self.service.register(self.server)

    async def run(self) -> None:
        """Serves until cancelled."""
        await self.server.start(SERVICE)
        _log.info("listening", listen=self.settings.listen, worker=self.settings.worker)
        standing = await self.workers.stand(None)
        engine_metrics = EngineMetrics(self.registry, standing.model.name, self.settings.name)
        engine_metrics.cache_config(standing, self.settings.enable_prefix_caching)
        config = core_config(self.settings, standing)
        grammars = self._grammars = self._make_grammars(standing)
        loop = EngineLoop(
            self.settings,
            self.workers,
            standing,
            lambda: EngineCore(config, grammars=grammars),
            engine_metrics,
        )
        engine_metrics.silence(lambda: loop.silence_s)
        self.service.open(loop, Control(loop, self.workers))
        self.loop = loop
        watch = asyncio.create_task(self._watch_readiness(loop))
        try:
            await loop.run()
        finally:
            watch.cancel()

    def _make_grammars(self, standing: Standing) -> Grammars:
        wake = asyncio.get_running_loop().call_soon_threadsafe
        return Grammars(
            {file.name: file.content for file in standing.text_files},
            standing.model.vocab_size,
            threads=self.settings.grammar_threads,
            limit_s=self.settings.grammar_timeout_s,
            changed=lambda: wake(self.workers.changed.set),
        )

    async def _watch_readiness(self, loop: EngineLoop) -> None:
        """Ready while the worker group stands, nothing drains, and work makes progress.

        Only work can make silence: without any, readiness ends by an event, and nobody has to look.
        """
        ready, changed = False, loop.watch()
        while True:
            changed.clear()
            before = ready
            ready = self.workers.stands and not loop.draining and loop.silence_s < self.settings.ready_silence_s
            if ready != before:
                await self.server.set_ready(ready)
                _log.info("ready" if ready else "not ready", missing=self.workers.missing or None)
            await asyncio.sleep(LOOK_S[ready])
            if ready and loop.idle:
                await changed.wait()

    async def drain(self) -> None:
        """Lets live requests finish for the time that the settings give them, and stops serving."""
        await self.server.set_ready(False)
        if self.loop is not None:
            self.loop.drain(None)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.loop.sessions.idle.wait(), self.settings.drain_s)
            _log.info("drained", left=self.loop.sessions.live)

    async def close(self) -> None:
        """Ends the streams and frees the addresses."""
        await self.server.stop(0.2)
        await self.workers.close()
        if self._grammars is not None:
            self._grammars.close()


def _version() -> str:
    try:
        return metadata.version("triptych")
    except metadata.PackageNotFoundError:
        return "unreleased"


async def serve(engine: Engine) -> int:
    """Runs an engine until a signal asks it to end."""
    running = asyncio.create_task(engine.run())
    asked = asyncio.create_task(wait_for_signal())
    try:
        await asyncio.wait((running, asked), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        _log.info("draining", limit_s=engine.settings.drain_s)
        await engine.drain()
    finally:
        running.cancel()
        asked.cancel()
        await asyncio.gather(running, asked, return_exceptions=True)
        await engine.close()
    return 0


async def main(argv: Sequence[str]) -> int:
    """`python -m services.engine`; the exit status."""
    try:
        settings = EngineSettings.load(argv, "triptych engine")
        engine = Engine(settings)
        Scrape(engine.registry, settings.metrics_host, settings.metrics_port)
    except (SettingsError, TriptychError, ValueError, OSError, RuntimeError) as error:  # an address may be taken
        print(f"triptych engine: {error}", file=sys.stderr)
        return 2
    logs.configure("engine", settings.name, settings.log_level, settings.log_style)
    tune_interpreter()
    return await serve(engine)


if __name__ == "__main__":
    sys.exit(uvloop.run(main(sys.argv[1:])))
