"""Measures one OpenAI-compatible server with named workloads: streamed greedy completions in a closed loop.

python -m tests.bench.load --base-url http://127.0.0.1:8000 [--workloads W1,W3] [--runs 3] [--json FILE]

    out      output tokens per second of the whole run; `all` counts prompt tokens too
    TTFT     time to the first text, ITL between two texts, TPOT per output token after the first (mean of a request)

Prompts are cut from English text to an exact number of tokens; every run has its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from services.cli.figures import Figures
from tests.bench.load.table import number, table
from tests.bench.load.workloads import measure, named

HEAD = ("workload", "run", "ok", "out tok/s", "all tok/s", "TTFT p50/p99 ms", "TPOT p50/p99 ms", "ITL p50/p99 ms")


def row(name: str, run: int, figures: Figures) -> list[object]:
    """One line of the table."""
    found = figures.as_dict()
    pairs = [(found[f"{what}_p50_ms"], found[f"{what}_p99_ms"]) for what in ("ttft", "tpot", "itl")]
    return [
        name,
        run,
        f"{figures.requests - figures.failed}/{figures.requests}",
        number(figures.output_tokens_per_s, 1),
        number(figures.total_tokens_per_s, 1),
        *(None if low is None else f"{low:.1f} / {high:.1f}" for low, high in pairs),
    ]


def main(argv: Sequence[str]) -> int:
    """Prints a table. Status 1 where a request failed or the server does not answer."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="the server, without /v1")
    parser.add_argument("--workloads", default="all", help="names with commas between them")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--requests", type=int, help="at most so many requests in a run, for a trial")
    parser.add_argument("--model", help="the server's first one by default")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json; the server's /tokenize by default")
    parser.add_argument("--extra-body", default="{}", help="JSON put into each request; a null takes a field out")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="by default another one each time")
    parser.add_argument("--json", type=Path, help="takes one JSON object per run")
    given = parser.parse_args(argv)
    try:
        workloads = [workload.at_most(given.requests) for workload in named(given.workloads.split(","))]
    except ValueError as error:
        parser.error(str(error))
    rows, lines, failed, first_error = [], [], 0, ""
    for workload in workloads:
        for run in range(given.runs):
            try:
                figures = measure(
                    given.base_url,
                    workload,
                    given.seed + run,
                    tokenizer=given.tokenizer,
                    model=given.model,
                    extra_body=given.extra_body,
                )
            except (aiohttp.ClientError, OSError, ValueError) as error:
                print(f"{given.base_url}: {error}", file=sys.stderr)
                return 1
            failed += figures.failed
            first_error = first_error or figures.first_error
            rows.append(row(workload.name, run, figures))
            named_run = {"workload": workload.name, "run": run, "seed": given.seed + run}
            lines.append(json.dumps({**named_run, **figures.as_dict()}))
    print(table(HEAD, rows))
    if given.json:
        given.json.write_text("\n".join(lines) + "\n")
    if failed:
        print(f"{failed} requests failed; the first: {first_error}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
