"""Blobs: what a gateway made of an item of media, for the encoder. Knows files and futures, no protobuf and no grpc.

    step arrives ── want ──▶ in the folder of the host? mapped at once
                     │            └── no ──▶ fetched from the gateway that made it, while earlier steps run
    its turn ─────── take ◀───────┘                                              (None: nobody has it)
    answered ─────── done    nothing of it is kept

A blob is checked before it is believed: what does not fit the item or its own size is missing, with a line in the log.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from dataclasses import dataclass
from pathlib import Path

from services.common.errors import TriptychError
from services.common.logs import Log
from services.worker.step import Blob, MediaItem

_log = Log("worker.blobs")
_SHARED_MEMORY = Path("/dev/shm")
FETCH_LIMIT_S = 20.0
"""How long a gateway may take to send a blob."""
FETCH_LIMIT_BYTES = 1 << 30
"""Bytes of fetched blobs that are held at once."""


Data = bytes | bytearray | mmap.mmap
Decode = Callable[[Data], tuple[bytes, Blob]]
"""Reads a whole blob, its hash first, without copying its patches. Raises TriptychError where it is none."""
Fetch = Callable[[str, bytes, Callable[[int], None]], Awaitable[bytearray]]
"""Fetches a blob by address and hash; the callback hears its size before any of it is kept, and may raise
TriptychError. Raises TriptychError too."""


def default_folder() -> Path:
    """Where gateway and worker of one host meet, unless their settings say otherwise: in memory where it can be."""
    parent = _SHARED_MEMORY if _SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return parent / f"triptych-{os.getuid()}"


@dataclass(slots=True, eq=False)
class _Wanted:
    """A blob that steps on their way wait for."""

    found: Future[Blob | None]
    steps: int = 0
    fetching: asyncio.Task[None] | None = None
    held: int = 0  # bytes of it that count against the limit

    @property
    def there(self) -> bool:
        """Whether it has been found."""
        return self.found.done() and self.found.result() is not None

    def settle(self, blob: Blob | None) -> None:
        """The answer for the steps on their way; a step that comes after a miss may have better luck."""
        if self.found.done():
            self.found = Future()
        self.found.set_result(blob)


class Blobs:
    """The blobs of the steps on their way. `want` and `done` belong on the event loop, `take` on the step thread."""

    def __init__(
        self,
        folder: Path,
        decode: Decode,
        fetch: Fetch,
        limit_s: float = FETCH_LIMIT_S,
        limit_bytes: int = FETCH_LIMIT_BYTES,
    ) -> None:
        self._folder = folder
        self._decode = decode
        self._fetch = fetch
        self._limit_s = limit_s
        self._limit_bytes = limit_bytes
        self._wanted: dict[bytes, _Wanted] = {}

    @property
    def held_bytes(self) -> int:
        """Bytes that were fetched, or are being fetched."""
        return sum(each.held for each in self._wanted.values())

    def want(self, items: Iterable[MediaItem]) -> None:
        """A step has come that encodes these: what the host does not have begins to be fetched."""
        for item in items:
            wanted = self._wanted.setdefault(item.hash, _Wanted(Future()))
            wanted.steps += 1
            if wanted.there:
                continue
            blob = self._of_host(item)
            if blob is not None:
                wanted.settle(blob)
            elif wanted.fetching is None and item.source:
                wanted.found = Future() if wanted.found.done() else wanted.found
                wanted.fetching = asyncio.create_task(self._fetch_into(wanted, item))
            elif wanted.fetching is None:
                self._miss(wanted, item, "the folder has no such blob, and no gateway is named that has it")

    def take(self, name: bytes) -> Blob | None:
        """The blob of this hash, once it is there; None where it is nowhere, or comes too late."""
        wanted = self._wanted.get(name)
        if wanted is None:
            return None
        try:
            return wanted.found.result(self._limit_s + 1)
        except TooLate:  # the event loop hangs
            return None

    def done(self, items: Iterable[MediaItem]) -> None:
        """The step that encoded these has been answered, or never will be."""
        for item in items:
            wanted = self._wanted.get(item.hash)
            if wanted is None:
                continue
            wanted.steps -= 1
            if not wanted.steps:
                del self._wanted[item.hash]
                if wanted.fetching is not None:
                    wanted.fetching.cancel()
                wanted.found.cancel()  # nobody waits for it

    def _of_host(self, item: MediaItem) -> Blob | None:
        path = self._folder / item.hash.hex()
        try:
            with path.open("rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:  # not ours to read; empty
            _log.warning("blob cannot be read", path=str(path), why=str(error))
            return None
        return self._read(data, item, str(path))

    async def _fetch_into(self, wanted: _Wanted, item: MediaItem) -> None:
        blob, why = None, ""
        try:
            async with asyncio.timeout(self._limit_s):
                data = await self._fetch(item.source, item.hash, lambda size: self._hold(wanted, size))
            blob = self._read(data, item, item.source)
        except TimeoutError:
            why = f"{item.source} did not send it within {self._limit_s:g} s"
        except TriptychError as error:
            why = f"{item.source}: {error.message}"
        wanted.fetching = None
        if wanted.there:  # in the folder, meanwhile
            wanted.held = 0
        elif blob is None:
            wanted.held = 0
            self._miss(wanted, item, why)
        else:
            wanted.settle(blob)

    def _miss(self, wanted: _Wanted, item: MediaItem, why: str) -> None:
        _log.warning("blob missing", hash=item.hash.hex(), modality=item.modality, why=why or None)
        wanted.settle(None)

    def _hold(self, wanted: _Wanted, size: int) -> None:
        held = self.held_bytes
        if held + size > self._limit_bytes:
            raise TriptychError(
                f"{size} bytes beside {held} are more than the {self._limit_bytes} that are held at once"
            )
        wanted.held = size

    def _read(self, data: Data, item: MediaItem, origin: str) -> Blob | None:
        try:
            name, blob = self._decode(data)
        except TriptychError as error:
            _log.warning("blob makes no sense", hash=item.hash.hex(), origin=origin, why=error.message)
            return None
        if (name, blob.modality, blob.grid) != (item.hash, item.modality, item.grid):
            _log.warning(
                "blob is of another item",
                hash=item.hash.hex(),
                origin=origin,
                found=f"{blob.modality} {blob.grid} {name.hex()}",
                wanted=f"{item.modality} {item.grid}",
            )
            return None
        return blob
