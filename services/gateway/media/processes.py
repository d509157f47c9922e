"""Child processes that decode and write blobs. A crash, a hang or a bomb costs the request that brought it.

    process ──queue──▶ an idle child ── job ─▶ need ─▶ (bytes free?) ─▶ go ─▶ made
                             ▲                     │ no answer in time, or no child any more
                             └── another one ◀─────┘

A request that goes away does not end a child: what it has begun it finishes, within its time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import sys
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.common.errors import ResourceExhausted, internal
from services.gateway.media.faults import MALFORMED, TOO_LARGE, Reason
from services.gateway.media.frames import HEAD, LONGEST, Frame, pack
from services.gateway.media.items import MediaOptions, MediaSettings, PixelSettings, Processed

_LOG = logging.getLogger(__name__)
_START_S = 60.0
"""A process that does not come up within this has no machine to come up on."""
_WHERE_MODULES_ARE = ("-P",) if sys.flags.safe_path else ()
"""As this process was told: modules in the folder where a user happens to be are not ours."""
_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # numpy's threads would do nothing here and take room
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": str(1 << 20),  # large pieces go back to the system when they are freed
    "MALLOC_TRIM_THRESHOLD_": str(1 << 20),
}


class Refused(Exception):
    """What is wrong with an item; the text goes on from "messages[0].content[1]: "."""

    def __init__(self, words: str, reason: Reason = MALFORMED) -> None:
        super().__init__(words)
        self.words = words
        self.reason = reason


class NoRoom(ResourceExhausted):
    """The file system of the blobs has no `nbytes` left."""

    def __init__(self, nbytes: int) -> None:
        super().__init__("media_dir has no room for another item; try again later", retry_after_ms=1000)
        self.nbytes = nbytes


class _Lost(Exception):
    """The child ended."""


class _Child:
    """One process and the socket to it."""

    def __init__(self, process: asyncio.subprocess.Process, end: socket.socket) -> None:
        self.process = process
        self._end = end
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def start(cls, settings: MediaSettings) -> _Child:
        """A process that is ready. Raises _Lost."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *_WHERE_MODULES_ARE,
                "-m",
                "services.gateway.media.child",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **_ENVIRONMENT},
            )
        ours.setblocking(False)
        child = cls(process, ours)
        try:
            async with asyncio.timeout(_START_S):
                await child.send(asdict(settings))
                await child.take()
        except BaseException:
            await child.end()
            raise
        return child

    @property
    def gone(self) -> bool:
        """Whether it has ended while it had nothing to do, say for want of memory elsewhere."""
        try:
            return not self._end.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except ConnectionError:
            return True

    async def send(self, frame: Frame, data: bytes = b"") -> None:
        """One frame, and the bytes that belong to it."""
        try:
            await self._loop.sock_sendall(self._end, pack(frame))
            await self._loop.sock_sendall(self._end, data)
        except ConnectionError:
            raise _Lost from None

    async def take(self) -> Frame:
        """The next frame."""
        (length,) = HEAD.unpack(await self._bytes(HEAD.size))
        if length > LONGEST:
            raise _Lost
        frame: Frame = json.loads(await self._bytes(length))
        return frame

    async def _bytes(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                got = await self._loop.sock_recv(self._end, size - len(data))
            except ConnectionError:
                got = b""
            if not got:
                raise _Lost
            data += got
        return data

    async def end(self) -> int:
        """Kills it, if it runs; its exit status."""
        self._end.close()
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        return await self.process.wait()


class Room:
    """Bytes that the children may take together, first come, first served. What is more than all runs alone."""

    def __init__(self, most: int) -> None:
        self._free = self._most = most
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def taken(self, need: int) -> AsyncIterator[None]:
        """Waits for them; gives them back."""
        need = min(need, self._most)
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((need, granted))
        self._grant()
        try:
            await granted
            yield
        finally:
            if granted.done() and not granted.cancelled():
                self._free += need
            else:
                self._waiting.remove((need, granted))
            self._grant()

    def _grant(self) -> None:
        while self._waiting and self._waiting[0][0] <= self._free:
            need, granted = self._waiting.popleft()
            self._free -= need
            granted.set_result(None)


class MediaProcesses:
    """So many children, each started when it is first needed. One event loop uses them."""

    def __init__(self, settings: MediaSettings) -> None:
        self.settings = settings
        self.started = 0
        self.waiting = 0
        self._idle: list[_Child] = []
        self._all: set[_Child] = set()
        self._slots = asyncio.Semaphore(settings.processes)
        self._room = Room(settings.decode_bytes)
        self._runs: set[asyncio.Task[Processed]] = set()

    @property
    def pids(self) -> list[int]:
        """Of all children."""
        return [child.process.pid for child in self._all]

    async def start(self) -> None:
        """Starts all children now, so that the first items need not wait for it."""
        missing = self.settings.processes - len(self._idle) - len(self._runs)
        self._idle += await asyncio.gather(*(self._start() for _ in range(missing)))

    async def process(self, data: bytes | Path, pixels: PixelSettings, options: MediaOptions, name: bytes) -> Processed:
        """Makes the blob of that hash. Raises Refused, NoRoom, or ResourceExhausted where too many wait."""
        if self.waiting >= self.settings.queue:
            raise ResourceExhausted("too many media items are waiting; try again later", retry_after_ms=1000)
        self.waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting -= 1
        run = asyncio.create_task(self._run(data, pixels, options, name))
        self._runs.add(run)
        run.add_done_callback(self._ran)
        return await asyncio.shield(run)

    def _ran(self, run: asyncio.Task[Processed]) -> None:
        self._runs.discard(run)
        self._slots.release()
        if not run.cancelled():
            run.exception()  # its request may have gone

    async def _next(self) -> _Child:
        while self._idle:
            child = self._idle.pop()
            if not child.gone:
                return child
            await self._end(child)
        return await self._start()

    async def _start(self) -> _Child:
        self.started += 1
        try:
            child = await _Child.start(self.settings)
        except (_Lost, TimeoutError, OSError) as error:
            raise internal(f"a media process did not start: {error or type(error).__name__}") from None
        self._all.add(child)
        return child

    async def _end(self, child: _Child) -> int:
        self._all.discard(child)
        return await child.end()

    async def _run(self, data: bytes | Path, pixels: PixelSettings, options: MediaOptions, name: bytes) -> Processed:
        child = await self._next()
        job: dict[str, Any] = {"pixels": asdict(pixels), "options": asdict(options), "name": name.hex()}
        job |= {"size": len(data)} if isinstance(data, bytes) else {"path": str(data)}
        kept = False
        try:
            answer = await self._exchange(child, job, data if isinstance(data, bytes) else b"")
            kept = True
        except TimeoutError:
            raise Refused(f"it was not decoded within {self.settings.seconds:g} s", TOO_LARGE) from None
        except _Lost:
            status = await self._end(child)
            _LOG.warning("a media process ended over an item", extra={"pid": child.process.pid, "status": status})
            raise Refused("a media process ended while it decoded this") from None
        finally:
            if kept:
                self._idle.append(child)
            else:
                await self._end(child)
        return _read(answer)

    async def _exchange(self, child: _Child, job: Frame, data: bytes) -> Frame:
        """One item. The time that it waits for room is not its own."""
        async with asyncio.timeout(self.settings.seconds):
            await child.send(job, data)
            answer = await child.take()
        while "need" in answer:
            async with self._room.taken(answer["need"]), asyncio.timeout(self.settings.seconds):
                await child.send({"go": True})
                answer = await child.take()
        return answer

    async def close(self) -> None:
        """Ends the children, whatever they are at."""
        for run in list(self._runs):
            run.cancel()
        await asyncio.gather(*self._runs, return_exceptions=True)
        while self._idle:
            await self._end(self._idle.pop())


def _read(answer: Frame) -> Processed:
    if "wrong" in answer:
        raise Refused(answer["wrong"], TOO_LARGE if answer["large"] else MALFORMED)
    if "full" in answer:
        raise NoRoom(answer["full"])
    if "failed" in answer:
        _LOG.error("a media process could not do its work", extra={"reason": answer["failed"]})
        raise internal("media could not be stored")
    made = answer["made"]
    return Processed(
        **{**made, "hash": bytes.fromhex(made["hash"]), "grid": tuple(made["grid"]), "times": tuple(made["times"])}
    )
