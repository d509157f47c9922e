"""A fixed row for each request: its ids, its KV blocks, its epoch. Adding and freeing touch one row.

The worker appends what it samples to the row's ids, so that the next step, which may have been sent
already, finds its input there. A step is gathered from the rows into a flat batch without padding; most rows have
one token or a few, so that plain numbers in a loop are faster than the dozen calls of numpy that do without one:

    row 2  ids  p p p p p o o        computed 4, tokens 3
                        └───┴── input ids, positions 4 5 6, slots block[pos / size] * size + pos % size
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from services.worker.batch import Batch
from services.worker.step import ROW_FAILED, SAMPLES, CacheShape, Int32, NewRow, RowResult, StepInput


class Span(NamedTuple):
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
        self._lengths = [0] * rows
        self._blocks = np.zeros((rows, -(-length // shape.block_size)), np.int32)
        self._num_blocks = [0] * rows
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
        return self._lengths[row]

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Sampled tokens are the row's next ids. At the context's end there is no next step to read them."""
        length = self._lengths[row]
        for token in tokens:
            if length < self._max_len:
                self._tokens[row, length] = token
                length += 1
        self._lengths[row] = length

    def lay_drafts(self, step: StepInput) -> None:
        """Puts drafts behind the known ids of their rows, where sampled tokens take their place."""
        first = 0
        for row, count in zip(step.rows.tolist(), step.draft_counts.tolist(), strict=False):  # none: no counts
            length = self._lengths[row]
            if count and length + count <= self._max_len:
                self._tokens[row, length : length + count] = step.draft_ids[first : first + count]
            first += count

    def grow(self, step: StepInput) -> None:
        """Gives the rows of a step their new blocks."""
        if not len(step.block_ids):
            return
        first = 0
        for row, count in zip(step.rows.tolist(), step.block_counts.tolist(), strict=True):
            if count:
                held = self._num_blocks[row]
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
            length = self._lengths[row]
            known = row in self._requests and (end - drafts == length if drafts else end <= length)
            if known and end <= self._num_blocks[row] * self._block_size:
                spans.append(Span(row, start, end, flags, writable, drafts))
            else:
                bad.append(row)
        return spans, bad

    def batch(self, spans: Sequence[Span], logits_at: Sequence[int]) -> Batch:
        """The flat batch of the spans; `logits_at` are flat positions."""
        size = self._block_size
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        row_starts, context_lens, prompts = [0], [], list[int]()
        for row, start, end, _, first_writable, _ in spans:
            prompts.append(max(0, min(end, self._requests[row].prompt_len) - start))
            context_lens.append(end)
            if end - start == 1 and first_writable <= start:  # most rows
                ids.append(self._tokens.item(row, start))
                positions.append(start)
                slots.append(self._blocks.item(row, start // size) * size + start % size)
            else:
                ids += self._tokens[row, start:end].tolist()
                positions += range(start, end)
                first = min(max(start, first_writable), end)
                slots += [-1] * (first - start)
                while first < end:  # block by block
                    index, offset = divmod(first, size)
                    slot = self._blocks.item(row, index) * size + offset
                    count = min(size - offset, end - first)
                    slots += range(slot, slot + count)
                    first += count
            row_starts.append(len(ids))
        longest = -(-max(context_lens) // size)
        rows = [span.row for span in spans]
        table_RB = self._blocks[slice(rows[0], rows[0] + 1) if len(rows) == 1 else rows, :longest]  # one is not copied
        return Batch(
            input_ids_T=_tensor(ids),
            positions_T=_tensor(positions),
            slots_T=_tensor(slots),
            row_starts=tuple(row_starts),
            context_lens=tuple(context_lens),
            block_table_RB=torch.from_numpy(table_RB),
            logits_at_S=None if len(logits_at) == len(ids) else torch.tensor(logits_at, dtype=torch.int64),
            prompts=tuple(prompts),
        )


def _tensor(numbers: list[int]) -> torch.Tensor:
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)  # less to do than by way of numpy


class RowHolder(Protocol):
    """What keeps something of each row's request."""

    def add(self, new: NewRow) -> None:
        """A request is put on its row."""

    def free(self, row: int) -> None:
        """The row holds no request any more."""


def take_rows(step: StepInput, holders: Sequence[RowHolder]) -> None:
    """Frees and fills rows as the step says."""
    for row in step.freed_rows.tolist():
        for holder in holders:
            holder.free(row)
    for new in step.new_rows:
        for holder in holders:
            holder.add(new)


def refused(
    request_of: Callable[[int], NewRow | None], bad: Sequence[int], faults: Mapping[int, str]
) -> dict[int, RowResult]:
    """The results of rows that cannot run, and of those with a fault."""
    whys: dict[int, str | None] = {**dict.fromkeys(bad), **faults}
    return {row: RowResult(row, epoch_of(request_of(row)), ROW_FAILED, fault=why) for row, why in whys.items()}


def epoch_of(request: NewRow | None) -> int:
    """The epoch of a row's request; 0 where it has none."""
    return request.epoch if request is not None else 0


def ends(spans: Sequence[Span]) -> list[int]:
    """The flat position of each span's last token."""
    found: list[int] = []
    total = 0
    for span in spans:
        total += span.end - span.start
        found.append(total - 1)
    return found


def sampling_places(spans: Sequence[Span]) -> list[int]:
    """The flat positions that give logits: the last of each span that samples, and those of its drafts."""
    places: list[int] = []
    last = 0
    for span in spans:
        last += span.end - span.start
        if span.flags & SAMPLES:
            places += range(last - 1 - span.drafts, last)
    return places
