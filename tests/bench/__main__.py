"""Figures of the demo model on this machine, as the README shows them: `make bench`.

python -m tests.bench [--quick] [OPTION of `triptych serve`…]
"""

from __future__ import annotations

import os
import platform
import sys

from services.cli import serve
from services.local import demo
from services.local.cluster import Cluster
from tests.bench.load.workloads import WORKLOADS, measure, named

QUICK = named(["W1", "W3"])


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
            found = measure(cluster.http_url, workload, seed=1)
            failed += found.failed
            print(
                f"| {workload.title} | {workload.prompt_tokens} / {workload.output_tokens} "
                f"| {found.output_tokens_per_s:.0f} | {found.total_tokens_per_s:.0f} "
                f"| {found.ttft_p50_ms:.0f} / {found.ttft_p99_ms:.0f} "
                f"| {found.itl_p50_ms:.1f} / {found.itl_p99_ms:.1f} |",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
