"""Blobs in a folder of the host: named by hash, written whole or not at all, shared by every gateway process.

written:  .HASH.RANDOM.tmp, locked by its writer ── link ──▶ HASH      (one name, one content: a second writer yields)
pinned:   an open file with a shared lock, which ends with the process, however that ends
evicted:  oldest use first, only what can be locked exclusively: nobody's pin
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from services.common.errors import FailedPrecondition, ResourceExhausted

_ABANDONED_S = 60.0
"""A half-written file that nobody has locked for so long has lost its writer."""


_RESERVE = 16
"""A file system in memory that fills up takes the memory of its machine."""


@dataclass(slots=True)
class _Held:
    descriptor: int
    count: int


@dataclass(slots=True)
class Pin:
    """Keeps a blob from being evicted. Release it once; a second time does nothing."""

    hash: bytes
    nbytes: int
    store: BlobStore | None

    def release(self) -> None:
        """Lets the blob go."""
        if self.store is not None:
            store, self.store = self.store, None
            store.let_go(self.hash)


class BlobStore:
    """One folder. `pin`, `release` and `open` are quick calls of the system; `make_room` lists the folder."""

    def __init__(self, folder: Path, limit_bytes: int, reserve_bytes: int | None = None) -> None:
        """Makes the folder, for this user alone. Raises FailedPrecondition where it is somebody else's.

        `limit_bytes` are kept of what no request needs; `reserve_bytes` of the file system stay free, by default a
        sixteenth.
        """
        self.folder = folder
        self.limit_bytes = limit_bytes
        self.reserve_bytes = reserve_bytes
        self._held: dict[bytes, _Held] = {}
        self._make_folder()

    def _make_folder(self) -> None:
        """Also later: what cleans up temporary files may take it away under a running server."""
        folder = self.folder
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            status = folder.lstat()
        except OSError as error:
            raise FailedPrecondition(f"media_dir {folder}: {error.strerror}", field="media_dir") from None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise FailedPrecondition(f"media_dir {folder}: not a folder of this user", field="media_dir")

    def pin(self, name: bytes) -> Pin | None:
        """The blob of that hash, kept until the pin is released; None where there is none."""
        held = self._held.get(name)
        if held is None:
            descriptor = self._lock(name)
            if descriptor is None:
                return None
            held = self._held[name] = _Held(descriptor, 0)
        held.count += 1
        return Pin(name, os.fstat(held.descriptor).st_size, self)

    def _lock(self, name: bytes) -> int | None:
        try:
            descriptor = os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # being evicted
            os.close(descriptor)
            return None
        if os.fstat(descriptor).st_nlink == 0:  # evicted between the two calls
            os.close(descriptor)
            return None
        os.utime(descriptor)
        return descriptor

    def let_go(self, name: bytes) -> None:
        """One pin less."""
        held = self._held[name]
        held.count -= 1
        if held.count == 0:
            os.utime(held.descriptor)
            os.close(held.descriptor)
            del self._held[name]

    @property
    def pinned(self) -> int:
        """Blobs that this process holds."""
        return len(self._held)

    def path(self, name: bytes) -> Path:
        """Where the blob lies, if there is one."""
        return self.folder / name.hex()

    def open(self, name: bytes) -> BinaryIO | None:
        """The blob to read from with `os.pread`; None where there is none. One that is pinned outlives its name."""
        held = self._held.get(name)
        if held is not None:
            return os.fdopen(os.dup(held.descriptor), "rb", 0)
        try:
            return self.path(name).open("rb", 0)
        except FileNotFoundError:
            return None

    def put_back(self, name: bytes) -> None:
        """Gives a blob that the caller has pinned its name again, whatever lies there now. Copies: not for the event
        loop, and one at a time. Raises FailedPrecondition where what is pinned has been cut.
        """
        held = self._held[name]
        if self._is_there(name, held.descriptor):
            return
        self._make_folder()
        size = os.fstat(held.descriptor).st_size
        with writing(self.folder, name, replace=True) as copy:
            done = 0
            while done < size:
                sent = os.sendfile(copy.fileno(), held.descriptor, done, size - done)
                if not sent:
                    raise FailedPrecondition(f"the blob {name.hex()} was cut")
                done += sent
        copied = self._lock(name)
        if copied is not None:  # from now on the pins are those of the copy
            os.dup2(copied, held.descriptor, inheritable=False)
            os.close(copied)

    def _is_there(self, name: bytes, descriptor: int) -> bool:
        try:
            return os.path.samestat(self.path(name).lstat(), os.fstat(descriptor))
        except FileNotFoundError:
            return False

    def make_room(self, need: int = 0) -> None:
        """Evicts what no request needs, beyond the limit and where the folder's file system has no `need` bytes left.

        Raises ResourceExhausted where it is full of what requests need.
        """
        self._make_folder()
        found = []
        now = time.time()
        for entry in os.scandir(self.folder):
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if not entry.name.startswith("."):
                    found.append((status.st_mtime_ns, status.st_size, entry.name))
                elif now - status.st_mtime > _ABANDONED_S:
                    self._evict(entry.name)
        held = {name.hex() for name in list(self._held)}
        loose = [each for each in sorted(found) if each[2] not in held]
        total = sum(size for _, size, _ in loose)
        for _, size, name in loose:
            if total <= self.limit_bytes and not self._is_full(need):
                return
            self._evict(name)
            total -= size  # gone, or another gateway's pin: needed, and not counted
        if self._is_full(need):
            raise ResourceExhausted("media_dir is full of what running requests need", retry_after_ms=1000)

    def could_hold(self, size: int) -> bool:
        """Whether so many bytes have room in the file system once everything else has gone."""
        system = os.statvfs(self.folder)
        return size + self._reserve(system) <= system.f_blocks * system.f_frsize

    def _reserve(self, system: os.statvfs_result) -> int:
        if self.reserve_bytes is not None:
            return self.reserve_bytes
        return system.f_blocks // _RESERVE * system.f_frsize

    def _is_full(self, need: int) -> bool:
        system = os.statvfs(self.folder)
        few_names = system.f_favail < system.f_files // _RESERVE  # of a file system that counts them
        return few_names or system.f_bavail * system.f_frsize < self._reserve(system) + need

    def _evict(self, name: str) -> bool:
        """Removes a file that nobody has locked; says whether it is gone."""
        try:
            descriptor = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(self.folder / name)
        except BlockingIOError:
            return False
        except FileNotFoundError:
            return True
        finally:
            os.close(descriptor)
        return True


@contextmanager
def writing(folder: Path, name: bytes, replace: bool = False) -> Iterator[BinaryIO]:
    """A file that becomes the blob of that hash when the block ends without an error, or vanishes.

    With `replace` it does so even where there is one; pins of that one hold it, and no longer its name.
    """
    temporary = folder / f".{name.hex()}.{secrets.token_hex(4)}.tmp"  # containers have equal process ids
    with temporary.open("xb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield file
            file.flush()
            if replace:
                temporary.rename(folder / name.hex())
            else:
                with suppress(FileExistsError):
                    os.link(temporary, folder / name.hex())
        finally:
            temporary.unlink(missing_ok=True)
