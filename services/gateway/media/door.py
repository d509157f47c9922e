"""Media of one request: read, made and pinned, all of them at once. One door per gateway process."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from services.common.errors import TriptychError
from services.gateway.media.faults import TOO_MANY, fault
from services.gateway.media.items import MediaOptions, PixelSettings
from services.gateway.media.prepare import MediaSide, Prepared
from services.gateway.media.sources import Sources
from services.gateway.metrics import MediaMetrics
from services.gateway.parts import MediaPart


class MediaDoor:
    """What the process does with media, whatever the model."""

    def __init__(self, side: MediaSide, sources: Sources, metrics: MediaMetrics, max_items: int) -> None:
        self._side = side
        self._sources = sources
        self._metrics = metrics
        self._max_items = max_items

    def check_count(self, parts: Sequence[MediaPart]) -> None:
        """Raises for more items than one request may have."""
        if len(parts) > self._max_items:
            raise fault(TOO_MANY, parts[self._max_items].where, f"more than {self._max_items} images and videos")

    async def prepare(
        self,
        parts: Sequence[MediaPart],
        pixels: Mapping[str, PixelSettings],
        options: Mapping[str, MediaOptions],
        salt: str,
    ) -> list[Prepared]:
        """The items of all parts, pinned: the caller releases them.

        Raises the error of the first part in order that has failed; nothing is pinned then, and the others are ended.
        """
        tasks = [
            asyncio.create_task(self._one(part, pixels[part.modality], options[part.modality], salt)) for part in parts
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done():
                    task.result()
            return [task.result() for task in tasks]
        except BaseException:
            for task in tasks:
                task.cancel()
                task.add_done_callback(_let_go)
            raise

    async def _one(self, part: MediaPart, pixels: PixelSettings, options: MediaOptions, salt: str) -> Prepared:
        began = time.monotonic()
        try:
            async with self._sources.room(part):
                found = await self._sources.read(part, salt)
                prepared = await self._side.prepare(found.data, pixels, options, part.where, digest=found.digest)
        except TriptychError as error:
            self._metrics.failed(part.modality, error.reason or error.kind)
            raise
        self._metrics.prepared(part.modality, time.monotonic() - began)
        return prepared


def _let_go(task: asyncio.Task[Prepared]) -> None:
    """Nobody wants the item any more, whenever it is there."""
    if not task.cancelled() and task.exception() is None:
        task.result().pin.release()
