"""The calls of an operator: they change what the engine does for everybody."""

from __future__ import annotations

from protos import engine_pb2
from services.common.errors import InvalidArgument, Unimplemented
from services.engine.service.opened import Context, OpenedService

_LEVELS = (1, 2)


class OperatorCalls(OpenedService):
    """Drain, Pause, Unpause, Sleep, WakeUp, ResetPrefixCache, Profile."""

    async def Drain(self, request: engine_pb2.DrainRequest, context: Context) -> engine_pb2.DrainResponse:
        """Refuses new requests from now on, and ends the live ones after the time of grace, if there is one."""
        grace_s = request.grace_ms / 1000 if request.HasField("grace_ms") else None
        return engine_pb2.DrainResponse(live=self._control.drain(grace_s))

    async def Pause(self, request: engine_pb2.PauseRequest, context: Context) -> engine_pb2.PauseResponse:
        """Stops scheduling; answers once no step is in flight."""
        await self._control.pause(request.preempt)
        return engine_pb2.PauseResponse()

    async def Unpause(self, request: engine_pb2.UnpauseRequest, context: Context) -> engine_pb2.UnpauseResponse:
        """Schedules again."""
        self._control.unpause()
        return engine_pb2.UnpauseResponse()

    async def Sleep(
        self, request: engine_pb2.EngineServiceSleepRequest, context: Context
    ) -> engine_pb2.EngineServiceSleepResponse:
        """Frees device memory; requests stay."""
        if request.level not in _LEVELS:
            raise InvalidArgument(f"level is {request.level}, not 1 or 2", field="level")
        return engine_pb2.EngineServiceSleepResponse(freed_bytes=await self._control.sleep(request.level))

    async def WakeUp(
        self, request: engine_pb2.EngineServiceWakeUpRequest, context: Context
    ) -> engine_pb2.EngineServiceWakeUpResponse:
        """Undoes Sleep."""
        await self._control.wake_up()
        return engine_pb2.EngineServiceWakeUpResponse()

    async def ResetPrefixCache(
        self, request: engine_pb2.ResetPrefixCacheRequest, context: Context
    ) -> engine_pb2.ResetPrefixCacheResponse:
        """Forgets cached prefixes."""
        return engine_pb2.ResetPrefixCacheResponse(blocks=self._loop.reset_prefix_cache(request.preempt))

    async def Profile(self, request: engine_pb2.EngineServiceProfileRequest, context: Context) -> None:
        """Refused by name."""
        raise Unimplemented("Profile is not built")
