"""Cutting columns."""

from __future__ import annotations

from array import array

import pytest

from services.engine.events import LogprobColumns
from services.engine.outcome import LogprobCuts, not_yet_told
from services.engine.plan import PromptLogprobsChunk


def make_columns(counts: list[int]) -> LogprobColumns:
    total = sum(counts)
    return LogprobColumns(
        array("i", counts),
        array("i", range(total)),
        array("f", [-float(at) for at in range(total)]),
        array("i", range(total)),
    )


@pytest.mark.parametrize(
    ("first", "stop", "counts", "ids"),
    [(0, 4, [2, 0, 1, 3], [0, 1, 2, 3, 4, 5]), (1, 3, [0, 1], [2]), (3, 4, [3], [3, 4, 5]), (2, 2, [], [])],
)
def test_a_cut_has_the_entries_of_its_positions(first: int, stop: int, counts: list[int], ids: list[int]) -> None:
    part = LogprobCuts(make_columns([2, 0, 1, 3])).cut(first, stop)
    assert (list(part.counts), list(part.token_ids), list(part.ranks)) == (counts, ids, ids)
    assert list(part.logprobs) == [-float(at) for at in ids]


@pytest.mark.parametrize(("told", "first", "ids"), [(0, 4, [0, 1, 2]), (4, 4, [0, 1, 2]), (5, 5, [1, 2]), (6, 6, [2])])
def test_what_is_told_already_is_left_out(told: int, first: int, ids: list[int]) -> None:
    part = not_yet_told(PromptLogprobsChunk(0, 1, 4, make_columns([1, 1, 1])), told)
    assert part is not None
    assert (part[0], list(part[1].token_ids)) == (first, ids)


def test_nothing_is_left_of_a_chunk_that_was_told() -> None:
    assert not_yet_told(PromptLogprobsChunk(0, 1, 4, make_columns([1, 1, 1])), 7) is None
    assert not_yet_told(PromptLogprobsChunk(0, 1, 4, make_columns([])), 0) is None
