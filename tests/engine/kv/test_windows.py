"""The arithmetic of KV groups against counting."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.kv.windows import Groups, Windows, first_needed, span

WINDOWS = st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=3).map(tuple)


def blocks_read(position: int, window: int | None, block_size: int) -> set[int]:
    """Blocks of the positions that a position attends to."""
    return {at // block_size for at in range(position + 1) if window is None or at > position - window}


@given(st.integers(0, 30), st.integers(1, 12), st.integers(1, 5))
def test_no_position_from_here_on_reads_what_lies_before_the_first_block_needed(p: int, window: int, size: int) -> None:
    read = set().union(*(blocks_read(later, window, size) for later in range(p, p + 40)))
    assert first_needed(p, window, size) == min(read)


@given(st.integers(1, 20), st.integers(1, 6))
def test_a_span_is_the_most_blocks_that_tokens_in_a_row_lie_in(tokens: int, size: int) -> None:
    assert span(tokens, size) == max(len({at // size for at in range(s, s + tokens)}) for s in range(size))


def most_held(windows: Windows, size: int, most: int, start: int, end: int) -> int:
    """Blocks held at once, at the worst step of the worst way to cut [start, end) into steps."""
    worst = 0
    for first in range(start, end):
        for last in range(first + 1, min(first + most, end) + 1):
            held = [set().union(*(blocks_read(at, window, size) for at in range(first, last))) for window in windows]
            worst = max(worst, sum(map(len, held)))
    return worst


@given(WINDOWS, st.integers(1, 4), st.integers(1, 6), st.integers(1, 14))
def test_a_claim_from_the_start_on_is_what_the_worst_step_holds(ws: Windows, size: int, most: int, end: int) -> None:
    assert Groups(ws, size, most).claim(0, end) == most_held(ws, size, most, 0, end)


@given(WINDOWS, st.integers(1, 4), st.integers(1, 6), st.integers(1, 14), st.integers(0, 13))
def test_a_claim_is_enough_and_never_grows_on_the_way(ws: Windows, size: int, most: int, end: int, start: int) -> None:
    groups, start = Groups(ws, size, most), min(start, end - 1)
    assert most_held(ws, size, most, start, end) <= groups.claim(start, end) <= groups.claim(max(start - 1, 0), end)


@given(WINDOWS, st.integers(1, 4), st.integers(1, 6), st.integers(0, 24))
def test_the_capacity_is_the_longest_that_fits(ws: Windows, size: int, most: int, num_blocks: int) -> None:
    groups = Groups(ws, size, most)
    capacity = groups.capacity(num_blocks)
    if capacity == sys.maxsize:
        assert groups.claim(0, 10_000) <= num_blocks
    else:
        assert capacity == 0 or groups.claim(0, capacity) <= num_blocks
        assert groups.claim(0, capacity + 1) > num_blocks


@pytest.mark.parametrize(
    ("windows", "num_blocks", "capacity"),
    [
        ((None,), 10, 160),
        ((None, None), 11, 80),
        ((None, 32), 10, 80),  # the window's group stops at span(31 + 64) = 7 blocks
        ((None, 32), 30, 23 * 16),
        ((32,), 6, 96),
        ((32,), 7, sys.maxsize),
        ((None,), 0, 0),
        ((None, None), 1, 0),
    ],
)
def test_capacities(windows: Windows, num_blocks: int, capacity: int) -> None:
    assert Groups(windows, 16, 64).capacity(num_blocks) == capacity
