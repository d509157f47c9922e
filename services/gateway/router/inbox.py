"""Frames from the engine."""

from __future__ import annotations

import asyncio
import time

from protos import engine_pb2
from services.gateway.router.outbox import Stream


class Inbox:
    """Frames from the engine, in order. One timer watches over all of them, so that a frame costs none."""

    __slots__ = ("_call", "_came", "_silence_s", "_silent", "_timer")

    def __init__(self, call: Stream, silence_s: float) -> None:
        self._call = call
        self._silence_s = silence_s
        self._silent = False
        self._came = time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(silence_s, self._look)

    async def read(self) -> engine_pb2.AttachResponse | None:
        """The next frame; None after the last. Raises TimeoutError where none, not even a heartbeat, comes in time."""
        try:
            frame = await self._call.read()
        except asyncio.CancelledError:
            if self._silent:
                raise TimeoutError(f"no heartbeat for {self._silence_s:g} s") from None
            raise
        self._came = time.monotonic()
        return frame if isinstance(frame, engine_pb2.AttachResponse) else None

    def _look(self) -> None:
        left = self._came + self._silence_s - time.monotonic()
        if left > 0:
            self._timer = asyncio.get_running_loop().call_later(left, self._look)
        else:
            self._silent = True
            self._call.cancel()

    def close(self) -> None:
        """Watches no more."""
        self._timer.cancel()
