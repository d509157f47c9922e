"""One item of media for one request: made once, however many ask for it, and pinned until the request ends."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from services.gateway.media.items import MediaOptions, MediaSettings, PixelSettings, Processed
from services.gateway.media.processes import MediaProcesses
from services.gateway.media.store import BlobStore, Pin


@dataclass(slots=True, frozen=True)
class Prepared:
    """What was made of an item, and what keeps its blob. The caller releases the pin."""

    processed: Processed
    pin: Pin


class MediaSide:
    """Media of one gateway process. Use it as a context: `async with MediaSide(settings) as media`."""

    def __init__(self, settings: MediaSettings) -> None:
        self.settings = settings
        self.store = BlobStore(Path(settings.folder), settings.store_bytes)
        self.processes = MediaProcesses(settings)

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
        raise NotImplementedError

    def find(self, digest: bytes, pixels: PixelSettings, options: MediaOptions) -> Prepared | None:
        """The item if it was made before and its blob is still there: for parts that name content without it."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.processes.close()
