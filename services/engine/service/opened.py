"""What every call of the service needs: the loop, once the worker group has stood for the first time."""

from __future__ import annotations

from typing import Any

import grpc.aio

from protos import engine_pb2_grpc
from services.common.errors import Unavailable
from services.engine.config import EngineSettings
from services.engine.control import Control
from services.engine.loop import EngineLoop
from services.engine.wire import cards
from services.engine.workers import WorkerGroup

Context = grpc.aio.ServicerContext[Any, Any]
_RETRY_MS = 500


class OpenedService(engine_pb2_grpc.EngineServiceServicer):  # type: ignore[misc]
    """Before `open` every call is answered with the reason why not."""

    def __init__(self, settings: EngineSettings, workers: WorkerGroup, incarnation: int, version: str) -> None:
        self._settings = settings
        self._workers = workers
        self._peer = cards.peer(settings.name, incarnation, version)
        self._opened: tuple[EngineLoop, Control] | None = None

    def open(self, loop: EngineLoop, control: Control) -> None:
        """Requests are taken from now on."""
        self._opened = loop, control

    @property
    def _loop(self) -> EngineLoop:
        return self._parts[0]

    @property
    def _control(self) -> Control:
        return self._parts[1]

    @property
    def _parts(self) -> tuple[EngineLoop, Control]:
        if self._opened is None:
            raise self._not_ready()
        return self._opened

    def _not_ready(self) -> Unavailable:
        return Unavailable(f"not ready; missing: {self._workers.missing}", retry_after_ms=_RETRY_MS)
