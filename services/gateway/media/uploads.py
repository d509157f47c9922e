"""Media files that clients sent before: by hash, and by their own names. A folder that all gateways of a host share.

    FOLDER/<SHA-256 of the file>      a file; its time is that of its last use
    FOLDER/n<SHA-256 of the name>     a link to such a file
    FOLDER/.<random>                  a file that is still coming

Beyond the limits those unused for longest go. Names are secret to their salt, since it is part of their hash.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from services.common.errors import DataLoss, FailedPrecondition, InvalidArgument, ResourceExhausted

_NAMES = 16_384
"""Names that are kept, the newest ones."""
_SHARE = 4
"""No more of their file system than a part of so many: see `Uploads._limits`."""
_BETWEEN = 256
"""New names from one look at how many there are to the next."""


class Uploads:
    """The folder. All but `begin` reads or writes content: to be called in threads."""

    def __init__(
        self, folder: Path, limit_bytes: int, max_bytes: int, make_room: Callable[[int], None] = lambda need: None
    ) -> None:
        """`make_room` gets back so many bytes of the folder's file system from others, if it can."""
        self._folder = folder
        self.make_room = make_room
        self._limit_bytes = limit_bytes
        self._max_bytes = max_bytes
        self._named = 0

    def begin(self) -> Upload:
        """A file that comes in pieces."""
        self._make_folder()
        most, _ = self._limits()
        return Upload(self, self._folder / f".{secrets.token_hex(16)}", min(self._max_bytes, most))

    def read(self, digest: bytes) -> bytes | None:
        """A file by its SHA-256; None where it is not here, or no longer."""
        try:
            with (self._folder / digest.hex()).open("rb") as file:
                os.utime(file.fileno())
                return file.read()
        except OSError:
            return None

    def named(self, salt: str, modality: str, uuid: str) -> tuple[bytes, bytes] | None:
        """The file that a client named, and its SHA-256; None where it is not here, or no longer."""
        try:
            digest = bytes.fromhex(str(self._name(salt, modality, uuid).readlink()))
        except OSError:
            return None
        data = self.read(digest)
        return None if data is None else (data, digest)

    def name(self, data: bytes, salt: str, modality: str, uuid: str) -> bytes:
        """Keeps a file by a client's own name, which stands for the newest one; answers the SHA-256."""
        digest = hashlib.sha256(data).digest()
        with self.begin() as upload:
            if not self._touch(self._folder / digest.hex()):
                upload.add(data)
                upload.finish()
        spare = self._folder / f".{secrets.token_hex(16)}"
        try:
            spare.symlink_to(digest.hex())
            spare.replace(self._name(salt, modality, uuid))
        except OSError as error:
            spare.unlink(missing_ok=True)
            raise _no_room(error) from None
        self._named += 1
        if self._named % _BETWEEN == 0:
            self._make_room()
        return digest

    def keep(self, temporary: Path, digest: bytes) -> None:
        """A file is complete: it gets its place, and others make room for it.

        Raises ResourceExhausted where it is not there any more: of many that come at once, a slow one had to go.
        """
        try:
            temporary.replace(self._folder / digest.hex())
        except OSError as error:
            raise _no_room(error) from None
        self._make_room()

    def _name(self, salt: str, modality: str, uuid: str) -> Path:
        parts = "\0".join(f"{len(part)} {part}" for part in (salt, modality, uuid))
        return self._folder / f"n{hashlib.sha256(parts.encode(errors='surrogatepass')).hexdigest()}"

    def _make_folder(self) -> None:
        """For this user alone: whoever can write there can give others' requests its own media."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = self._folder.lstat()
        except OSError as error:
            raise FailedPrecondition(f"no folder for uploads: {error.strerror}") from None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise FailedPrecondition("the folder for uploads is not this user's")

    def _touch(self, path: Path) -> bool:
        try:
            os.utime(path)
        except OSError:
            return False
        return True

    def _limits(self) -> tuple[int, int]:
        """Bytes, and files and names of each: what was set, and never more than a share of the file system.

        The blobs beside them need the rest: they go as soon as nobody needs them, and uploads only for others.
        """
        system = os.statvfs(self._folder)
        most = min(self._limit_bytes, system.f_blocks * system.f_frsize // _SHARE)
        return most, min(_NAMES, system.f_files // (2 * _SHARE)) if system.f_files else _NAMES

    def _make_room(self) -> None:
        most, number = self._limits()
        files: list[tuple[int, int, str]] = []
        links: list[tuple[int, str]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    if entry.is_symlink():
                        links.append((found.st_mtime_ns, entry.path))
                    else:
                        files.append((found.st_mtime_ns, found.st_size, entry.path))
        held = sum(size for _, size, _ in files)
        files.sort()
        for index, (_, size, path) in enumerate(files[:-1]):
            if held <= most and len(files) - index <= number:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            held -= size
        links.sort(reverse=True)
        for index, (_, path) in enumerate(links):
            if index >= number or not os.path.exists(path):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)


class Upload:
    """A file that comes in pieces. `finish` keeps it; leaving the block without that forgets it."""

    def __init__(self, uploads: Uploads, path: Path, limit_bytes: int) -> None:
        self._uploads = uploads
        self._path = path
        self._limit_bytes = limit_bytes
        self._hash = hashlib.sha256()
        self._size = 0
        try:
            self._file = path.open("xb", buffering=0)
        except OSError as error:
            raise _no_room(error) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._file.close()
        self._path.unlink(missing_ok=True)

    def add(self, data: bytes) -> None:
        """The next piece. Raises InvalidArgument where it is too much, ResourceExhausted where there is no room."""
        self._size += len(data)
        if self._size > self._limit_bytes:
            raise InvalidArgument(f"data: more than {self._limit_bytes} bytes", field="data", reason="MEDIA_TOO_LARGE")
        self._hash.update(data)
        rest = memoryview(data)
        try:
            rest = self._write(rest)
            if rest:
                self._uploads.make_room(len(rest))
                rest = self._write(rest)
        except OSError as error:
            raise _no_room(error) from None
        if rest:
            raise _no_room(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def _write(self, rest: memoryview) -> memoryview:
        """As much as there is room for; what is left."""
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        return rest

    def finish(self, expected: bytes | None = None) -> bytes:
        """The file is complete: its SHA-256. Raises DataLoss where that is not the expected one."""
        if not self._size:
            raise InvalidArgument("data: empty", field="data")
        digest = self._hash.digest()
        if expected is not None and digest != expected:
            raise DataLoss("sha256: the file that came has another hash", field="sha256")
        self._uploads.keep(self._path, digest)
        return digest


def _no_room(error: OSError) -> ResourceExhausted:
    words = f"no room for media on this server: {error.strerror}"
    return ResourceExhausted(words, reason="MEDIA_FULL", retry_after_ms=1000)
