"""The calls of those who look on: they change nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from protos import common_pb2, engine_pb2
from services.common.errors import InvalidArgument, NotFound
from services.engine.service.opened import Context, OpenedService
from services.engine.wire import frames

_INTERVAL_MS = 100
_LONGEST_INTERVAL_MS = 3_600_000


class WatchCalls(OpenedService):
    """WatchLoad, WatchCache, Explain."""

    async def WatchLoad(
        self, request: engine_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[engine_pb2.WatchLoadResponse]:
        """The load now, and then whenever it has changed."""
        interval_ms = request.interval_ms if request.HasField("interval_ms") else _INTERVAL_MS
        if not 1 <= interval_ms <= _LONGEST_INTERVAL_MS:
            message = f"interval_ms is {interval_ms}, not within 1 and {_LONGEST_INTERVAL_MS}"
            raise InvalidArgument(message, field="interval_ms")
        loop = self._loop
        changed = loop.watch()
        told: common_pb2.Load | None = None
        try:
            while True:
                changed.clear()
                load = self._load()
                if load != told:
                    told = load
                    yield engine_pb2.WatchLoadResponse(load=load)
                    await asyncio.sleep(interval_ms / 1000)
                await changed.wait()
        finally:
            loop.unwatch(changed)

    def _load(self) -> common_pb2.Load:
        loop = self._loop
        return frames.load_message(loop.load, loop.silence_s)

    async def WatchCache(
        self, request: engine_pb2.WatchCacheRequest, context: Context
    ) -> AsyncIterator[engine_pb2.WatchCacheResponse]:
        """What is in the prefix index, or what has happened since a message that was told before; then what happens."""
        cache = self._loop.cache
        watcher = cache.open(request.from_sequence if request.HasField("from_sequence") else None)
        try:
            while True:
                while (message := watcher.take()) is not None:
                    yield frames.cache_message(message)
                await watcher.wake.wait()
        finally:
            cache.close(watcher)

    async def Explain(
        self, request: engine_pb2.EngineServiceExplainRequest, context: Context
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
