"""The workloads that servers are compared by."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from services.cli import bench
from services.cli.figures import Figures


@dataclass(frozen=True, slots=True)
class Workload:
    """How many clients send how many requests of which length, in tokens."""

    name: str
    title: str
    clients: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    shared_prefix_tokens: int = 0

    def at_most(self, requests: int | None) -> Workload:
        """The same with fewer requests, for a trial."""
        return self if requests is None else replace(self, requests=min(self.requests, requests))


WORKLOADS = (
    Workload("W1", "1 stream", 1, 8, 128, 128),
    Workload("W2", "8 streams", 8, 32, 128, 128),
    Workload("W3", "32 streams", 32, 64, 128, 128),
    Workload("W4", "64 streams", 64, 128, 256, 64),
    Workload("W5", "4 long prompts", 4, 12, 1500, 16),
    Workload("W6", "8 streams, shared prefix", 8, 32, 1088, 32, 1024),
)


def named(names: Sequence[str]) -> list[Workload]:
    """Those of these names, in the order given; all of them for "all". Raises ValueError."""
    if list(names) == ["all"]:
        return list(WORKLOADS)
    known = {workload.name: workload for workload in WORKLOADS}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no workload {unknown[0]!r}: {', '.join(known)}, or all")
    return [known[name] for name in names]


def measure(
    base_url: str,
    workload: Workload,
    seed: int,
    *,
    tokenizer: Path | None = None,
    model: str | None = None,
    extra_body: str = "{}",
    warm_up: int = 2,
) -> Figures:
    """One run after a warm-up.

    Each seed has prompts of its own, and so has each workload under one seed: a server that has seen others has
    none of them in its prefix cache. Without `tokenizer` the server's own /tokenize is asked.
    """
    settings = bench.BenchSettings.build(
        base_url=base_url,
        model=model,
        tokenizer=tokenizer,
        concurrency=workload.clients,
        requests=workload.requests,
        prompt_tokens=workload.prompt_tokens,
        output_tokens=workload.output_tokens,
        shared_prefix_tokens=workload.shared_prefix_tokens,
        extra_body=extra_body,
        warm_up=warm_up,
        seed=seed * 100 + sum(workload.name.encode()),
    )
    (figures,) = asyncio.run(bench.measure(settings, report=_silent))
    return figures


def _silent(settings: bench.BenchSettings, run: int, figures: Figures) -> None:
    """Callers print tables of their own."""
