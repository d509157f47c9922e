"""Cutting the columns of a StepOutcome: what belongs to one row, or has not been told before."""

from __future__ import annotations

from itertools import accumulate

from services.engine.events import LogprobColumns
from services.engine.plan import PromptLogprobsChunk


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
