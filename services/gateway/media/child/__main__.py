"""A media process: one item after the other from its gateway, each within the limits, until the gateway goes.

What is wrong with a file is an answer. What it cannot survive (memory beyond the limit, a crash, no
end) ends the process, and the gateway starts another.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import sys
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.gateway.media.child.bad import BadMedia, NoRoom, TooLarge
from services.gateway.media.child.make import Job, make
from services.gateway.media.frames import HEAD, LONGEST, Frame, pack
from services.gateway.media.items import MediaOptions, MediaSettings, PixelSettings

_FILES = 64
"""Open at once; a media process needs a dozen."""


class Gone(Exception):
    """The gateway has closed the socket."""


class Line:
    """The socket to the gateway, as a process sees it that does one thing at a time."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def send(self, frame: Frame) -> None:
        """One frame out."""
        self._end.sendall(pack(frame))

    def take(self) -> Frame:
        """The next frame. Raises Gone."""
        (length,) = HEAD.unpack(self.bytes(HEAD.size))
        if length > LONGEST:
            raise Gone
        frame: Frame = json.loads(self.bytes(length))
        return frame

    def bytes(self, size: int) -> bytes:
        """So many bytes. Raises Gone."""
        data = bytearray(size)
        view = memoryview(data)
        while view:
            got = self._end.recv_into(view)
            if not got:
                raise Gone
            view = view[got:]
        return bytes(data)


def main() -> None:
    """Serves the socket whose number is the only argument."""
    warnings.simplefilter("ignore")  # what a library says about a file is not for the gateway's log
    _end_with_gateway()
    line = Line(socket.socket(fileno=int(sys.argv[1])))
    try:
        limits = MediaSettings(**line.take())
        _limit(limits)
        line.send({"ready": True})
        while True:
            job = _job(line)
            line.send(_answer(job, limits, line))
            del job
    except (Gone, ConnectionError):
        return


def _end_with_gateway() -> None:
    """The gateway ends this process, or the system does where the gateway was killed; no signal to their group does."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


_PR_SET_PDEATHSIG = 1


def _limit(limits: MediaSettings) -> None:
    """From here on: last in the queue for the processor, bounded memory, few files, no core dumps."""
    os.nice(limits.nice)
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, most in (
        (resource.RLIMIT_AS, taken + limits.memory_bytes),
        (resource.RLIMIT_NOFILE, _FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (most, most))


def _limit_time(limits: MediaSettings) -> None:
    """Ends the process, should the gateway not, once this item has taken its time on the processor."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    until = int(spent.ru_utime + spent.ru_stime + limits.seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (until, resource.RLIM_INFINITY))


def _job(line: Line) -> Job:
    frame = line.take()
    data = Path(frame["path"]) if "path" in frame else line.bytes(frame["size"])
    pixels: dict[str, Any] = frame["pixels"]
    pixels |= {key: tuple(pixels[key]) for key in ("image_mean", "image_std")}
    return Job(data, PixelSettings(**pixels), MediaOptions(**frame["options"]), bytes.fromhex(frame["name"]))


def _answer(job: Job, limits: MediaSettings, line: Line) -> Mapping[str, Any]:
    def ask(need: int) -> None:
        line.send({"need": need})
        line.take()

    _limit_time(limits)
    try:
        return {"made": {**asdict(make(job, limits, ask)), "hash": job.name.hex()}}
    except BadMedia as error:
        return {"wrong": str(error), "large": isinstance(error, TooLarge)}
    except MemoryError:
        return {"wrong": "decoding it takes more memory than a media process may use", "large": True}
    except (Gone, ConnectionError):
        raise
    except NoRoom as error:
        return {"full": error.nbytes}
    except Exception as error:  # not the file's fault: the gateway logs it, and the next item comes
        return {"failed": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
