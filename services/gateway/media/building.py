"""The media side of a gateway process, from its knobs. What costs anything is made when a model first needs it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

from services.gateway.config import GatewaySettings
from services.gateway.media.door import MediaDoor
from services.gateway.media.items import MediaSettings
from services.gateway.media.prepare import MediaSide
from services.gateway.media.sources import Fetches, Sources
from services.gateway.media.store import BlobStore
from services.gateway.media.uploads import Uploads
from services.gateway.metrics import MediaMetrics

_SHARED_MEMORY: Final = Path("/dev/shm")


class Media:
    """Made once per process; `close` ends what it started."""

    def __init__(self, settings: GatewaySettings, metrics: MediaMetrics) -> None:
        self._settings = settings
        self._metrics = metrics
        folder = blob_folder(settings)
        self.uploads = Uploads(
            folder.with_name(f"{folder.name}-uploads"),
            settings.media_uploads_bytes,
            settings.media_max_bytes,
            self._make_room,
        )
        self._side: MediaSide | None = None
        self._door: MediaDoor | None = None

    def door(self) -> MediaDoor:
        """The door for requests. Raises FailedPrecondition where the folder of blobs can't be used."""
        if self._door is None:
            settings = self._settings
            self._side = MediaSide(media_settings(settings))
            sources = Sources(settings.media_max_bytes, self.uploads, _fetcher(settings), settings.media_files)
            self._door = MediaDoor(self._side, sources, self._metrics, settings.media_max_items)
        return self._door

    def _make_room(self, need: int) -> None:
        """Blobs that nobody needs make room for an upload."""
        if self._side is not None:
            self._side.store.make_room(need)

    @property
    def store(self) -> BlobStore | None:
        """The blobs, once there is a model that takes media."""
        return None if self._side is None else self._side.store

    @property
    def made(self) -> int:
        """Items that were decoded, and not found made already."""
        return 0 if self._side is None else self._side.made

    @property
    def found(self) -> int:
        """Items that were there already, so far."""
        return 0 if self._side is None else self._side.found

    async def close(self) -> None:
        """Ends the processes, if there are any."""
        if self._side is not None:
            await self._side.close()


def blob_folder(settings: GatewaySettings) -> Path:
    """Where gateway and worker of one host meet: in memory where it can be, for this user alone."""
    if settings.media_dir:
        return Path(settings.media_dir)
    parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return parent / f"triptych-{os.getuid()}"


def media_settings(settings: GatewaySettings) -> MediaSettings:
    """The limits of decoding and of the store."""
    return MediaSettings(
        folder=str(blob_folder(settings)),
        store_bytes=settings.media_store_bytes,
        processes=settings.media_processes,
        memory_bytes=settings.media_memory_bytes,
        seconds=settings.media_timeout_s,
        nice=settings.media_nice,
        queue=settings.media_queue,
        image_pixels=settings.media_image_pixels,
        video_pixels=settings.media_video_pixels,
        video_frames=settings.media_video_frames,
    )


def _fetcher(settings: GatewaySettings) -> Fetches | None:
    """What fetches media from elsewhere; None where the operator allows none. Only then the client is loaded."""
    if not settings.media_allowed_hosts and not settings.media_allow_any_host:
        return None
    from services.gateway.media.fetch import Fetcher, Remote

    return Fetcher(
        Remote(
            None if settings.media_allow_any_host else settings.media_allowed_hosts,
            settings.media_ports,
            settings.media_redirects,
            settings.media_fetch_s,
            settings.media_max_bytes,
        )
    )
