"""Child processes that decode and write blobs. A crash, a hang or a bomb costs the request that brought it."""

from __future__ import annotations

from pathlib import Path

from services.gateway.media.items import MediaOptions, MediaSettings, PixelSettings, Processed


class MediaProcesses:
    """So many children, started when the first item comes. One event loop uses them."""

    def __init__(self, settings: MediaSettings) -> None:
        self._settings = settings

    async def process(
        self, data: bytes | Path, pixels: PixelSettings, options: MediaOptions, name: bytes, where: str
    ) -> Processed:
        """Makes the blob of that hash. Raises InvalidArgument at `where`, or ResourceExhausted."""
        raise NotImplementedError

    async def close(self) -> None:
        """Ends the children."""
