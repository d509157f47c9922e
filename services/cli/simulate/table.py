"""What a person reads: the steps, equal ones folded into one line, and the figures of the run."""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from services.cli.simulate.observer import Observer, Step
from services.cli.simulate.spread import Spread
from services.cli.simulate.summary import Summary, Times

_PLAIN_WIDTH = 140
"""Columns where the output is no terminal."""
_HEAD, _TAIL = 24, 8
"""Lines of steps that are shown from the beginning and from the end of a run."""
_NAMES = 7
"""Requests that one line names."""
_GROUPS = 12
"""Groups of requests whose times are shown."""


@dataclass(slots=True)
class Line:
    """Steps that follow on each other and have the same rows with the same tokens."""

    first: Step
    last: Step

    def takes(self, step: Step) -> bool:
        """Whether the step is one more of them."""
        last = self.last
        return (
            step.tokens == last.tokens
            and not step.preempted
            and (step.running, step.waiting) == (last.running, last.waiting)
            and step.rows == last.rows
        )


class Table(Observer):
    """Keeps the first lines of steps and the last ones, and prints them."""

    def __init__(self, title: str, summary: Summary) -> None:
        self._title, self._summary = title, summary
        self._head: list[Line] = []
        self._tail: deque[Line] = deque(maxlen=_TAIL)
        self._left_out = 0

    def step(self, step: Step) -> None:
        """Adds a step to the last line, or begins a new one."""
        current = self._tail[-1] if self._tail else self._head[-1] if self._head else None
        if current is not None and current.takes(step):
            current.last = step
        elif len(self._head) < _HEAD:
            self._head.append(Line(step, step))
        else:
            self._left_out += len(self._tail) == _TAIL
            self._tail.append(Line(step, step))

    def close(self) -> None:
        """Prints the lines and the figures."""
        console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)
        console.print(Text(self._title, style="bold"), "", sep="\n")
        console.print(self._lines(), "")
        _print_figures(console, self._summary)

    def _lines(self) -> Grid:
        table = Grid(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for title in ("step", "ms", "tokens", "prefill", "decode", "running", "waiting", "free"):
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column("scheduled", overflow="fold", ratio=1)
        for line in self._head:
            table.add_row(*_cells(line))
        if self._left_out:
            table.add_row("…", *[""] * 7, Text(f"{self._left_out:,} more lines", style="dim"))
        for line in self._tail:
            table.add_row(*_cells(line))
        return table


def _cells(line: Line) -> list[str | Text]:
    first, last = line.first, line.last
    steps = str(first.number) if first is last else f"{first.number}–{last.number}"
    figures = (first.tokens, first.work.prefill_tokens, first.work.decode_rows, first.running, first.waiting)
    return [
        steps,
        f"{first.start_ns / 1e6:,.1f}",
        *[f"{figure:,}" if figure else Text("·", style="dim") for figure in figures],
        f"{last.free_blocks:,}",
        _who(first),
    ]


def _who(step: Step) -> Text:
    """Rows by name; neighbours that make one token each are told as one."""
    text = Text()
    parts: list[tuple[str, str, str]] = []
    for single, group in groupby(step.rows, key=lambda row: row.tokens == 1):
        rows = list(group)
        if single and len(rows) > 2:
            parts.append((f"{rows[0].live.name}…{rows[-1].live.name}", f"{len(rows)}×1", "green"))
        else:
            parts += [(row.live.name, f"{row.tokens:,}", "green" if row.decodes else "cyan") for row in rows]
    for name, tokens, style in parts[:_NAMES]:
        text.append(f"{name} ").append(f"{tokens}  ", style=style)
    if len(parts) > _NAMES:
        text.append(f"and {len(parts) - _NAMES} more  ", style="dim")
    if step.preempted:
        names = " ".join(live.name for live in step.preempted[:_NAMES])
        text.append(f"preempted {names}", style="red")
    return text


def _print_figures(console: Console, summary: Summary) -> None:
    console.print(_totals(summary), "")
    if summary.times.requests:
        console.print(_spreads(summary))
    for reason in summary.reasons.values():
        console.print(Text(f"{reason.count:,} × {reason.first}", style="red"))


def _totals(summary: Summary) -> str:
    ended = [f"{summary.finishes['length']:,} requests completed"]
    ended += [f"{summary.finishes[kind]:,} {kind}" for kind in ("expired", "refused") if summary.finishes[kind]]
    seconds = summary.end_ns / 1e9
    rate = summary.times.output_tokens / seconds if seconds else 0.0
    work = [
        f"[bold]{summary.steps:,} steps[/]",
        f"{seconds:,.3f} s",
        f"{summary.tokens:,} tokens computed",
        f"{summary.full:.1%} of the budget",
        f"{rate:,.1f} output tokens/s",
    ]
    more = [f"{summary.full_steps:,} full steps", f"{summary.decode_only_steps:,} of decodes alone"]
    more += [f"{summary.preemptions:,} preemptions", f"{summary.cached_tokens:,} prompt tokens from the cache"]
    return "\n".join([" · ".join(work), " · ".join(ended), " · ".join(more)])


def _spreads(summary: Summary) -> Grid:
    table = Grid(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("milliseconds", no_wrap=True)
    for title in ("mean", "p50", "p90", "p99", "max"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("of", no_wrap=True)
    _add(table, "", summary.times)
    groups = summary.groups if len(summary.groups) > 1 else {}
    apart = summary.tenants.keys() != groups.keys()  # often each tenant is one entry of its name
    tenants = {f"tenant {name}": times for name, times in summary.tenants.items() if apart}
    for name, times in [*groups.items(), *tenants.items()][:_GROUPS]:
        _add(table, name, times)
    return table


def _add(table: Grid, group: str, times: Times) -> None:
    named: list[tuple[str, Spread]] = [("wait", times.wait), ("first token", times.ttft)]
    named += [] if group else [("per token after it", times.tpot), ("in all", times.total)]
    for at, (name, spread) in enumerate(named):
        figures = spread.figures()
        if figures:
            shown = f"{times.requests:,} {group}" if group and at == 0 else ""
            table.add_row(name, *[f"{value:,.1f}" for value in figures.values()], Text(shown))
