"""--plot: what the batches were made of, step by step.

tokens of each step, prefill over decode, under the budget
rows of each step, the same way, under the requests that run; and where some were preempted
requests that wait
KV blocks in use
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from services.cli.simulate.canvas import Canvas, Point, check_target
from services.cli.simulate.observer import Observer, Step
from services.cli.simulate.summary import Summary
from services.engine.core import CoreConfig

_INK, _MUTED, _GRID = "#1f2937", "#6b7280", "#e5e7eb"
_PREFILL, _DECODE, _WAITING, _BLOCKS, _PREEMPTED = "#4c7fb8", "#f2a541", "#8d6aa8", "#4a9d8e", "#c8443c"
_WIDTH, _LEFT, _RIGHT = 1100, 82, 34
_TITLE_CHARS = 110
_LEGEND_GAP = 16


class Columns:
    """A value per step of each of a few series; when there are too many, neighbours become their mean."""

    MOST = 4096

    def __init__(self, series: int) -> None:
        self.span = 1  # steps per place
        self.values = [array("d") for _ in range(series)]
        self._sums = [0.0] * series
        self._summed = 0

    def add(self, values: Sequence[float]) -> None:
        """A step."""
        self._sums = [total + value for total, value in zip(self._sums, values, strict=True)]
        self._summed += 1
        if self._summed == self.span:
            self.flush()

    def flush(self) -> None:
        """Ends the current place, whole or not."""
        if self._summed == 0:
            return
        for column, total in zip(self.values, self._sums, strict=True):
            column.append(total / self._summed)
        self._sums, self._summed = [0.0] * len(self._sums), 0
        if len(self.values[0]) == self.MOST:
            self.values = [
                array("d", [(a + b) / 2 for a, b in zip(column[::2], column[1::2], strict=True)])
                for column in self.values
            ]
            self.span *= 2


class Panel(NamedTuple):
    """A frame with axes. Values from 0 to `most` go up, places of `columns` go to the right."""

    top: float
    height: float
    most: float
    places: int

    def x(self, place: float) -> float:
        """Where a place begins."""
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * place / self.places

    def y(self, value: float) -> float:
        """Where a value lies."""
        return self.top + self.height * (1 - value / self.most)


class Plot(Observer):
    """Collects the columns while the run goes on, and draws them at its end."""

    def __init__(self, path: Path, title: str, config: CoreConfig, summary: Summary) -> None:
        check_target(path, "--plot")
        self._path, self._title, self._config, self._summary = path, title, config, summary
        self._columns = Columns(8)

    def step(self, step: Step) -> None:
        """Takes a step's figures."""
        work = step.work
        used = 100 * (1 - step.free_blocks / self._config.num_blocks)
        prefill_rows = len(step.rows) - work.decode_rows
        decode_tokens = step.tokens - work.prefill_tokens
        tokens = (decode_tokens, work.prefill_tokens)
        rows = (work.decode_rows, prefill_rows, step.running, len(step.preempted))
        self._columns.add((*tokens, *rows, step.waiting, used))

    def close(self) -> None:
        """Draws the picture and writes it."""
        self._draw().write(self._path)

    def _draw(self) -> Canvas:
        columns, config, summary = self._columns, self._config, self._summary
        columns.flush()
        decode, prefill, decode_rows, prefill_rows, running, preempted, waiting, used = columns.values
        places = max(1, len(decode))
        canvas = Canvas(_WIDTH, 870)
        _heading(canvas, self._title, summary)

        budget = config.max_num_batched_tokens
        panel = Panel(124, 210, budget * 1.08, places)
        legend = [("prefill", _PREFILL), ("decode", _DECODE)]
        _frame(canvas, panel, "tokens per step", legend)
        _stack(canvas, panel, [(decode, _DECODE), (prefill, _PREFILL)])
        _limit(canvas, panel, budget, f"budget {budget:,}")

        most = max([1.0, *running])
        most = config.max_num_seqs if most > config.max_num_seqs / 3 else most
        panel = Panel(388, 170, most * 1.08, places)
        _frame(canvas, panel, "rows per step", [*legend, ("running", _INK), *_red(preempted)])
        _stack(canvas, panel, [(decode_rows, _DECODE), (prefill_rows, _PREFILL)])
        _limit(canvas, panel, most, f"max_num_seqs {config.max_num_seqs:,}" if most == config.max_num_seqs else "")
        canvas.line(_flat(panel, running), _INK, 1.3 if places < 1000 else 0.7)
        for place, count in enumerate(preempted):
            if count:
                middle = panel.x(place + 0.5)
                canvas.line([(middle, panel.top), (middle, panel.top + 9)], _PREEMPTED, 1.6)

        panel = Panel(612, 84, max([1.0, *waiting]) * 1.12, places)
        _frame(canvas, panel, "waiting requests", [])
        _stack(canvas, panel, [(waiting, _WAITING)])
        panel = Panel(750, 64, 100, places)
        _frame(canvas, panel, f"KV blocks in use, % of {config.num_blocks:,}", [])
        _stack(canvas, panel, [(used, _BLOCKS)])
        _steps_axis(canvas, panel, summary.steps, columns.span)
        return canvas


def _red(preempted: Sequence[float]) -> list[tuple[str, str]]:
    return [("preempted", _PREEMPTED)] if any(preempted) else []


def _heading(canvas: Canvas, title: str, summary: Summary) -> None:
    title = title if len(title) <= _TITLE_CHARS else title[: _TITLE_CHARS - 1].rstrip() + "…"
    canvas.label((_LEFT, 42), title, _INK, size=17, bold=True)
    figures = [
        f"{summary.steps:,} steps",
        f"{summary.tokens:,} tokens",
        f"{sum(summary.finishes.values()):,} requests",
        f"{summary.end_ns / 1e9:,.2f} s",
        f"{summary.full:.0%} of the budget used",
    ]
    first = summary.times.ttft.figures()
    if first:
        figures.append(f"first token after {_duration(first['p50'])}, p99 {_duration(first['p99'])}")
    if summary.preemptions:
        figures.append(f"{summary.preemptions:,} preemptions")
    canvas.label((_LEFT, 68), "   ·   ".join(figures), _MUTED, size=12.5)


def _duration(ms: float) -> str:
    return f"{ms / 1e3:,.2f} s" if ms >= 1000 else f"{ms:,.1f} ms"


def _frame(canvas: Canvas, panel: Panel, name: str, legend: Sequence[tuple[str, str]]) -> None:
    """Name, legend, and a grid with round numbers."""
    canvas.label((_LEFT, panel.top - 12), name, _INK, size=13, bold=True)
    x = _WIDTH - _RIGHT - sum(_legend_width(text) for text, _ in legend) + _LEGEND_GAP
    for text, colour in legend:
        canvas.box(x, panel.top - 21.5, 10, 10, colour)
        canvas.label((x + 15, panel.top - 12), text, _MUTED)
        x += _legend_width(text)
    for value in ticks(panel.most, max(3, int(panel.height / 38))):
        y = panel.y(value)
        canvas.line([(_LEFT, y), (_WIDTH - _RIGHT, y)], _MUTED if value == 0 else _GRID)
        canvas.label((_LEFT - 9, y + 4), f"{value:,.0f}", _MUTED, size=11.5, anchor="end")


def _legend_width(text: str) -> float:
    return 15 + 6.3 * len(text) + _LEGEND_GAP


def _stack(canvas: Canvas, panel: Panel, series: Sequence[tuple[Sequence[float], str]]) -> None:
    """Areas over each other, each place a flat piece."""
    base = [0.0] * panel.places
    for values, colour in series:
        top = [low + value for low, value in zip(base, values, strict=False)]
        if any(values):
            outline = _flat(panel, top) + _flat(panel, base)[::-1]
            canvas.area(outline, colour)
        base = top


def _flat(panel: Panel, values: Sequence[float]) -> list[Point]:
    points: list[Point] = []
    for place, value in enumerate(values):
        y = panel.y(value)
        points += [(panel.x(place), y), (panel.x(place + 1), y)]
    return points


def _limit(canvas: Canvas, panel: Panel, value: float, text: str) -> None:
    if not text:
        return
    y = panel.y(value)
    canvas.line([(_LEFT, y), (_WIDTH - _RIGHT, y)], _INK, 1.1, dashed=True)
    canvas.label((_WIDTH - _RIGHT - 4, y - 5), text, _INK, size=11, anchor="end")


def _steps_axis(canvas: Canvas, panel: Panel, steps: int, span: int) -> None:
    bottom = panel.top + panel.height
    for value in ticks(steps, 9):
        x = panel.x(max(0.0, value - 0.5) / span)
        if x <= _WIDTH - _RIGHT:
            canvas.line([(x, bottom), (x, bottom + 5)], _MUTED)
            canvas.label((x, bottom + 20), f"{value:,.0f}", _MUTED, size=11.5, anchor="middle")
    canvas.label(((_LEFT + _WIDTH - _RIGHT) / 2, bottom + 42), "step", _MUTED, anchor="middle")


def ticks(most: float, count: int) -> list[float]:
    """Round numbers from 0 to `most`, about `count` of them."""
    raw = max(most, 1.0) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = max(1.0, next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw))
    return [step * at for at in range(int(most / step) + 1)]
