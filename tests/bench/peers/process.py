"""A server that runs: its start, its CPU time by role, its memory, its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from services.local.cluster import answers, free_port
from tests.bench.peers.servers import Server
from tests.bench.proc import cpu_s, stat

_POLL_S = 0.05
_ENDS_WITHIN_S = 20.0
_TAIL_LINES = 15
_ROLE = re.compile(r"services\.(gateway|engine|worker|cli)$")


class ServerDied(Exception):
    """It did not start, or ended by itself. The message has the end of its log."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process. The start tells it from a later one with the same id."""

    pid: int
    started: str

    @property
    def lives(self) -> bool:
        """Whether it is still this one, and no zombie."""
        fields = _stat(self.pid)
        return fields[19:20] == [self.started] and fields[0] != "Z"


class Running:
    """A context: the server answers inside, and none of its processes is left afterwards."""

    def __init__(self, server: Server, log: Path, ready_s: float) -> None:
        """Standard output and error go to `log`."""
        self.server, self.port, self._log, self._ready_s = server, free_port(), log, ready_s
        self.url = f"http://127.0.0.1:{self.port}"
        self.start_s = 0.0
        self._seen: set[Process] = set()

    def __enter__(self) -> Self:
        """Raises ServerDied where it ends, or does not answer in time."""
        begin = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self.server.at(self.port),
                cwd=self.server.folder,
                env={**os.environ, **self.server.environ},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            while not answers("127.0.0.1", self.port, self.server.ready):
                self.check()
                if time.monotonic() > begin + self._ready_s:
                    raise ServerDied(f"{self.server.name} does not answer after {self._ready_s:.0f} s{self._tail()}")
                time.sleep(_POLL_S)
        except BaseException:
            self._end()
            raise
        self.start_s = round(time.monotonic() - begin, 1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def check(self) -> None:
        """Raises ServerDied where it has ended."""
        if (status := self._process.poll()) is not None:
            raise ServerDied(f"{self.server.name} ended with status {status}{self._tail()}")

    def processes(self) -> list[Process]:
        """It and all that it started, as far as they live."""
        members = tree(self._process.pid)
        self._seen.update(members)
        return members

    def _tail(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()[-_TAIL_LINES:]
        return "".join(f"\n    {line}" for line in lines)

    def _end(self) -> None:
        """Politely first. What was ever seen of it and still lives is then killed, each by its id."""
        self.processes()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_ENDS_WITHIN_S)
        for member in self._seen:
            if member.lives:
                with suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + _ENDS_WITHIN_S
        while any(member.lives for member in self._seen) and time.monotonic() < deadline:
            time.sleep(_POLL_S / 5)


def _stat(pid: int) -> list[str]:
    """The same as `stat`; nothing where the process has gone."""
    try:
        return stat(pid)
    except OSError:
        return []


def tree(root: int) -> list[Process]:
    """A process and its descendants."""
    found: dict[int, tuple[int, str]] = {}
    for path in Path("/proc").glob("[0-9]*"):
        if fields := _stat(int(path.name)):
            found[int(path.name)] = (int(fields[1]), fields[19])
    members, frontier = [], [root]
    while frontier:
        members += [pid for pid in frontier if pid in found]
        frontier = [pid for pid, (parent, _) in found.items() if parent in frontier]
    return [Process(pid, found[pid][1]) for pid in members]


def role(pid: int) -> str:
    """What a process is: one of our roles, or its name."""
    words = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").split("\0")
    ours = [match[1] for word in words if (match := _ROLE.search(word))]
    if ours:
        return ours[-1]
    names = [word for word in words[1:] if not word.startswith("-")]
    script = Path(words[0]).name.startswith("python") and names and "-c" not in words
    return Path(names[0] if script else words[0]).name or f"{pid}"


@dataclass(frozen=True, slots=True)
class Used:
    """CPU seconds that each process has used so far."""

    by_process: dict[Process, tuple[str, float]]

    @classmethod
    def of(cls, processes: list[Process]) -> Used:
        """One that ends meanwhile is left out."""
        found = {}
        for process in processes:
            with suppress(OSError):
                found[process] = (role(process.pid), cpu_s(process.pid))
        return cls(found)

    @classmethod
    def finely(cls, processes: list[Process]) -> Used:
        """To the nanosecond, for what does little: ticks of 10 ms, which `of` counts, hide it.

        A thread that has ended counts no more, so that only processes at rest can be told so.
        """
        found = {}
        for process in processes:
            with suppress(OSError):
                threads = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
                found[process] = (role(process.pid), sum(int(path.read_text().split()[0]) for path in threads) / 1e9)
        return cls(found)

    def since(self, before: Used) -> dict[str, float]:
        """By role, the largest first."""
        sums: dict[str, float] = defaultdict(float)
        for process, (name, seconds) in self.by_process.items():
            sums[name] += seconds - before.by_process.get(process, ("", 0.0))[1]
        return {name: round(sums[name], 4) for name in sorted(sums, key=lambda name: -sums[name])}


def memory_mib(processes: list[Process]) -> int:
    """Resident memory of all of them; what several share counts once."""
    kib = 0
    for process in processes:
        with suppress(OSError):
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
            kib += sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))
    return kib // 1024
