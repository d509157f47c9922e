"""Runs a workload in this process and keeps all that could be seen of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.cli.simulate import workload
from services.cli.simulate.clock import Simulation
from services.cli.simulate.observer import Live, Observer, Step


@dataclass(slots=True, frozen=True)
class Seen:
    """A step, by names."""

    number: int
    scheduled: dict[str, int]
    running: int
    waiting: int
    free_blocks: int
    preempted: list[str]
    start_ms: float
    end_ms: float
    embeddings: int

    @property
    def tokens(self) -> int:
        return sum(self.scheduled.values())


@dataclass
class Watch(Observer):
    steps: list[Seen] = field(default_factory=list)
    live: dict[str, Live] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)

    def arrived(self, live: Live) -> None:
        self.live[live.name] = live
        self.order.append(live.name)

    def step(self, step: Step) -> None:
        self.steps.append(
            Seen(
                step.number,
                {row.live.name: row.tokens for row in step.rows},
                step.running,
                step.waiting,
                step.free_blocks,
                [live.name for live in step.preempted],
                step.start_ns / 1e6,
                step.end_ns / 1e6,
                step.work.embeddings,
            )
        )

    def ms(self, name: str, what: str) -> float:
        """A time of a request, in milliseconds."""
        value: int = getattr(self.live[name], f"{what}_ns")
        return value / 1e6


def watch(given: Path | dict[str, Any], static: int | None = None, limits: dict[str, Any] | None = None) -> Watch:
    """Runs a file, or what would be one, with some limits changed."""
    document = json.loads(given.read_text()) if isinstance(given, Path) else given
    document = {**document, "limits": document.get("limits", {}) | (limits or {})}
    seen = Watch()
    Simulation(workload.parse(json.dumps(document).encode()), [seen], static).run()
    assert {step.number for step in seen.steps} == set(range(1, len(seen.steps) + 1))
    assert all(live.finish for live in seen.live.values())
    return seen
