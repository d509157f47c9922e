"""What surrounds a step: failed state, faulty rows, progress, one log line per request. No protobuf, no torch.

    OK ── a step raises ──▶ FAILED ── every step ──▶ SKIPPED ── a step flagged resync ──▶ OK

A step whose output has to be waited for is begun on the step thread and ends on the output thread, in order; one that
began before an earlier one failed there is skipped when its turn comes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

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
from services.worker.threads import Later

_NONE = -1
"""Stands before every step."""
_T = TypeVar("_T")
_log = Log("worker.step")
_BAD_ROWS = {ROW_NOT_FINITE: "not_finite", ROW_FAILED: "failed", ROW_NO_TOKEN: "no_token"}


@dataclass(slots=True)
class _Held:
    """What the log says of a request when its row is freed."""

    request: NewRow
    since: float
    computed: int = 0
    sampled: int = 0


class Stepper:
    """Runs steps on a runner, one after another. `attempt`, `run_step` and `reset` belong on the step thread.

    What is Later is finished on the output thread, in the order of the steps.
    """

    def __init__(self, runner: Runner, metrics: WorkerMetrics) -> None:
        self.steps = 0
        self._runner = runner
        self._metrics = metrics
        self._failed = False
        self._failed_step = _NONE  # the last one that failed
        self._begun = 0  # steps that end on the output thread
        self._ended = 0
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
    def pending(self) -> int:
        """Steps that have been received and not completed."""
        return self._pending

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
        self._failed_step = _NONE
        self._runner.reset()

    def attempt(
        self, step_id: int, resync: bool, run: Callable[[], _T | Later[_T]]
    ) -> _T | TriptychError | Later[_T | TriptychError | None] | None:
        """What `run` gives, the error that fails the step as a whole, or None where the step is skipped."""
        if resync:
            self._failed = False
        ends = True
        try:
            if self._failed:
                self._metrics.step_lost("skipped")
                return None
            failed_step = self._failed_step
            result = run()
            if not isinstance(result, Later) and self._begun == self._ended:
                return self._unless_lost(step_id, failed_step, result)
            ends = False
            self._begun += 1
            later = result if isinstance(result, Later) else Later(lambda: result)
            return Later(partial(self._finish, step_id, failed_step, later))
        except Exception as error:
            return self._fail(error, step_id)
        finally:
            if ends:
                self._end()

    def _unless_lost(self, step_id: int, failed_step: int, result: _T) -> _T | None:
        """The result of a step that began when `failed_step` was the last that had failed; None if one has since."""
        if failed_step != self._failed_step < step_id:
            self._metrics.step_lost("skipped")
            return None
        return result

    def _finish(self, step_id: int, failed_step: int, later: Later[_T]) -> _T | TriptychError | None:
        """On the output thread."""
        try:
            return self._unless_lost(step_id, failed_step, later.finish())
        except Exception as error:
            return self._fail(error, step_id)
        finally:
            self._ended += 1
            self._end()

    def _end(self) -> None:
        self._pending -= 1
        self._progress = time.monotonic()

    def _fail(self, error: Exception, step_id: int) -> TriptychError:
        """Enters the failed state; the answer is the error, or one with an id that stands in the log."""
        self._failed = True
        self._failed_step = step_id
        self._metrics.step_lost("failed")
        if isinstance(error, TriptychError):
            known = error
        else:
            known = internal(str(error) if isinstance(error, StepFailed) else f"{type(error).__name__} in the step")
        _log.error("step failed", exc_info=error, step_id=step_id, error_id=known.error_id)
        return known

    def run_step(self, step: StepInput, masks: Callable[[], Masks]) -> StepOutput | Later[StepOutput]:
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
        computed = self._count(step)

        def complete(output: StepOutput) -> StepOutput:
            if faulty:
                place = {row: index for index, row in enumerate(step.rows.tolist())}
                results = sorted((*output.results, *faulty), key=lambda result: place[result.row])
                output = replace(output, results=tuple(results))
            self.steps += 1
            self._account(step, output, computed, time.monotonic() - begun)
            return output

        return complete(output) if isinstance(output, StepOutput) else Later(output.wait).then(complete)

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

    def _count(self, step: StepInput) -> int:
        """Tokens that the step computes, counted to the requests on its rows."""
        computed = 0
        for row, tokens in zip(step.rows.tolist(), step.num_tokens.tolist(), strict=True):
            computed += tokens
            held = self._held.get(row)
            if held is not None:
                held.computed += tokens
        return computed

    def _account(self, step: StepInput, output: StepOutput, computed: int, seconds: float) -> None:
        sampled = 0
        for result in output.results:
            held = self._held.get(result.row)
            if held is not None and held.request.epoch != result.epoch:
                held = None  # the row has another request meanwhile
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
