"""Wires the worker and runs it until it is asked to end: `python -m services.worker --help`."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import uvloop
from prometheus_client import CollectorRegistry

from services.common import logs
from services.common.errors import FailedPrecondition, TriptychError
from services.common.metrics import Scrape
from services.common.server import LOOK_S, Server, tune_interpreter, wait_for_signal
from services.common.settings import SettingsError
from services.worker import wire
from services.worker.blobs import Blobs, default_folder
from services.worker.config import WorkerSettings
from services.worker.memory import share_one_heap
from services.worker.metrics import WorkerMetrics
from services.worker.service import WorkerService
from services.worker.step import BlobSource, Runner

_END_S = 0.5  # what is left for the last answers to leave
_log = logs.Log("worker")


def build_blobs(settings: WorkerSettings) -> Blobs:
    """Media as gateways prepared them."""
    folder = Path(settings.media_dir) if settings.media_dir else default_folder()
    return Blobs(folder, wire.decode_blob, wire.fetch_blob)


def build_runner(settings: WorkerSettings, blobs: BlobSource) -> Runner:
    """The runner that the settings ask for; only the real one imports torch."""
    if settings.simulated:
        from services.worker.simulated import Cost, SimulatedRunner

        cost = Cost(
            settings.simulated_step_us,
            settings.simulated_token_us,
            settings.simulated_row_us,
            settings.simulated_embedding_us,
        )
        return SimulatedRunner(
            settings.script,
            cost,
            settings.simulated_max_model_len,
            kv_cache_bytes=settings.kv_cache_bytes,
            kv_windows=_windows(settings.simulated_kv_windows),
            blobs=blobs,
        )
    if settings.script:
        raise SettingsError("--script is for a simulated worker: add --simulated")
    # Torch's own threads spin for milliseconds at every barrier. Where they share their cores with other
    # processes that costs up to a factor of ten; a bound of about 0.1 ms costs nothing where they do not.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    share_one_heap()
    from services.worker.runner import TorchRunner

    return TorchRunner(settings, blobs)


def memory_bytes(settings: WorkerSettings) -> int:
    """Memory of the device that the worker may use; 0 for a simulated one."""
    if settings.simulated:
        return 0
    from services.worker.devices import find, memory_of

    return memory_of(find(settings.device)).free()


def _windows(text: str) -> list[int | None]:
    """The windows of the KV groups; None sees everything."""
    try:
        windows = [int(window) for window in text.split(",")]
    except ValueError:
        windows = [-1]
    if min(windows) < 0:
        raise SettingsError(f"--simulated-kv-windows: {text!r} is not a list of numbers such as 0,128")
    return [window or None for window in windows]


def _version() -> str:
    try:
        return version("triptych")
    except PackageNotFoundError:
        return "unpackaged"


async def _preload(service: WorkerService, settings: WorkerSettings, given_up: asyncio.Event) -> None:
    """Loads the configured model before any engine asks, so that their start-ups overlap; a failure is logged there."""
    try:
        await service.load(settings.model, None)
    except TriptychError:
        if not settings.keep_trying:
            given_up.set()


async def _show_readiness(service: WorkerService, server: Server, stall_s: float) -> None:
    """Ready is: a model is loaded and no step is stuck. Says what is missing whenever that changes."""
    shown: tuple[bool, str] | None = None
    while True:
        service.changed.clear()
        stuck = service.silence_s > stall_s
        state = (service.loaded and not stuck, f"progress: no step for {stall_s:g} s" if stuck else service.missing)
        if state != shown:
            ready, missing = shown = state
            await server.set_ready(ready)
            _log.info("ready" if ready else "not ready", missing=missing or None)
        await asyncio.sleep(LOOK_S[state[0]])
        if state[0] and service.idle:
            await service.changed.wait()


async def main(argv: Sequence[str]) -> int:
    """Runs a worker with these arguments; returns the exit status."""
    try:
        settings = WorkerSettings.load(argv, "triptych worker")
        blobs = build_blobs(settings)
        runner = build_runner(settings, blobs)
        registry = CollectorRegistry()
        scrape = Scrape(registry, settings.metrics_host, settings.metrics_port)
    except (SettingsError, FailedPrecondition, OSError) as error:  # a device may be missing, an address taken
        print(f"triptych worker: {error}", file=sys.stderr)
        return 2
    logs.configure("worker", settings.name, settings.log_level, settings.log_style)
    tune_interpreter()
    metrics = WorkerMetrics(registry, settings.name)
    service = WorkerService(
        runner,
        metrics,
        name=settings.name,
        version=_version(),
        model_path=settings.model,
        memory_bytes=memory_bytes(settings),
        blobs=blobs,
    )
    server = Server([settings.listen])
    await service.start(server)
    _log.info("listening", address=settings.listen, device=runner.device, metrics_port=scrape.server_port)
    given_up = asyncio.Event()
    ends = [asyncio.create_task(wait_for_signal()), asyncio.create_task(given_up.wait())]
    tasks: list[asyncio.Task[Any]] = list(ends)
    if settings.model or settings.simulated:
        tasks.append(asyncio.create_task(_preload(service, settings, given_up)))
    tasks.append(asyncio.create_task(_show_readiness(service, server, settings.stall_s)))
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    _log.info("ending", drain_s=settings.drain_s)
    for task in tasks:
        task.cancel()
    await server.set_ready(False)
    await service.drain(settings.drain_s)
    await service.close()
    await server.stop(_END_S)
    return int(given_up.is_set())


if __name__ == "__main__":
    sys.exit(uvloop.run(main(sys.argv[1:])))
