"""Does the hop between engine and worker cost anything? Measured with a simulated worker whose step
takes exactly as long as it is told, the engine and the worker as processes of their own over unix
sockets, and one gateway with many running requests.

python -m tests.bench.async_steps [--rows 256] [--step-ms 10] [--seconds 12] [--in-flight 2]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from protos import engine_pb2, worker_pb2, worker_pb2_grpc
from services.common.channel import connect
from tests.bench.proc import cpu_s
from tests.engine.cluster import ROOT, Gateway

_PROMPT = 16


@dataclass(frozen=True, slots=True)
class Figures:
    """Times in milliseconds. `ratio` is the mean step over what a step was told to take."""

    rows: int
    in_flight: int
    asked_ms: float
    steps: int
    seconds: float
    mean_ms: float
    median_ms: float
    p99_ms: float
    ratio: float
    engine_cpu_ms_per_step: float
    worker_cpu_ms_per_step: float


class Watcher(Gateway):
    """A gateway that notes when steps came, and does nothing else with them."""

    def __init__(self, address: str, rows: int) -> None:
        super().__init__(address)
        self._wanted = rows
        self.arrivals: list[tuple[float, int]] = []  # when, and of how many steps the frame has tokens

    def _take(self, frame: engine_pb2.AttachResponse) -> None:
        kind = frame.WhichOneof("frame")
        if kind == "outputs" and len(frame.outputs.finish_u8) == self._wanted:
            steps = len(frame.outputs.token_id_i32le) // 4 // self._wanted
            self.arrivals.append((time.perf_counter(), steps))
        elif kind in {"rejected", "failed"}:
            raise RuntimeError(f"a request ended: {frame}")


def _start(module: str, *options: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", module, *options, "--metrics-port", "0", "--log-level", "warning"]
    return subprocess.Popen(command, cwd=ROOT)


async def _steps_done(worker: Any) -> int:
    return int((await worker.Health(worker_pb2.WorkerServiceHealthRequest())).steps)


async def measure(rows: int, step_ms: float, seconds: float, in_flight: int) -> Figures:
    """One run."""
    output = int((seconds + 6) * 1000 / step_ms) + 200
    with tempfile.TemporaryDirectory(prefix="tri", dir="/tmp") as folder:
        listen, work = f"unix:{folder}/e", f"unix:{folder}/w"
        free = ("--simulated-token-us", "0", "--simulated-row-us", "0", "--simulated-max-model-len", str(output + 100))
        worker = _start(
            "services.worker", "--simulated", "--listen", work, "--simulated-step-us", str(step_ms * 1000), *free
        )
        engine = _start(
            "services.engine",
            *("--listen", listen, "--worker", work, "--steps-in-flight", str(in_flight)),
            *("--max-num-seqs", str(rows), "--max-num-batched-tokens", str(max(512, rows * 2))),
            *("--num-blocks", str(rows * (output // 16 + 8)), "--kv-cache-bytes", str(1 << 40)),
        )
        gateway = Watcher(listen, rows)
        channel = connect(work)
        try:
            await gateway.wait_until_served()
            await gateway.attach()
            for handle in range(1, rows + 1):
                ids = array("i", [handle % 200] * _PROMPT)
                await gateway.submit(handle, ids, max_tokens=output)
            await gateway.until(lambda: len(gateway.arrivals) > 2 * 1000 / step_ms)
            stub: Any = worker_pb2_grpc.WorkerServiceStub(channel)
            before = (time.perf_counter(), await _steps_done(stub), cpu_s(engine.pid), cpu_s(worker.pid))
            first = len(gateway.arrivals)
            await asyncio.sleep(seconds)
            after = (time.perf_counter(), await _steps_done(stub), cpu_s(engine.pid), cpu_s(worker.pid))
            arrivals = gateway.arrivals[first:]
        finally:
            await gateway.close()
            await channel.close()
            for process in (engine, worker):
                process.terminate()
                process.wait()
    took, done, engine_s, worker_s = (end - begin for begin, end in zip(before, after, strict=True))
    gaps = sorted(
        (later - earlier) / steps * 1e3 for (earlier, _), (later, steps) in pairwise(arrivals) for _ in range(steps)
    )
    mean_ms = took / done * 1e3
    return Figures(
        rows=rows,
        in_flight=in_flight,
        asked_ms=step_ms,
        steps=int(done),
        seconds=round(took, 2),
        mean_ms=round(mean_ms, 3),
        median_ms=round(statistics.median(gaps), 3),
        p99_ms=round(gaps[int(len(gaps) * 0.99)], 3),
        ratio=round(mean_ms / step_ms, 4),
        engine_cpu_ms_per_step=round(engine_s / done * 1e3, 2),
        worker_cpu_ms_per_step=round(worker_s / done * 1e3, 2),
    )


def main() -> int:
    """Prints a table, then the same as one line of JSON."""
    parser = argparse.ArgumentParser(prog="tests.bench.async_steps", description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--in-flight", type=int, default=2, choices=(1, 2))
    given = parser.parse_args()
    found = asdict(asyncio.run(measure(given.rows, given.step_ms, given.seconds, given.in_flight)))
    print("| " + " | ".join(found) + " |")
    print("|" + "---|" * len(found))
    print("| " + " | ".join(str(value) for value in found.values()) + " |\n")
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
