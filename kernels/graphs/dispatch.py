"""Which graph a batch takes, if any. Decides by sizes alone, and knows no tensor."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

_MOST_TOKENS = 512
"""Larger steps compute for so long that the CPU is ahead of the GPU anyhow."""
_FREE_TOKENS = 128
"""Up to here a step waits for its weights: padding tokens cost next to nothing."""


class Mode(Enum):
    """How a step runs."""

    NONE = "none"
    PIECEWISE = "piecewise"
    FULL = "full"


class Batch(NamedTuple):
    """What is known of a batch."""

    tokens: int
    rows: int
    per_row: int  # tokens of a row at most
    plain: bool = True  # whether it is text alone


class Choice(NamedTuple):
    """A graph: how it runs, and the sizes that the batch is padded to. Without a graph, the batch's own."""

    mode: Mode
    tokens: int
    rows: int
    per_row: int


def sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24 to 256 in steps of 8, then in steps of 16, and `most` itself; none where that is 0."""
    table = (1, 2, 4, *range(8, 256, 8), *range(256, most, 16))
    return (*(size for size in table if size < most), most) if most > 0 else ()


class Dispatcher:
    """The graphs that there are, and which of them a batch takes: the smallest that holds it."""

    def __init__(self, *, rows: int, tokens: int, drafts: int = 0, full: bool = True, pieces: bool = False) -> None:
        """`rows` and `tokens` are those of the largest step; `drafts` those of a row that full graphs hold at most."""
        per_rows = dict.fromkeys((1, 1 + drafts)) if full else {}
        most = min(tokens, _MOST_TOKENS)
        self._rows = {per_row: sizes(min(rows, most // per_row)) for per_row in per_rows}
        self._pieces = sizes(most) if pieces else ()

    def choices(self) -> Iterator[Choice]:
        """All graphs, in the order of capture: pieces first, and the largest first, so that others use its memory."""
        for tokens in reversed(self._pieces):
            yield Choice(Mode.PIECEWISE, tokens, 0, 0)
        full = [Choice(Mode.FULL, rows * each, rows, each) for each, table in self._rows.items() for rows in table]
        yield from sorted(full, key=lambda choice: choice.tokens, reverse=True)

    def choose(self, batch: Batch) -> Choice:
        """The batch's graph. Padding never more than doubles a batch, unless it is small."""
        most = max(2 * batch.tokens, _FREE_TOKENS)
        for per_row, table in self._rows.items() if batch.plain else ():
            rows = _holds(table, batch.rows)
            if batch.per_row <= per_row and rows and rows * per_row <= most:
                return Choice(Mode.FULL, rows * per_row, rows, per_row)
        tokens = _holds(self._pieces, batch.tokens) if batch.plain else 0
        if tokens:
            return Choice(Mode.PIECEWISE, tokens, 0, 0)
        return Choice(Mode.NONE, batch.tokens, batch.rows, batch.per_row)


def _holds(table: tuple[int, ...], count: int) -> int:
    """The first of the table that is not under `count`; 0 where there is none."""
    at = bisect_left(table, count)
    return table[at] if at < len(table) else 0
