"""Rows whose ids lie on a device, and what the host knows of them.

    when a step is launched                      the device alone knows
    requests and their epochs, their blocks      which ids were sampled by steps in flight
    how many ids, if all goes well               whether all went well

    ids of a row    |<------ settled ------>|<- promised ->|        known = settled + promised
                     came with the request,   one for each step in flight that samples: it is
                     or were waited for       there when the step behind it reads it

A step is launched upon what is known. When it is waited for, in the order of the steps, it settles: each of its spans
is held against what is settled by then, and one that computed an id which a step before it had promised and did not
give has failed, whatever the device made of it. So each row fails alone and as it would have if each step had been
waited for. A row with drafts promises nothing: how many of its tokens count is known when its step settles, and none is
launched on it before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.states.reference import BLOCKS, TOKENS, Tables
from services.worker.states import Span
from services.worker.step import CacheShape, Int32, NewRow, StepInput


@dataclass(slots=True, eq=False)
class Row:
    """A request on its row. Steps in flight keep it, so that what they settle touches no request that came after."""

    request: NewRow
    settled: int
    promised: int = 0
    blocks: int = 0
    drafted: Any = None  # the step in flight that has drafts of it

    @property
    def known(self) -> int:
        """How many ids it has for the next step."""
        return self.settled + self.promised


class Writes(NamedTuple):
    """What a step writes into the tables: see kernels.states.reference.stage."""

    writes_W5: Int32
    values_N: Int32
    longest: int


class DeviceStates:
    """The rows. Steps name them by number.

    Launching and settling happen on two threads: `lock` is held where both touch what is settled and promised.
    """

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        rows, length = shape.max_num_seqs, shape.max_model_len
        self.max_len = length
        self.lock = Lock()
        # Zeros are ids too: a step in flight may read a place whose promise is not kept.
        tokens_RL = torch.zeros(rows, length, dtype=torch.int32, device=device)
        blocks_RB = torch.zeros(rows, -(-length // shape.block_size), dtype=torch.int32, device=device)
        self.tables = Tables(tokens_RL, blocks_RB, shape.block_size)
        self._rows: dict[int, Row] = {}
        self._drafting = False  # whether any row was ever launched with drafts
        # By row: table, begin, values. A step that fails leaves its own, which the next request on the row replaces.
        self._writes: dict[int, list[tuple[int, int, Int32]]] = {}

    def add(self, new: NewRow) -> None:
        """Puts a request on its row, without blocks."""
        self._rows[new.row] = Row(new, len(new.tokens))
        self._writes[new.row] = [(TOKENS, 0, new.tokens)]

    def free(self, row: int) -> None:
        """The row holds no request any more."""
        self._rows.pop(row, None)
        self._writes.pop(row, None)

    def clear(self) -> list[int]:
        """Frees all rows; returns those that held a request."""
        rows = list(self._rows)
        self._rows.clear()
        self._writes.clear()
        return rows

    def rows(self, spans: Sequence[Span]) -> list[Row]:
        """The row of each span."""
        rows = self._rows
        return [rows[span.row] for span in spans]

    def request(self, row: int) -> NewRow | None:
        """The request on the row, as it came."""
        held = self._rows.get(row)
        return held.request if held is not None else None

    def drafted(self, step: StepInput) -> list[Any]:
        """The steps in flight that have drafts of rows which this one computes."""
        if not self._drafting:
            return []
        held = [self._rows.get(row) for row in step.rows.tolist()]
        return [row.drafted for row in held if row is not None and row.drafted is not None]

    def lay_drafts(self, step: StepInput) -> None:
        """Puts drafts behind the known ids of their rows, where sampled tokens take their place."""
        self._drafting |= len(step.draft_ids) > 0
        first = 0
        for row, count in zip(step.rows.tolist(), step.draft_counts.tolist(), strict=False):  # none: no counts
            held = self._rows.get(row)
            if count and held is not None and held.known + count <= self.max_len:
                self._write(TOKENS, row, held.known, step.draft_ids[first : first + count])
            first += count

    def grow(self, step: StepInput) -> None:
        """Gives the rows of a step their new blocks."""
        if not len(step.block_ids):
            return
        first, most = 0, self.tables.blocks_RB.shape[1]
        for row, count in zip(step.rows.tolist(), step.block_counts.tolist(), strict=True):
            held = self._rows.get(row)
            if count and held is not None:
                ids = step.block_ids[first : first + count][: most - held.blocks]
                self._write(BLOCKS, row, held.blocks, ids)
                held.blocks += len(ids)
            first += count

    def spans(self, step: StepInput) -> tuple[list[Span], list[int]]:
        """What can be computed, and the rows that cannot: no request, or ids or blocks that are not there."""
        rows = self._rows
        spans: list[Span] = []
        bad: list[int] = []
        columns = (step.rows, step.num_computed, step.num_tokens, step.flags, step.first_writable)
        drafts_of = step.draft_counts.tolist() or [0] * len(step.rows)
        listed = (*(column.tolist() for column in columns), drafts_of)
        size = self.tables.block_size
        with self.lock:
            for row, start, count, flags, writable, drafts in zip(*listed, strict=True):
                held, end = rows.get(row), start + count
                if held is None or end > held.blocks * size:
                    bad.append(row)
                    continue
                known = held.settled + held.promised
                if end - drafts == known if drafts else end <= known:
                    spans.append(Span(row, start, end, flags, writable, drafts))
                else:
                    bad.append(row)
        return spans, bad

    def take_writes(self) -> Writes:
        """What has been added, grown and laid since the last call."""
        numbers: list[tuple[int, int, int, int, int]] = []
        parts: list[Int32] = []
        first = longest = 0
        for row, writes in self._writes.items():
            for table, begin, values in writes:
                numbers.append((table, row, begin, len(values), first))
                parts.append(values)
                first += len(values)
                longest = max(longest, len(values))
        values_N = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        self._writes.clear()
        return Writes(np.array(numbers, np.int32).reshape(-1, 5), values_N.astype(np.int32, copy=False), longest)

    def _write(self, table: int, row: int, begin: int, values: Int32) -> None:
        self._writes.setdefault(row, []).append((table, begin, values))
