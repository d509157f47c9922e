"""--trace: a file in Chrome's trace format, which Perfetto (ui.perfetto.dev) opens.

engine     one slice per step; counters of tokens, running, waiting and free blocks
rows       a track per row of the worker: who prefills and who decodes on it
waiting    a slice per request from its arrival, or its preemption, until it is on a row

Written as the run goes on. A request's decodes on one row are one slice, so the file grows with the
requests and the steps, and not with their product.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import NamedTuple, TextIO

from services.cli.simulate.observer import Live, Observer, Step

_ENGINE, _ROWS, _WAITING = 1, 2, 3


class Decoding(NamedTuple):
    """A slice that has not ended."""

    live: Live
    start_ns: int
    end_ns: int
    tokens: int


class Trace(Observer):
    """Writes the events of a run."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._before = '{"displayTimeUnit": "ms", "traceEvents": [\n'
        self._decoding: dict[int, Decoding] = {}  # by row
        self._named_rows: set[int] = set()
        self._waiting: dict[int, str] = {}  # by number of the request: the open slice's name
        for pid, name in ((_ENGINE, "engine"), (_ROWS, "rows"), (_WAITING, "waiting")):
            self._write(ph="M", name="process_name", pid=pid, tid=0, args={"name": name})
            self._write(ph="M", name="process_sort_index", pid=pid, tid=0, args={"sort_index": pid})
        self._write(ph="M", name="thread_name", pid=_ENGINE, tid=0, args={"name": "steps"})

    def arrived(self, live: Live) -> None:
        """It waits from now on."""
        self._wait(live, f"{live.name} waits", live.arrival.at_ns)

    def step(self, step: Step) -> None:
        """A slice of the engine, counters, and a slice for each row that does not just go on decoding."""
        work = step.work
        args = {"tokens": step.tokens, "prefill_tokens": work.prefill_tokens, "decode_rows": work.decode_rows}
        self._slice((_ENGINE, 0), f"step {step.number}", step.start_ns, step.end_ns, args)
        at = _us(step.start_ns)
        batch = {"prefill": work.prefill_tokens, "decode": work.decode_rows}
        self._write(ph="C", name="tokens", pid=_ENGINE, tid=0, ts=at, args=batch)
        for name, value in (("running", step.running), ("waiting", step.waiting), ("free blocks", step.free_blocks)):
            self._write(ph="C", name=name, pid=_ENGINE, tid=0, ts=at, args={name: value})
        for live in step.preempted:
            self._write(ph="i", s="p", name=f"{live.name} preempted", pid=_ENGINE, tid=0, ts=_us(step.planned_ns))
            self._wait(live, f"{live.name} preempted", step.planned_ns)
        for each in step.rows:
            self._row(step, *each)

    def _row(self, step: Step, live: Live, row: int, tokens: int, decodes: int) -> None:
        if row not in self._named_rows:
            self._named_rows.add(row)
            self._write(ph="M", name="thread_name", pid=_ROWS, tid=row, args={"name": f"row {row}"})
        if live.arrival.number in self._waiting:
            self._end_wait(live, step.planned_ns)
        going = self._decoding.get(row)
        if decodes and going is not None and going.live is live and going.end_ns == step.start_ns:
            self._decoding[row] = Decoding(live, going.start_ns, step.end_ns, going.tokens + tokens)
            return
        self._end_decode(row)
        if decodes:
            self._decoding[row] = Decoding(live, step.start_ns, step.end_ns, tokens)
        else:
            args = {"request": live.name, "step": step.number, "tokens": tokens}
            self._slice((_ROWS, row), f"{live.name} prefill", step.start_ns, step.end_ns, args)

    def ended(self, live: Live) -> None:
        """One that never ran does not wait any more."""
        if live.arrival.number in self._waiting:
            self._end_wait(live, live.end_ns, live.reason)

    def close(self) -> None:
        """Ends all that is open, and the file."""
        for row in sorted(self._decoding):
            self._end_decode(row)
        self._out.write("\n]}\n")
        self._out.flush()

    def _end_decode(self, row: int) -> None:
        going = self._decoding.pop(row, None)
        if going is not None:
            args = {"request": going.live.name, "tokens": going.tokens}
            self._slice((_ROWS, row), f"{going.live.name} decode", going.start_ns, going.end_ns, args)

    def _wait(self, live: Live, name: str, at_ns: int) -> None:
        self._waiting[live.arrival.number] = name
        self._write(ph="b", cat="waiting", id=live.arrival.number, name=name, pid=_WAITING, tid=0, ts=_us(at_ns))

    def _end_wait(self, live: Live, at_ns: int, reason: str = "") -> None:
        number = live.arrival.number
        args = {"reason": reason} if reason else {}
        name = self._waiting.pop(number)
        self._write(ph="e", cat="waiting", id=number, name=name, pid=_WAITING, tid=0, ts=_us(at_ns), args=args)

    def _slice(self, track: tuple[int, int], name: str, start_ns: int, end_ns: int, args: Mapping[str, object]) -> None:
        pid, tid = track
        self._write(ph="X", name=name, pid=pid, tid=tid, ts=_us(start_ns), dur=_us(end_ns - start_ns), args=args)

    def _write(self, **event: object) -> None:
        self._out.write(self._before + json.dumps(event))
        self._before = ",\n"


def _us(time_ns: int) -> float:
    return time_ns / 1e3
