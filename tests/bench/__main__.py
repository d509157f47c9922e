"""Figures of the demo model on this machine, as the README shows them: `make bench`.

python -m tests.bench [--quick] [OPTION of `triptych serve`…]
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import platform
import sys
from dataclasses import dataclass

from services.cli import bench, serve
from services.cli.figures import Figures
from services.local import demo
from services.local.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Workload:
    """How many clients send how many requests of which length."""

    name: str
    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    shared_prefix_tokens: int = 0


WORKLOADS = (
    Workload("1 stream", 1, 8, 128, 128),
    Workload("8 streams", 8, 32, 128, 128),
    Workload("32 streams", 32, 64, 128, 128),
    Workload("64 streams", 64, 128, 256, 64),
    Workload("4 long prompts", 4, 12, 1500, 16),
    Workload("8 streams, shared prefix", 8, 32, 1088, 32, 1024),
)
QUICK = (WORKLOADS[0], WORKLOADS[2])


def measure(cluster: Cluster, workload: Workload) -> Figures:
    """One run after a warm-up."""
    settings = bench.BenchSettings.build(
        base_url=cluster.http_url,
        concurrency=workload.concurrency,
        requests=workload.requests,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=workload.output_tokens,
        shared_prefix_tokens=workload.shared_prefix_tokens,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        (figures,) = asyncio.run(bench.measure(settings))
    return figures


def main() -> int:
    """Prints a Markdown table, a row as soon as it is measured."""
    options = [word for word in sys.argv[1:] if word != "--quick"]
    knobs = serve.parse(options, "tests.bench").knobs
    failed = 0
    with open(os.devnull, "wb") as log, Cluster(model=demo.fetch(), log=log, **knobs) as cluster:  # type: ignore[arg-type]
        print(f"{demo.NAME} on {os.cpu_count()} cores, {platform.machine()}\n")
        print("| workload | prompt / output | output tok/s | all tok/s | TTFT p50 / p99 ms | ITL p50 / p99 ms |")
        print("|---|---|---|---|---|---|")
        for workload in QUICK if "--quick" in sys.argv else WORKLOADS:
            found = measure(cluster, workload)
            failed += found.failed
            print(
                f"| {workload.name} | {workload.prompt_tokens} / {workload.output_tokens} "
                f"| {found.output_tokens_per_s:.0f} | {found.total_tokens_per_s:.0f} "
                f"| {found.ttft_p50_ms:.0f} / {found.ttft_p99_ms:.0f} "
                f"| {found.itl_p50_ms:.1f} / {found.itl_p99_ms:.1f} |",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
