"""What a run shows to those who watch it: requests as they come and go, and steps as they are planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from services.cli.simulate.arrivals import Arrival
from services.cli.simulate.worker import Work


@dataclass(slots=True)
class Live:
    """A request from its arrival to its end. Times are nanoseconds of the virtual clock."""

    arrival: Arrival
    wait_ns: int | None = None  # from its arrival until it was first planned to run
    first_step: int | None = None  # the step in which it first ran
    first_token_ns: int | None = None
    first_token_step: int | None = None
    end_ns: int = 0
    last_step: int | None = None  # the step that gave its last token
    outputs: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    finish: str = ""  # "length", "expired" or "refused"
    reason: str = ""  # of an end that was not asked for

    @property
    def name(self) -> str:
        """As the file has it."""
        return self.arrival.name


class Row(NamedTuple):
    """A request's part of a step."""

    live: Live
    row: int  # of the worker
    tokens: int
    decodes: int  # 1 if it makes its next output from the one before it


@dataclass(slots=True, frozen=True)
class Step:
    """A step as it was planned, and when it runs."""

    number: int
    rows: list[Row]  # in the order of the plan
    work: Work
    tokens: int
    running: int
    waiting: int
    free_blocks: int
    preempted: list[Live]
    planned_ns: int
    start_ns: int
    end_ns: int

    def as_json(self) -> dict[str, object]:
        """Its line of the document."""
        return {
            "step": self.number,
            "time_ms": round(self.start_ns / 1e6, 3),
            "scheduled": {row.live.name: row.tokens for row in self.rows},
            "running": self.running,
            "waiting": self.waiting,
            "free_blocks": self.free_blocks,
            "preempted": [live.name for live in self.preempted],
        }


class Observer:
    """Watches a run; a kind of observer overrides what it wants to see."""

    def arrived(self, live: Live) -> None:
        """A request has come and waits."""

    def step(self, step: Step) -> None:
        """A step has been planned."""

    def ended(self, live: Live) -> None:
        """A request has its last token, or will never get one."""

    def close(self) -> None:
        """The run is over, by itself or not: tells what was seen."""
