"""Where the bytes of a part come from: the URL itself, a host elsewhere, a folder, an upload, an earlier part.

data:      base64 inside the URL            http(s):  fetch.py, where the operator allows it
file:      below one folder, if one is set  32 bytes  an upload      ""  what had this uuid before
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import re
import stat
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path
from typing import Final, NamedTuple, Protocol
from urllib.parse import unquote

from services.common.errors import InvalidArgument, TriptychError
from services.gateway.media.faults import MALFORMED, REFUSED, TOO_LARGE, UNKNOWN, fault, too_large
from services.gateway.media.uploads import Uploads
from services.gateway.parts import MediaPart

_DATA: Final = re.compile(r"data:(?P<type>[\w.+-]+/[\w.+-]+)?(?P<parameters>(;[^,;]*)*?)(?P<base64>;base64)?", re.I)
_SCHEME: Final = re.compile(r"[a-z][a-z0-9+.-]*:", re.I)
_LONGEST_HEAD: Final = 256
_LONGEST_URL: Final = 8192
"""Characters of one without content. Reading a host's name of a million takes seconds on the event loop."""
_PIECE: Final = 1 << 16
"""Characters that are decoded without a break; a multiple of 4."""
_AT_ONCE: Final = 16
"""Items of one process, fetched ones and others apart: slow hosts hold up nothing else."""
_SMALL: Final = 64 * 1024


class Sourced(NamedTuple):
    """The bytes of a part, and their SHA-256 where it is known."""

    data: bytes
    digest: bytes | None = None


class Fetches(Protocol):
    """Gets bytes by http and https."""

    async def fetch(self, url: str, where: str) -> bytes:
        """The bytes behind a URL. Raises InvalidArgument at `where`."""
        ...


class Sources:
    """The sources that an operator allows. `files` is the folder of file: URLs; None refuses them."""

    def __init__(self, max_bytes: int, uploads: Uploads, fetcher: Fetches | None = None, files: str = "") -> None:
        self._max_bytes = max_bytes
        self._uploads = uploads
        self._fetcher = fetcher
        self._remote = asyncio.Semaphore(_AT_ONCE)
        self._local = asyncio.Semaphore(_AT_ONCE)
        self._files = Path(files).resolve() if files else None
        self._one_at_a_time = asyncio.Semaphore(1)  # more threads that want the interpreter hold up the event loop

    def room(self, part: MediaPart) -> AbstractAsyncContextManager[None]:
        """Around reading a part and making its item: so many at once of what is not here yet, for memory's sake."""
        if isinstance(part.source, str):
            if part.source[:5].lower() == "data:":
                return nullcontext()
            if part.source[:4].lower() == "http":
                return self._remote
        return self._local

    async def read(self, part: MediaPart, salt: str) -> Sourced:
        """The bytes of a part. Names are known among requests of equal salt.

        Raises InvalidArgument at the part, or ResourceExhausted where a name can't be kept.
        """
        if not part.source:
            return await self._named(part, salt)
        if isinstance(part.source, bytes):
            found = Sourced(await self._uploaded(part.source, part.where), part.source)
        else:
            found = await self._behind(part.source, part)
        if not found.data:
            raise fault(MALFORMED, part.where, "empty")
        if part.uuid is not None:
            try:
                digest = await asyncio.to_thread(self._uploads.name, found.data, salt, part.modality, part.uuid)
            except InvalidArgument:
                words = "too large to be kept by its uuid on this server; send it without"
                raise fault(TOO_LARGE, part.where, words) from None
            return Sourced(found.data, digest)
        return found

    async def _uploaded(self, digest: bytes, where: str) -> bytes:
        data = await asyncio.to_thread(self._uploads.read, digest)
        if data is None:
            raise fault(UNKNOWN, where, "no upload of this hash is here (any more)")
        return data

    async def _behind(self, url: str, part: MediaPart) -> Sourced:
        scheme = _SCHEME.match(url, 0, _LONGEST_HEAD)
        kind = scheme.group().lower() if scheme else ""
        if kind == "data:":
            return await self._decoded(url, part)
        if len(url) > _LONGEST_URL:
            raise fault(MALFORMED, part.where, f"a URL of more than {_LONGEST_URL} characters")
        match kind:
            case "http:" | "https:":
                if self._fetcher is None:
                    raise fault(REFUSED, part.where, "this server fetches no media; send a data: URL, or upload it")
                return Sourced(await self._fetcher.fetch(url, part.where))
            case "file:":
                return Sourced(await asyncio.to_thread(self._file, url, part.where))
        raise fault(MALFORMED, part.where, "no URL of a kind that is taken: https:, http:, data: or file:")

    async def _named(self, part: MediaPart, salt: str) -> Sourced:
        assert part.uuid is not None
        found = await asyncio.to_thread(self._uploads.named, salt, part.modality, part.uuid)
        if found is None:
            raise fault(
                UNKNOWN, part.where, f"no {part.modality} of this uuid is here (any more); send it with its URL"
            )
        return Sourced(*found)

    async def _decoded(self, url: str, part: MediaPart) -> Sourced:
        """The content of a data: URL; its length is checked before it is decoded."""
        at = url.find(",", 0, _LONGEST_HEAD)
        head = _DATA.fullmatch(url[:at]) if at >= 0 else None
        if head is None:
            raise fault(MALFORMED, part.where, "no data: URL: data:TYPE;base64,… is one")
        if head["base64"] is None:
            raise fault(MALFORMED, part.where, "a data: URL must have its content in base64: data:TYPE;base64,…")
        if (head["type"] or "").lower().partition("/")[0] != part.modality:
            given = head["type"] or "nothing"
            raise fault(MALFORMED, part.where, f"a data: URL with {part.modality}/… is needed, not {given!r:.80}")
        start, length = at + 1, len(url) - at - 1
        if length * 3 // 4 - 2 > self._max_bytes:
            raise too_large(part.where, self._max_bytes)
        try:
            if length <= _SMALL:
                found = _content(url, start)
            else:
                async with self._one_at_a_time:
                    found = await asyncio.to_thread(_content, url, start)
        except ValueError:
            raise fault(MALFORMED, part.where, "the content of the data: URL is no base64") from None
        if len(found.data) > self._max_bytes:
            raise too_large(part.where, self._max_bytes)
        return found

    def _file(self, url: str, where: str) -> bytes:
        """A file below the folder; what links lead to counts."""
        if self._files is None:
            raise fault(REFUSED, where, "this server reads no files")
        rest = url[len("file:") :]
        host, slash, name = rest[2:].partition("/") if rest.startswith("//") else ("", "/", rest.lstrip("/"))
        if host.lower() not in ("", "localhost") or not slash or not name:
            raise fault(MALFORMED, where, "no file: URL: file:///folder/name is one")
        try:
            path = Path("/" + unquote(name, errors="strict")).resolve(strict=True)
            if not path.is_relative_to(self._files):
                raise fault(REFUSED, where, "the file is not in the folder that this server reads from")
            found = path.stat()
            if not stat.S_ISREG(found.st_mode):
                raise fault(REFUSED, where, "this is no file")
            if found.st_size > self._max_bytes:
                raise too_large(where, self._max_bytes)
            with path.open("rb") as file:
                data = file.read(self._max_bytes + 1)
        except TriptychError:
            raise
        except (OSError, ValueError, RuntimeError):  # one word for all: nobody learns what lies elsewhere
            raise fault(REFUSED, where, "the file is not in the folder that this server reads from") from None
        if len(data) > self._max_bytes:
            raise too_large(where, self._max_bytes)
        return data


def _content(url: str, start: int) -> Sourced:
    """What is behind the comma. Its hash is made here: for many items at once it would hold up the event loop."""
    data = _unbase64(url, start)
    return Sourced(data, hashlib.sha256(data).digest())


def _unbase64(text: str, start: int) -> bytes:
    """Strictly, in pieces: decoding holds the interpreter's lock. Raises ValueError."""
    padded = text.find("=", start)  # the decoder itself takes some padding that is too much
    if (len(text) - start) % 4 or (padded >= 0 and text[padded:] not in ("=", "==")):
        raise ValueError("wrong padding")
    pieces = (text[at : at + _PIECE].encode("ascii") for at in range(start, len(text), _PIECE))
    return b"".join([binascii.a2b_base64(piece, strict_mode=True) for piece in pieces])
