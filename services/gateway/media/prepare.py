"""One item of media for one request: made once, however many ask for it, and pinned until the request ends.

digest ──▶ hash ──▶ known, and its blob there? ──▶ pin
                        │ no
                        └─▶ being made? wait with the others : make it ──▶ pin
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from services.common.errors import Unavailable
from services.gateway.media.faults import TOO_LARGE, fault
from services.gateway.media.items import MediaOptions, MediaSettings, PixelSettings, Processed, item_hash
from services.gateway.media.processes import MediaProcesses, NoRoom, Refused
from services.gateway.media.store import BlobStore, Pin

_LONG = 1 << 18
"""Bytes from which on hashing is for a thread: 0.2 ms."""
_KNOWN = 16_384
"""Items whose sizes are remembered. Their blobs are what takes room, and have a limit of their own."""
_TRIES = 3
"""A blob that was made may be evicted before it is pinned, where others need the room at that moment."""


@dataclass(slots=True, frozen=True)
class Prepared:
    """What was made of an item, and what keeps its blob. The caller releases the pin."""

    processed: Processed
    pin: Pin


@dataclass(slots=True)
class _Flight:
    """An item that is being made, and how many requests wait for it."""

    task: asyncio.Task[Processed]
    waiting: int = 0


class MediaSide:
    """Media of one gateway process. Use it as a context: `async with MediaSide(settings) as media`."""

    def __init__(self, settings: MediaSettings) -> None:
        self.settings = settings
        self.store = BlobStore(Path(settings.folder), settings.store_bytes)
        self.processes = MediaProcesses(settings)
        self.made = 0
        self.found = 0
        self._known: OrderedDict[bytes, Processed] = OrderedDict()
        self._flights: dict[bytes, _Flight] = {}

    async def prepare(
        self,
        data: bytes | Path,
        pixels: PixelSettings,
        options: MediaOptions,
        where: str,
        *,
        digest: bytes | None = None,
    ) -> Prepared:
        """The item, made or found. `digest` is the SHA-256 of the data where it is known already.

        Raises InvalidArgument that names `where` (as the client calls the place), or ResourceExhausted.
        """
        name = item_hash(digest or await _digest(data), pixels, options)
        for _ in range(_TRIES):
            found = self._find(name)
            if found is not None:
                self.found += 1
                return found
            try:
                processed = await self._join(name, data, pixels, options)
            except Refused as refused:
                raise fault(refused.reason, where, refused.words) from None
            pin = self.store.pin(name)
            if pin is not None:
                return Prepared(processed, pin)
        raise Unavailable("media are evicted as fast as they are made; try again later", retry_after_ms=1000)

    def find(self, digest: bytes, pixels: PixelSettings, options: MediaOptions) -> Prepared | None:
        """The item if it was made before and its blob is still there: for parts that name content without it."""
        return self._find(item_hash(digest, pixels, options))

    def _find(self, name: bytes) -> Prepared | None:
        processed = self._known.get(name)
        if processed is None:
            return None
        pin = self.store.pin(name)
        if pin is None:
            del self._known[name]
            return None
        self._known.move_to_end(name)
        return Prepared(processed, pin)

    async def _join(self, name: bytes, data: bytes | Path, pixels: PixelSettings, options: MediaOptions) -> Processed:
        """Waits for the item with all who want it. The last one to go away takes it out of the queue."""
        flight = self._flights.get(name)
        if flight is None:
            flight = self._flights[name] = _Flight(asyncio.create_task(self._make(name, data, pixels, options)))
            flight.task.add_done_callback(lambda task: self._landed(name, task))
        flight.waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiting -= 1
            if flight.waiting == 0 and not flight.task.done():
                flight.task.cancel()
                self._flights.pop(name, None)

    async def _make(self, name: bytes, data: bytes | Path, pixels: PixelSettings, options: MediaOptions) -> Processed:
        await asyncio.to_thread(self.store.make_room)
        try:
            processed = await self.processes.process(data, pixels, options, name)
        except NoRoom as full:  # how much it takes is known now: others that nobody needs go, and it is made again
            if not self.store.could_hold(full.nbytes):
                raise Refused(f"{full.nbytes} bytes to encode: media_dir can't hold so many", TOO_LARGE) from None
            await asyncio.to_thread(self.store.make_room, full.nbytes)
            processed = await self.processes.process(data, pixels, options, name)
        self.made += 1
        self._known[name] = processed
        if len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        return processed

    def _landed(self, name: bytes, task: asyncio.Task[Processed]) -> None:
        flight = self._flights.get(name)
        if flight is not None and flight.task is task:
            del self._flights[name]
        if not task.cancelled():
            task.exception()  # whoever waited for it may have gone

    async def close(self) -> None:
        """Ends what is being made, and the processes."""
        for flight in list(self._flights.values()):
            flight.task.cancel()
        await self.processes.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def _digest(data: bytes | Path) -> bytes:
    if isinstance(data, Path):
        return await asyncio.to_thread(_digest_of_file, data)
    if len(data) < _LONG:
        return hashlib.sha256(data).digest()
    return await asyncio.to_thread(lambda: hashlib.sha256(data).digest())


def _digest_of_file(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()
