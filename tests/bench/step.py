"""A step of a served worker: how long it takes, and how much of it the kernels do.

python -m tests.bench.step [--rows 1 8 64] [--sampling greedy cut free logprobs] [--beside 20] [--json]
    [-- WORKER OPTION…]

The worker is a process of its own; this one speaks for the engine, with as many steps on their way as an engine has.
Every row stands at a context of about 256. `kernels` is the part of the time between two results in which the worker
was inside C, by its own count; the rest is Python, threads that wake each other, and the stream. With `--beside` every
other round runs beside a process that is busy for so many percent of a core, as a gateway is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from protos import common_pb2, worker_pb2, worker_pb2_grpc
from services.common.channel import connect
from services.local import demo
from services.local.cluster import free_port
from tests.worker.harness import Stream, peer

CONTEXT, BLOCK, IN_FLIGHT, INCARNATION = 224, 64, 2, 5
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "cut": {"temperature": 0.7, "top_p": 0.95, "top_k": 50},
    "free": {"temperature": 1.0},
    "logprobs": {"temperature": 0.0, "logprobs": 5},
}


@dataclass(frozen=True, slots=True)
class Figures:
    """Milliseconds per step, of the fastest round; the rest is what is left beside the kernels."""

    sampling: str
    rows: int
    step_ms: float
    kernel_ms: float
    beside_ms: float | None = None  # of a step beside a busy process

    @property
    def rest_ms(self) -> float:
        return self.step_ms - self.kernel_ms

    @property
    def kernels(self) -> float:
        return self.kernel_ms / self.step_ms


def pack(values: Sequence[int]) -> bytes:
    return np.array(values, "<i4").tobytes()


def decode_step(number: int, rows: int, computed: int) -> Any:
    """One token for every row."""
    return worker_pb2.Step(
        step_id=number,
        row_i32le=pack(range(rows)),
        num_tokens_i32le=pack([1] * rows),
        num_computed_i32le=pack([computed] * rows),
        flags_u8=bytes([1] * rows),
        block_count_i32le=pack([0] * rows),
    )


class Bench:
    """One stream to the worker; steps are numbered through."""

    def __init__(self, stream: Stream, metrics_port: int) -> None:
        self._stream = stream
        self._metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        self._number = 0

    async def prefill(self, sampling: str, rows: int, blocks: int) -> None:
        """Puts requests on the first rows and computes all of their prompts."""
        for row in range(rows):
            prompt = [(row * 7919 + place * 104729) % 40_000 for place in range(CONTEXT)]
            new = worker_pb2.NewRow(
                row=row,
                epoch=1,
                token_id_i32le=pack(prompt),
                prompt_len=CONTEXT,
                sampling=common_pb2.SamplingParams(max_tokens=1000, **SAMPLING[sampling]),
                seed=row,
                request_id=f"bench-{row}",
            )
            self._number += 1
            step = worker_pb2.Step(
                step_id=self._number,
                new_rows=[new],
                row_i32le=pack([row]),
                num_tokens_i32le=pack([CONTEXT]),
                num_computed_i32le=pack([0]),
                flags_u8=bytes([1]),
                block_count_i32le=pack([blocks]),
                block_id_i32le=pack(range(row * blocks, (row + 1) * blocks)),
            )
            check(await self._stream.run(step), 1)

    async def measure(self, sampling: str, rows: int, steps: int) -> Figures:
        """A round of decode steps."""
        spent = self._kernel_s()
        sent = done = 0
        begun = time.perf_counter()
        while done < steps:
            while sent < steps and sent - done < IN_FLIGHT:
                self._number += 1
                await self._stream.send(step=decode_step(self._number, rows, CONTEXT + sent))
                sent += 1
            check(await self._stream.result(), rows)
            done += 1
        seconds = time.perf_counter() - begun
        return Figures(sampling, rows, 1e3 * seconds / steps, 1e3 * (self._kernel_s() - spent) / steps)

    async def free(self, rows: int) -> None:
        """Takes the requests off their rows."""
        self._number += 1
        await self._stream.run(worker_pb2.Step(step_id=self._number, freed_row_i32le=pack(range(rows))))

    def _kernel_s(self) -> float:
        with urllib.request.urlopen(self._metrics_url) as answer:
            found = re.search(r"^triptych:worker_kernel_seconds_total{.*} (.*)$", answer.read().decode(), re.MULTILINE)
        return float(found[1]) if found else 0.0


def check(result: Any, rows: int) -> None:
    assert result.status == worker_pb2.STEP_STATUS_OK, result.failure.message
    assert result.row_status_u8 == bytes(rows), result.row_status_u8


@contextlib.contextmanager
def busy(percent: float) -> Iterator[None]:
    """A process that is busy for so much of a core, 2 ms at a time; none for 0."""
    source = (
        "import time\n"
        "while True:\n"
        "    end = time.thread_time() + 0.002\n"
        "    while time.thread_time() < end: pass\n"
        f"    time.sleep({0.2 / max(percent, 0.1) - 0.002})\n"
    )
    if not percent:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", source]) as other:
        try:
            yield
        finally:
            other.kill()


@contextlib.asynccontextmanager
async def serving(options: Sequence[str], rows: int, steps: int) -> AsyncIterator[Bench]:
    """A worker with the demo model, and a stream to it."""
    with tempfile.TemporaryDirectory() as folder:
        address, port = f"unix:{folder}/w.sock", free_port()
        command = [sys.executable, "-m", "services.worker", "--listen", address, "--metrics-port", str(port)]
        command += ["--log-level", "warning", "--model", str(demo.fetch()), *options]
        with subprocess.Popen(command) as worker:  # noqa: ASYNC220  nothing else runs yet
            try:
                async with connect(address) as channel:
                    stub = worker_pb2_grpc.WorkerServiceStub(channel)
                    await stub.Load(worker_pb2.LoadRequest(engine=peer(INCARNATION)), wait_for_ready=True, timeout=120)
                    blocks = -(-(CONTEXT + steps) // BLOCK) * rows
                    await stub.InitCache(
                        worker_pb2.InitCacheRequest(
                            engine_incarnation=INCARNATION,
                            num_blocks=blocks,
                            block_size=BLOCK,
                            max_num_seqs=rows,
                            max_model_len=1024,
                            max_num_batched_tokens=512,
                        )
                    )
                    stream = Stream(stub.Execute())
                    await stream.send(open=worker_pb2.ExecuteOpen(engine=peer(INCARNATION), lease_ms=60_000))
                    await stream.call.read()
                    yield Bench(stream, port)
            finally:
                worker.kill()


async def run(given: argparse.Namespace, options: Sequence[str]) -> list[Figures]:
    """All figures, each the fastest of its rounds."""
    figures = []
    async with serving(options, max(given.rows), given.steps) as bench:
        for sampling in given.sampling:
            for rows in given.rows:
                blocks = -(-(CONTEXT + given.steps) // BLOCK)
                rounds: dict[float, list[Figures]] = {0.0: [], given.beside: []}
                for _ in range(given.rounds):
                    for percent, measured in rounds.items():
                        await bench.prefill(sampling, rows, blocks)
                        with busy(percent):
                            measured.append(await bench.measure(sampling, rows, given.steps))
                        await bench.free(rows)
                quiet, beside = (
                    min(measured, key=lambda each: each.step_ms) for measured in (rounds[0.0], rounds[given.beside])
                )
                figures.append(replace(quiet, beside_ms=beside.step_ms) if given.beside else quiet)
    return figures


def main() -> None:
    """Prints a table, or JSON."""
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--sampling", nargs="+", choices=SAMPLING, default=list(SAMPLING))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--beside", type=float, default=0.0, metavar="PERCENT")
    parser.add_argument("--json", action="store_true")
    figures = asyncio.run(run(parser.parse_args(words[:cut]), words[cut + 1 :]))
    if "--json" in words[:cut]:
        print(json.dumps([{**asdict(each), "kernels": each.kernels} for each in figures]))
        return
    print("| sampling | rows | ms per step | kernels ms | rest ms | kernels | beside a busy process |")
    print("|---|---|---|---|---|---|---|")
    for each in figures:
        print(
            f"| {each.sampling} | {each.rows} | {each.step_ms:.2f} | {each.kernel_ms:.2f} | {each.rest_ms:.2f}"
            f" | {each.kernels:.0%} | {f'{each.beside_ms:.2f}' if each.beside_ms else '-'} |"
        )


if __name__ == "__main__":
    main()
