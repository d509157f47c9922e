"""Pooled vectors: the mean of the hidden states of a prompt's tokens, or the last of them, at length 1.

A prompt may come in pieces, and its row carries the sum of what it has computed from one to the next:

    hidden states   │ step 1 │ step 2 │ step 3 │
    sum of the row  ─────────▶────────▶────────▶ mean = sum / tokens

The sum is of float64, so that where a prompt was cut does not show in the float32 that it becomes. A row
that pools by the mean holds one such vector, and nothing of its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from services.worker.states import Span
from services.worker.step import POOLS, ROW_FAILED, ROW_NOT_FINITE, ROW_OK, NewRow, Pooled, RowResult


@dataclass(slots=True)
class _Sum:
    """Of the hidden states at [0, tokens)."""

    total_D: torch.Tensor | None = None  # float64
    tokens: int = 0


class Pooler:
    """The sums of the rows that pool by the mean."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sum] = {}

    def add(self, new: NewRow) -> None:
        """A request comes onto its row."""
        self._sums.pop(new.row, None)
        if new.pooling == "mean":
            self._sums[new.row] = _Sum()

    def free(self, row: int) -> None:
        """The row holds no request any more."""
        self._sums.pop(row, None)

    @property
    def held(self) -> bool:
        """Whether any row carries a sum: it wants the hidden states of every step."""
        return bool(self._sums)

    def clear(self) -> None:
        """No row holds a request any more."""
        self._sums.clear()

    def pool(
        self,
        request_of: Callable[[int], NewRow | None],
        spans: Sequence[Span],
        ends: Sequence[int],
        hidden_TD: torch.Tensor,
    ) -> Iterator[tuple[RowResult, Pooled | None]]:
        """Takes a step's hidden states in, and gives the rows flagged to pool their vectors.

        `ends` are the flat positions of the spans' last tokens. A row without a sum over all of its prompt,
        or whose request asked for no vector, fails.
        """
        asked: list[tuple[NewRow, torch.Tensor]] = []
        for span, end in zip(spans, ends, strict=True):
            held = self._sums.get(span.row)
            if held is not None:
                _grow(held, span, hidden_TD[end + 1 - (span.end - span.start) : end + 1])
            request = request_of(span.row) if span.flags & POOLS else None
            if request is None:
                continue
            if request.pooling == "last" and span.end == request.prompt_len:
                asked.append((request, hidden_TD[end].double()))
            elif held is not None and held.total_D is not None and held.tokens == request.prompt_len:
                asked.append((request, held.total_D))
            else:
                yield RowResult(span.row, request.epoch, ROW_FAILED, fault="not all that it pools is there"), None
        if asked:
            yield from _normalised(asked)


def _grow(held: _Sum, span: Span, hidden_ND: torch.Tensor) -> None:
    """A sum that does not reach up to the span has missed tokens, and stays behind for good."""
    if held.tokens == span.start:
        part_D = hidden_ND.sum(0, dtype=torch.float64)
        held.total_D = part_D if held.total_D is None else held.total_D + part_D
        held.tokens = span.end


def _normalised(asked: Sequence[tuple[NewRow, torch.Tensor]]) -> Iterator[tuple[RowResult, Pooled | None]]:
    """Vectors of length 1: the mean needs no division by the count. One that has no length is not finite."""
    pooled_RD = torch.stack([vector_D for _, vector_D in asked])
    vectors_RD = (pooled_RD / pooled_RD.norm(dim=1, keepdim=True)).float()
    finite = vectors_RD.isfinite().all(1).tolist()
    for (request, _), values, sound in zip(asked, vectors_RD.tolist(), finite, strict=True):
        if sound:
            yield (
                RowResult(request.row, request.epoch, ROW_OK),
                Pooled(request.row, request.epoch, tuple(values)),
            )
        else:
            yield RowResult(request.row, request.epoch, ROW_NOT_FINITE), None
