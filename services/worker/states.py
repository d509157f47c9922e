"""A fixed row for each request: its ids, its KV blocks, its epoch. Adding and freeing touch one row.

The worker appends what it samples to the row's ids, so that the next step, which may have been sent
already, finds its input there. A step is gathered from the rows into a flat batch without padding:

    row 2  ids  p p p p p o o        computed 4, tokens 3
                        └───┴── input ids, positions 4 5 6, slots block[pos / size] * size + pos % size
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.batch import Batch
from services.worker.step import CacheShape, Int32, NewRow, StepInput


@dataclass(slots=True, frozen=True)
class Span:
    """What one row computes in a step: ids at [start, end)."""

    row: int
    start: int
    end: int
    flags: int
    first_writable: int
    drafts: int = 0  # the last of these ids


class States:
    """The rows. Steps name them by number."""

    def __init__(self, shape: CacheShape) -> None:
        rows, length = shape.max_num_seqs, shape.max_model_len
        self._block_size = shape.block_size
        self._max_len = length
        self._tokens = np.zeros((rows, length), np.int32)
        self._lengths = np.zeros(rows, np.int32)
        self._blocks = np.zeros((rows, -(-length // shape.block_size)), np.int32)
        self._num_blocks = np.zeros(rows, np.int32)
        self._requests: dict[int, NewRow] = {}

    def add(self, new: NewRow) -> None:
        """Puts a request on its row, without blocks."""
        self._requests[new.row] = new
        self._tokens[new.row, : len(new.tokens)] = new.tokens
        self._lengths[new.row] = len(new.tokens)
        self._num_blocks[new.row] = 0

    def free(self, row: int) -> None:
        """The row holds no request any more."""
        self._requests.pop(row, None)

    def clear(self) -> list[int]:
        """Frees all rows; returns those that held a request."""
        rows = list(self._requests)
        self._requests.clear()
        return rows

    def request(self, row: int) -> NewRow | None:
        """The request on the row, as it came."""
        return self._requests.get(row)

    def tokens(self, row: int, end: int) -> Int32:
        """The first `end` ids of the row."""
        ids: Int32 = self._tokens[row, :end]
        return ids

    def length(self, row: int) -> int:
        """How many ids of the row are known."""
        return int(self._lengths[row])

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Sampled tokens are the row's next ids. At the context's end there is no next step to read them."""
        length = int(self._lengths[row])
        for token in tokens[: self._max_len - length]:
            self._tokens[row, length] = token
            length += 1
        self._lengths[row] = length

    def lay_drafts(self, step: StepInput) -> None:
        """Puts drafts behind the known ids of their rows, where sampled tokens take their place."""
        first = 0
        for row, count in zip(step.rows.tolist(), step.draft_counts.tolist(), strict=False):  # none: no counts
            length = int(self._lengths[row])
            if count and length + count <= self._max_len:
                self._tokens[row, length : length + count] = step.draft_ids[first : first + count]
            first += count

    def grow(self, step: StepInput) -> None:
        """Gives the rows of a step their new blocks."""
        first = 0
        for row, count in zip(step.rows.tolist(), step.block_counts.tolist(), strict=True):
            if count:
                held = int(self._num_blocks[row])
                ids = step.block_ids[first : first + count][: self._blocks.shape[1] - held]
                self._blocks[row, held : held + len(ids)] = ids
                self._num_blocks[row] = held + len(ids)
                first += count

    def spans(self, step: StepInput) -> tuple[list[Span], list[int]]:
        """What can be computed, and the rows that cannot: no request, or ids or blocks that are not there."""
        spans: list[Span] = []
        bad: list[int] = []
        columns = (step.rows, step.num_computed, step.num_tokens, step.flags, step.first_writable)
        drafts_of = step.draft_counts.tolist() or [0] * len(step.rows)
        listed = (*(column.tolist() for column in columns), drafts_of)
        for row, start, count, flags, writable, drafts in zip(*listed, strict=True):
            end = start + count
            length = int(self._lengths[row])
            known = row in self._requests and (end - drafts == length if drafts else end <= length)
            if known and end <= self._num_blocks[row] * self._block_size:
                spans.append(Span(row, start, end, flags, writable, drafts))
            else:
                bad.append(row)
        return spans, bad

    def batch(self, spans: Sequence[Span], logits_at: Sequence[int]) -> Batch:
        """The flat batch of the spans; `logits_at` are flat positions."""
        rows = np.array([span.row for span in spans], np.int64)
        starts = np.array([span.start for span in spans], np.int64)
        ends = np.array([span.end for span in spans], np.int64)
        writable = np.array([span.first_writable for span in spans], np.int64)
        if int(ends.sum() - starts.sum()) == len(spans):  # one token each: every column is there already
            offsets, row_of_T, positions_T = np.arange(len(spans) + 1), rows, starts
        else:
            counts = ends - starts
            offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
            row_of_T = np.repeat(rows, counts)
            positions_T = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], counts)
            writable = np.repeat(writable, counts)
        blocks_T = self._blocks[row_of_T, positions_T // self._block_size].astype(np.int64)
        slots_T = blocks_T * self._block_size + positions_T % self._block_size
        slots_T[positions_T < writable] = -1
        longest = -(-int(ends.max()) // self._block_size)
        return Batch(
            input_ids_T=_tensor(self._tokens[row_of_T, positions_T].astype(np.int64)),
            positions_T=_tensor(positions_T),
            slots_T=_tensor(slots_T),
            row_starts=tuple(offsets.tolist()),
            context_lens=tuple(ends.tolist()),
            block_table_RB=torch.from_numpy(self._blocks[rows, :longest]),
            logits_at_S=_tensor(np.array(logits_at, np.int64)),
        )


def _tensor(array: NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(array)
