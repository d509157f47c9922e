"""What became of the requests, and what the steps were. Its memory does not grow with their number."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from services.cli.simulate.observer import Live, Observer, Step
from services.cli.simulate.spread import Spread

LISTED = 10_000
"""The summary of a run with more requests does not list them one by one."""
_GROUPS = 1000
"""Entries of the file, and tenants, whose figures are kept apart; those of the rest are in the whole."""


@dataclass(slots=True)
class Times:
    """Of a group of requests, in milliseconds."""

    requests: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    wait: Spread = field(default_factory=Spread)
    ttft: Spread = field(default_factory=Spread)
    tpot: Spread = field(default_factory=Spread)
    total: Spread = field(default_factory=Spread)

    def add(self, live: Live) -> None:
        """Counts a request that has all its tokens."""
        at_ns, first_ns = live.arrival.at_ns, live.first_token_ns
        self.requests += 1
        self.prompt_tokens += live.arrival.prompt_tokens
        self.output_tokens += live.outputs
        if live.wait_ns is not None and first_ns is not None:
            self.wait.add(live.wait_ns / 1e6)
            self.ttft.add((first_ns - at_ns) / 1e6)
            if live.outputs > 1:
                self.tpot.add((live.end_ns - first_ns) / 1e6 / (live.outputs - 1))
        self.total.add((live.end_ns - at_ns) / 1e6)

    def figures(self) -> dict[str, object]:
        """Quantiles of each."""
        return {
            "wait_ms": self.wait.figures(),
            "ttft_ms": self.ttft.figures(),
            "tpot_ms": self.tpot.figures(),
            "total_ms": self.total.figures(),
        }


@dataclass(slots=True)
class Reason:
    """Why requests were refused or expired, all with one text but for the numbers in it."""

    first: str
    count: int = 0


class Summary(Observer):
    """The figures of a whole run."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens  # of one step
        self.times = Times()
        self.groups: dict[str, Times] = {}  # by entry of the file
        self.tenants: dict[str, Times] = {}
        self.finishes: Counter[str] = Counter()
        self.reasons: dict[str, Reason] = {}
        self.steps = self.tokens = self.prefill_tokens = self.embeddings = 0
        self.cached_tokens = self.preemptions = self.full_steps = self.decode_only_steps = 0
        self.peak_running = self.peak_waiting = 0
        self.least_free_blocks: int | None = None
        self.busy_ns = self.end_ns = 0
        self._listed: dict[str, dict[str, object]] | None = {}

    def step(self, step: Step) -> None:
        """Adds a step to the totals."""
        self.steps += 1
        self.tokens += step.tokens
        self.prefill_tokens += step.work.prefill_tokens
        self.embeddings += step.work.embeddings
        self.full_steps += step.tokens == self._max_tokens
        self.decode_only_steps += step.work.prefill_tokens == 0
        self.preemptions += len(step.preempted)
        self.peak_running = max(self.peak_running, step.running)
        self.peak_waiting = max(self.peak_waiting, step.waiting)
        least = self.least_free_blocks
        self.least_free_blocks = step.free_blocks if least is None else min(least, step.free_blocks)
        self.busy_ns += step.end_ns - step.start_ns
        self.end_ns = step.end_ns

    def ended(self, live: Live) -> None:
        """Adds a request to its groups."""
        self.finishes[live.finish] += 1
        if live.finish == "length":
            self.times.add(live)
            self.cached_tokens += live.cached_tokens
            for groups, name in ((self.groups, live.arrival.group), (self.tenants, live.arrival.entry.tenant)):
                if name and (name in groups or len(groups) < _GROUPS):
                    groups.setdefault(name, Times()).add(live)
        else:
            text = re.sub("[0-9]+", "0", live.reason)
            self.reasons.setdefault(text, Reason(live.reason)).count += 1
        if self._listed is not None:
            self._listed[live.name] = _line(live)
            if len(self._listed) > LISTED:
                self._listed = None

    @property
    def full(self) -> float:
        """The part of all steps' budgets that was used."""
        return self.tokens / (self.steps * self._max_tokens) if self.steps else 0.0

    def as_json(self) -> dict[str, object]:
        """The summary of the document. `requests` is null where there were too many to list."""
        found: dict[str, object] = {
            "steps": self.steps,
            "tokens": self.tokens,
            "prefill_tokens": self.prefill_tokens,
            "prompt_tokens": self.times.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "output_tokens": self.times.output_tokens,
            "embeddings": self.embeddings,
            "time_ms": round(self.end_ns / 1e6, 3),
            "busy_ms": round(self.busy_ns / 1e6, 3),
            "completed": self.finishes["length"],
            "expired": self.finishes["expired"],
            "refused": self.finishes["refused"],
            "reasons": [{"count": reason.count, "first": reason.first} for reason in self.reasons.values()],
            "preemptions": self.preemptions,
            "full_steps": self.full_steps,
            "decode_only_steps": self.decode_only_steps,
            "budget_used": round(self.full, 4),
            "peak_running": self.peak_running,
            "peak_waiting": self.peak_waiting,
            "least_free_blocks": self.least_free_blocks,
            **self.times.figures(),
        }
        for key, groups in (("groups", self.groups), ("tenants", self.tenants)):
            if groups:
                found[key] = {
                    name: {"completed": times.requests, "output_tokens": times.output_tokens, **times.figures()}
                    for name, times in groups.items()
                }
        found["requests"] = self._listed
        return found


def _line(live: Live) -> dict[str, object]:
    """What became of one request. Times count from its arrival."""
    at_ns = live.arrival.at_ns
    line: dict[str, object] = {
        "arrival_ms": round(at_ns / 1e6, 3),
        "prompt_tokens": live.arrival.prompt_tokens,
        "cached_tokens": live.cached_tokens,
        "output_tokens": live.outputs,
        "wait_ms": _after(live.wait_ns, 0),
        "ttft_ms": _after(live.first_token_ns, at_ns),
        "total_ms": _after(live.end_ns, at_ns),
        "first_step": live.first_step,
        "first_token_step": live.first_token_step,
        "last_step": live.last_step,
        "preemptions": live.preemptions,
        "finish": live.finish,
    }
    if live.reason:
        line["reason"] = live.reason
    return line


def _after(time_ns: int | None, start_ns: int) -> float | None:
    return None if time_ns is None else round((time_ns - start_ns) / 1e6, 3)
