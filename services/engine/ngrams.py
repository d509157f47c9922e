"""Where a sequence of tokens has been before: what its last few tokens were followed by then.

The index of one sequence, in two arrays. It knows no request and no schedule.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

CANDIDATES = 16
"""Earlier places that one look-up compares with the end of the sequence."""
_LARGEST_TABLE = 1 << 16


class Match(NamedTuple):
    """A place before the end, and how many tokens before both are the same. Place 0 stands for none."""

    place: int
    shared: int


class NgramIndex:
    """Earlier places by a hash of the tokens before them, newest first, as in LZ77 compressors:

        heads[hash of two or more] ──▶ newest place ──▶ previous[place] ──▶ … ──▶ 0
        latest[token] ──▶ newest place, for an end of which no more than that has been before

    A place is a count of tokens: what ends there is tokens[:place]. Two n-grams may share a hash, so a
    place is a candidate that is compared token by token. `expected` tokens decide the size of the table.
    """

    __slots__ = ("_heads", "_latest", "_length", "_mask", "_previous")

    def __init__(self, shortest: int, expected: int) -> None:
        size = min(1 << max(expected, 1).bit_length(), _LARGEST_TABLE)
        self._length = max(shortest, 2)
        self._mask = size - 1
        self._heads = array("i", bytes(4 * size))
        self._latest = array("i", bytes(4 * size)) if shortest == 1 else None
        self._previous = array("i", bytes(4 * self._length))  # no n-gram ends before

    def grow(self, tokens: array[int], most: int) -> None:
        """Takes in the next places of a sequence that only grows, `most` of them at a time."""
        previous, heads, latest, mask, length = self._previous, self._heads, self._latest, self._mask, self._length
        first = len(previous)
        for place in range(first, min(len(tokens) + 1, first + most)):
            at = hash(tuple(tokens[place - length : place])) & mask
            previous.append(heads[at])
            heads[at] = place
            if latest is not None:  # one place behind, so that the end of the sequence does not find itself
                latest[tokens[place - 2] & mask] = place - 1

    def find(self, tokens: array[int], longest: int) -> Match:
        """The place before the end that shares most tokens with it, the newest of equals.

        It shares at least `shortest` tokens; more than `longest` count no more. Only the newest
        CANDIDATES are looked at; a single token that shares its place in the table with a later one is
        not found.
        """
        end, length = len(tokens), self._length
        place = self._heads[hash(tuple(tokens[end - length : end])) & self._mask] if end > length else 0
        if place == end:
            place = self._previous[place]
        best, best_shared = 0, length - 1
        for _ in range(CANDIDATES):
            if place == 0:
                break
            # looks at the token that would make it longer than the best: most places end there
            if place > best_shared and tokens[place - 1 - best_shared] == tokens[end - 1 - best_shared]:
                shared = _shared(tokens, place, end, longest)
                if shared > best_shared:
                    best, best_shared = place, shared
                    if shared == longest:
                        break
            place = self._previous[place]
        if best:
            return Match(best, best_shared)
        place = self._latest[tokens[end - 1] & self._mask] if self._latest is not None else 0
        return Match(place, 1) if place and tokens[place - 1] == tokens[end - 1] else Match(0, 0)


def _shared(tokens: array[int], place: int, end: int, longest: int) -> int:
    """How many tokens before both places are equal, at most `longest`."""
    most = min(longest, place)
    for back in range(1, most + 1):
        if tokens[place - back] != tokens[end - back]:
            return back - 1
    return most


def followed(tokens: array[int], place: int, count: int) -> array[int]:
    """The `count` tokens after a place; where that reaches the end, the sequence is taken to go round.

    tokens   a b c d a b c|        the end repeats what is before `place`
                   ▲ place
    gives    d a b c d a …
    """
    found = tokens[place : place + count]
    while len(found) < count:
        found += found[: count - len(found)]
    return found
