"""Frames on their way to the engine."""

from __future__ import annotations

import asyncio
from collections import deque

import grpc.aio

from protos import engine_pb2

Stream = grpc.aio.StreamStreamCall[engine_pb2.AttachRequest, engine_pb2.AttachResponse]


class Outbox:
    """Frames on their way to the engine, in order. `put` never waits."""

    __slots__ = ("_filled", "_frames")

    def __init__(self) -> None:
        self._frames: deque[engine_pb2.AttachRequest] = deque()
        self._filled = asyncio.Event()

    def put(self, frame: engine_pb2.AttachRequest) -> None:
        """Puts a frame behind the others."""
        self._frames.append(frame)
        self._filled.set()

    async def pump(self, call: Stream) -> None:
        """Writes until the stream breaks; its reader learns why."""
        try:
            while True:
                while self._frames:
                    await call.write(self._frames.popleft())
                self._filled.clear()
                await self._filled.wait()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return
