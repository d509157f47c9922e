"""Reading a StepOutcome: what belongs to one row, what has not been told before, what a status stands for."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from services.common.errors import InvalidArgument, Unavailable
from services.engine.events import LogprobColumns, StepFailure
from services.engine.plan import ROW_DROPPED, ROW_NO_TOKEN, ROW_NOT_FINITE, PromptLogprobsChunk, StepOutcome, StepPlan
from services.engine.request import Request

_NO_TOKEN = StepFailure(
    InvalidArgument("").code_number,
    "no token is left that may be sampled: "
    "allowed_token_ids, bad_words, min_tokens and the constraint together forbid all",
    field="sampling",
)

MEDIA_MISSING = "MEDIA_MISSING"
"""Why a request failed whose media the worker did not find: its gateway can make them again, and submit it again."""


class LogprobCuts:
    """Cuts columns of log probabilities at positions."""

    def __init__(self, columns: LogprobColumns) -> None:
        self._columns = columns
        self._starts = [0, *accumulate(columns.counts)]

    def cut(self, first: int, stop: int) -> LogprobColumns:
        """The positions from `first` up to `stop`."""
        source = self._columns
        start, end = self._starts[first], self._starts[stop]
        return LogprobColumns(
            source.counts[first:stop], source.token_ids[start:end], source.logprobs[start:end], source.ranks[start:end]
        )


def not_yet_told(chunk: PromptLogprobsChunk, told: int) -> tuple[int, LogprobColumns] | None:
    """The part of a chunk from position `told` on, with its first position; None when that is nothing."""
    positions = len(chunk.columns.counts)
    skip = max(0, told - chunk.first_position)
    if skip >= positions:
        return None
    if skip == 0:
        return chunk.first_position, chunk.columns
    return chunk.first_position + skip, LogprobCuts(chunk.columns).cut(skip, positions)


def row_failure(request: Request, status: int, missing: Callable[[bytes], bool]) -> StepFailure | str | None:
    """Why a row's request fails, a string where it is no fault of the client; None where it may run again."""
    if status == ROW_DROPPED:
        return request.grammar.failure if request.grammar is not None else None
    if status == ROW_NOT_FINITE:
        return "the model gave a number that is not finite"
    if status == ROW_NO_TOKEN:
        return _NO_TOKEN
    for item in request.family.spec.media:
        if missing(item.hash):
            message = f"the content of the {item.modality} at prompt token {item.offset} was not found by the worker"
            return StepFailure(Unavailable("").code_number, message, reason=MEDIA_MISSING)
    return "the worker gave no result for the request"


def answers_to(plan: StepPlan, outcome: StepOutcome) -> list[int | None]:
    """For each row of the plan where its answer is in the outcome; None for one that has none."""
    if outcome.epochs.tolist() == plan.epochs:  # what most steps are: every row samples
        return list(range(len(plan.epochs)))
    at = {epoch: index for index, epoch in enumerate(outcome.epochs)}
    return [at.get(epoch) for epoch in plan.epochs]
