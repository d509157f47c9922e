"""The one thread that touches the runner, and what surrounds a step on it: failed state, faulty rows,
progress, one log line per request. It knows no protobuf and no torch.

    OK ── a step raises ──▶ FAILED ── every step ──▶ SKIPPED ── a step flagged resync ──▶ OK
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, TypeVar

import numpy as np

from services.common.errors import TriptychError, internal
from services.common.logs import Log
from services.common.tracing import trace_id
from services.worker.metrics import WorkerMetrics
from services.worker.step import (
    ROW_FAILED,
    ROW_NO_TOKEN,
    ROW_NOT_FINITE,
    ROW_OK,
    Masks,
    NewRow,
    RowResult,
    Runner,
    StepFailed,
    StepInput,
    StepOutput,
)

_T = TypeVar("_T")
_log = Log("worker.step")
_BAD_ROWS = {ROW_NOT_FINITE: "not_finite", ROW_FAILED: "failed", ROW_NO_TOKEN: "no_token"}


def outcome(function: Callable[[], _T]) -> _T | Exception:
    """What it gives, or what it raises."""
    try:
        return function()
    except Exception as error:
        return error


class StepThread:
    """A daemon thread that runs functions in order; a stuck one does not keep the process from ending."""

    def __init__(self) -> None:
        self._queue: SimpleQueue[tuple[asyncio.AbstractEventLoop, Callable[[], Any], Callable[[Any], None]] | None]
        self._queue = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="step", daemon=True)
        self._thread.start()

    def run(self, function: Callable[[], _T]) -> asyncio.Future[_T]:
        """Runs `function` behind all that was asked before; the future belongs to the running loop.

        One that is cancelled before its turn is not run.
        """
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()

        def settle(result: _T | Exception | None) -> None:
            if future.done():
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)  # type: ignore[arg-type]  # None where it was cancelled

        self.post(lambda: None if future.cancelled() else function(), settle)
        return future

    def post(self, function: Callable[[], _T], done: Callable[[_T | Exception], None]) -> None:
        """The same without a future: `done` is called in the running loop with the result, or with what was raised."""
        self._queue.put((asyncio.get_running_loop(), function, done))

    def close(self) -> None:
        """Ends the thread once it has run what it was given."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            loop, function, done = item
            result = outcome(function)
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(done, result)


@dataclass(slots=True)
class _Held:
    """What the log says of a request when its row is freed."""

    request: NewRow
    since: float
    computed: int = 0
    sampled: int = 0


class Stepper:
    """Runs steps on a runner, one after another. `attempt`, `run_step` and `reset` belong on the step thread."""

    def __init__(self, runner: Runner, metrics: WorkerMetrics) -> None:
        self.steps = 0
        self._runner = runner
        self._metrics = metrics
        self._failed = False
        self._held: dict[int, _Held] = {}
        self._faults = 0  # of the requests held
        self._pending = 0
        self._progress = 0.0

    def expect(self) -> None:
        """A step has been received: from now on silence counts."""
        if not self._pending:
            self._progress = time.monotonic()
        self._pending += 1

    @property
    def silence_s(self) -> float:
        """Seconds since the last completed step while one is pending."""
        return time.monotonic() - self._progress if self._pending else 0.0

    @property
    def idle_s(self) -> float:
        """Seconds since the last completed step while none is pending."""
        return 0.0 if self._pending else time.monotonic() - self._progress

    def reset(self) -> None:
        """Empties all rows: another stream begins, or the engine is gone."""
        for row in list(self._held):
            self._free(row)
        self._failed = False
        self._runner.reset()

    def attempt(self, step_id: int, resync: bool, run: Callable[[], _T]) -> _T | TriptychError | None:
        """What `run` gives, the error that fails the step as a whole, or None where the step is skipped."""
        if resync:
            self._failed = False
        try:
            if self._failed:
                self._metrics.step_lost("skipped")
                return None
            return run()
        except Exception as error:
            return self._fail(error, step_id)
        finally:
            self._pending -= 1
            self._progress = time.monotonic()

    def _fail(self, error: Exception, step_id: int) -> TriptychError:
        """Enters the failed state; the answer is the error, or one with an id that stands in the log."""
        self._failed = True
        self._metrics.step_lost("failed")
        if isinstance(error, TriptychError):
            known = error
        else:
            known = internal(str(error) if isinstance(error, StepFailed) else f"{type(error).__name__} in the step")
        _log.error("step failed", exc_info=error, step_id=step_id, error_id=known.error_id)
        return known

    def run_step(self, step: StepInput, masks: Callable[[], Masks]) -> StepOutput:
        """Runs a step and accounts for it. Whatever it raises fails the step as a whole.

        `masks` is for the runner, which calls it where a row that is not at fault waits for its mask.
        """
        begun = time.monotonic()
        for row in step.freed_rows.tolist():
            self._free(row)
        for new in step.new_rows:
            self._free(new.row)
            self._held[new.row] = _Held(new, begun)
            self._faults += new.fault is not None
        sound, faulty = self._split(step)
        output = self._runner.execute(sound, masks)
        if faulty:
            place = {row: index for index, row in enumerate(step.rows.tolist())}
            results = sorted((*output.results, *faulty), key=lambda result: place[result.row])
            output = replace(output, results=tuple(results))
        self.steps += 1
        self._account(step, output, time.monotonic() - begun)
        return output

    def _split(self, step: StepInput) -> tuple[StepInput, list[RowResult]]:
        """The step without the rows whose request has a fault, and the results of those."""
        faulty: list[int] = []
        if self._faults:
            faulty = [index for index, row in enumerate(step.rows.tolist()) if self._fault(row)]
        new_rows = tuple(new for new in step.new_rows if new.fault is None)
        if not faulty:
            return (step if len(new_rows) == len(step.new_rows) else replace(step, new_rows=new_rows)), []
        keep = np.ones(len(step.rows), bool)
        keep[faulty] = False
        sound = replace(step.only(keep), new_rows=new_rows)
        rows = (int(step.rows[index]) for index in faulty)
        return sound, [RowResult(row, self._held[row].request.epoch, ROW_FAILED) for row in rows]

    def _fault(self, row: int) -> str | None:
        held = self._held.get(row)
        return held.request.fault if held else None

    def _account(self, step: StepInput, output: StepOutput, seconds: float) -> None:
        computed = 0
        for row, tokens in zip(step.rows.tolist(), step.num_tokens.tolist(), strict=True):
            computed += tokens
            held = self._held.get(row)
            if held is not None:
                held.computed += tokens
        sampled = 0
        for result in output.results:
            held = self._held.get(result.row)
            if result.status != ROW_OK:
                self._account_failure(result, held)
            elif held is not None:
                sampled += len(result.token_ids)
                held.sampled += len(result.token_ids)
        if step.encode:
            there = [item.modality for item in step.encode if item.hash not in output.missing_media]
            self._metrics.media(there, len(output.missing_media))
        self._metrics.step_done(computed, seconds, sampled, len(self._held), output.kernel_s)

    def _account_failure(self, result: RowResult, held: _Held | None) -> None:
        reason = _BAD_ROWS.get(result.status)
        if reason is None:
            return
        self._metrics.row_failed(reason)
        _log.warning(
            "row failed",
            row=result.row,
            reason=reason,
            request_id=held.request.request_id if held else None,
            fault=result.fault or self._fault(result.row),
        )

    def _free(self, row: int) -> None:
        held = self._held.pop(row, None)
        if held is None:
            return
        self._faults -= held.request.fault is not None
        _log.info(
            "row freed",
            request_id=held.request.request_id,
            trace_id=trace_id(held.request.traceparent),
            row=row,
            epoch=held.request.epoch,
            prompt_tokens=held.request.prompt_len,
            computed_tokens=held.computed,
            sampled_tokens=held.sampled,
            seconds=round(time.monotonic() - held.since, 6),
        )
