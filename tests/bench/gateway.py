"""What the gateway costs: CPU of the gateway's process alone, while clients stream from it over HTTP.

python -m tests.bench.gateway [stream] [max] [bodies] [--gateways N] [--simulated] [--runs 3]

    stream   64 streams at 50 tokens per second each, nothing merged: CPU per token, gaps
    max      more and more tokens per second over 256 streams, until a gateway does not keep up:
             tokens that wait are merged into one delta, and `tokens_per_chunk` says how many
    bodies   `stream`, with chats of 50 kB beside it: the gaps of the others, with and without

The engine is a process that only deals out tokens, one for each gateway; with --simulated it is the real
one with a simulated worker. Client, engine and gateway are processes of their own and share this machine,
also with whatever else runs on it: figures are medians of the runs. Prints a table, then one line of JSON
per row.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from tests.engine.cluster import ROOT

MAX_STREAMS = 256
MAX_RATES = (10_000, 20_000, 30_000, 45_000, 60_000, 80_000)


@dataclass(frozen=True, slots=True)
class Load:
    """What clients do, and how fast the engine is."""

    name: str
    streams: int
    hz: float
    body_bytes: int = 0

    @property
    def offered(self) -> float:
        """Tokens per second that the engine gives."""
        return self.streams * self.hz


LOADS = {
    "stream": (Load("64 streams", 64, 50),),
    "max": tuple(Load(f"{rate} tokens/s", MAX_STREAMS, rate / MAX_STREAMS) for rate in MAX_RATES),
    "bodies": (Load("64 streams", 64, 50), Load("64 streams, 50 kB bodies", 64, 50, 50_000)),
}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _start(module: str, *options: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", module, *options], cwd=ROOT)


def _simulated(folder: str, load: Load, gateways: int) -> tuple[list[str], list[subprocess.Popen[bytes]]]:
    listen, work = f"unix:{folder}/e", f"unix:{folder}/w"
    quiet = ("--metrics-port", "0", "--log-level", "warning")
    free = ("--simulated-token-us", "0", "--simulated-row-us", "0", "--simulated-max-model-len", "200000")
    step = ("--simulated-step-us", str(1e6 / load.hz))
    worker = _start("services.worker", "--simulated", "--listen", work, *step, *free, *quiet)
    room = ("--max-num-seqs", str(load.streams + 32), "--num-blocks", "200000", "--kv-cache-bytes", str(1 << 40))
    budget = ("--max-num-batched-tokens", "65536")
    engine = _start("services.engine", "--listen", listen, "--worker", work, *room, *budget, *quiet)
    return [listen] * gateways, [worker, engine]


def _steady(load: Load, gateways: int) -> tuple[list[str], list[subprocess.Popen[bytes]]]:
    """An engine per gateway: a steady one does not tell the requests of two gateways apart."""
    ports = [str(_free_port()) for _ in range(gateways)]
    engines = [_start("tests.bench.steady_engine", "--port", port, "--hz", str(load.hz)) for port in ports]
    return [f"127.0.0.1:{port}" for port in ports], engines


@contextmanager
def _running(load: Load, gateways: int, *, simulated: bool) -> Iterator[tuple[list[int], list[int]]]:
    """HTTP ports and process ids of gateways that are ready."""
    with tempfile.TemporaryDirectory(prefix="tri", dir="/tmp") as folder:
        addresses, processes = _simulated(folder, load, gateways) if simulated else _steady(load, gateways)
        ports = [_free_port() for _ in range(gateways)]
        quiet = ("--grpc-port", "0", "--log-level", "warning")
        doors = [
            _start("services.gateway", "--engine", address, "--http-port", str(port), *quiet)
            for address, port in zip(addresses, ports, strict=True)
        ]
        processes += doors
        try:
            for port in ports:
                _wait_until_ready(port)
            yield ports, [door.pid for door in doors]
        finally:
            for process in reversed(processes):
                process.kill()
                process.wait()


def _wait_until_ready(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready"):
            return
        time.sleep(0.05)
    raise SystemExit("the gateway did not become ready")


def measure(load: Load, gateways: int, seconds: float, *, simulated: bool) -> dict[str, Any]:
    """One run."""
    with _running(load, gateways, simulated=simulated) as (ports, pids):
        command = [sys.executable, "-m", "tests.bench.sse_client"]
        command += ["--ports", *map(str, ports), "--pids", *map(str, pids), "--streams", str(load.streams)]
        command += ["--seconds", str(seconds), "--body-bytes", str(load.body_bytes)]
        found: dict[str, Any] = json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout)
    return found


def _median(name: str, values: Sequence[Any]) -> Any:
    if name == "cpu_percent":
        return [statistics.median(process) for process in zip(*values, strict=True)]
    return round(statistics.median(values), 3)


def main() -> int:
    """Prints the table, a row as soon as it is measured."""
    parser = argparse.ArgumentParser(prog="tests.bench.gateway", description=__doc__)
    parser.add_argument("modes", nargs="*", help=f"of {', '.join(LOADS)}; by default all")
    parser.add_argument("--gateways", type=int, default=1)
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    for mode in given.modes:
        if mode not in LOADS:
            parser.error(f"no mode {mode!r}: {', '.join(LOADS)}")
    lines: list[str] = []
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, medians of {given.runs} runs\n")
    for mode in given.modes or LOADS:
        for load in LOADS[mode]:
            runs = [measure(load, given.gateways, given.seconds, simulated=given.simulated) for _ in range(given.runs)]
            found = {name: _median(name, [run[name] for run in runs]) for name in runs[0]}
            row = {"mode": mode, "load": load.name, "gateways": given.gateways, "offered_per_s": load.offered, **found}
            if not lines:
                print("| " + " | ".join(row) + " |\n|" + "---|" * len(row))
            print("| " + " | ".join(map(str, row.values())) + " |", flush=True)
            lines.append(json.dumps(row))
            if mode == "max" and found["tokens_per_s"] < 0.95 * load.offered:
                break
    print("\n" + "\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
