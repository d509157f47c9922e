"""Where a sequence has been before, against a search of the whole sequence."""

from __future__ import annotations

import sys
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.ngrams import CANDIDATES, Match, NgramIndex, followed


def search(tokens: list[int], shortest: int, longest: int) -> Match:
    """The newest place before the end that shares most tokens with it, and how many."""
    for length in range(longest, shortest - 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[-length:]:
                return Match(place, length)
    return Match(0, 0)


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 4), min_size=1, max_size=CANDIDATES + 1),
    shortest=st.integers(1, 4),
    more=st.integers(0, 3),
)
def test_the_longest_repeat_is_found_at_every_length(tokens: list[int], shortest: int, more: int) -> None:
    index = NgramIndex(shortest, max(len(tokens), 4))  # a place for each of the tokens 0 to 4
    grown = array("i")
    for token in tokens:
        grown.append(token)
        index.grow(grown, 1)
        assert index.find(grown, shortest + more) == search(list(grown), shortest, shortest + more)


@settings(max_examples=100, deadline=None)
@given(tokens=st.lists(st.integers(0, 2), min_size=3, max_size=400), most=st.integers(1, 7), shortest=st.integers(1, 3))
def test_what_is_found_is_a_repeat_however_far_the_index_has_come(tokens: list[int], most: int, shortest: int) -> None:
    """A table far too small, so that n-grams share hashes, and an index that lags behind."""
    index = NgramIndex(shortest, 4)
    sequence = array("i", tokens)
    for _ in range(0, len(tokens), most):
        index.grow(sequence, most)
        place, shared = index.find(sequence, 5)
        assert 0 <= place < len(tokens)
        assert (place > 0) == (shared >= shortest)
        if place:
            assert tokens[place - shared : place] == tokens[-shared:]


def test_growing_takes_in_so_many_at_a_time() -> None:
    index, tokens = NgramIndex(2, 100), array("i", [7, 8, *range(20, 60), 7, 8])
    assert index.find(tokens, 5) == Match(0, 0)
    index.grow(tokens, 1)
    assert index.find(tokens, 5) == Match(2, 2), "the first pair is known, and the end need not be"


@pytest.mark.parametrize(
    ("tokens", "place", "count", "expected"),
    [
        ([1, 1, 1], 2, 4, [1, 1, 1, 1]),
        ([1, 2, 3, 9, 1, 2, 3], 3, 2, [9, 1]),
        ([1, 2, 3, 9, 1, 2, 3], 3, 10, [9, 1, 2, 3, 9, 1, 2, 3, 9, 1]),
        ([5, 5], 1, 1, [5]),
    ],
)
def test_what_followed_goes_round_at_the_end(tokens: list[int], place: int, count: int, expected: list[int]) -> None:
    assert followed(array("i", tokens), place, count).tolist() == expected


def test_memory_does_not_grow_faster_than_the_sequence() -> None:
    length = 200_000
    index = NgramIndex(1, length)
    index.grow(array("i", (at * at % 977 for at in range(length))), length)
    held = sum(sys.getsizeof(part) for part in (index._heads, index._latest, index._previous))
    assert held < 8 * length
