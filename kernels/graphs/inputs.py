"""The memory that graphs read: a step's inputs at fixed addresses, as large as any graph needs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.attention.rows import Placed, Rows
from kernels.graphs.dispatch import Choice, Mode
from kernels.graphs.reference import Columns
from kernels.ops import Limits, StepTensors

Fill = Callable[[Columns, Columns, int, int], None]


class Inputs:
    """Static inputs; each graph reads the first tokens and rows of them."""

    def __init__(self, limits: Limits, tokens: int, rows: int, fill: Fill) -> None:
        """Room for so many tokens and rows: those of the largest graph."""
        device = limits.cache.device
        blocks = -(-limits.context // limits.block_size)
        self._limits = limits
        self._fill = fill
        self._columns = Columns(
            torch.zeros(tokens, dtype=torch.int64, device=device),
            torch.zeros(tokens, dtype=torch.int64, device=device),
            torch.full((tokens,), -1, dtype=torch.int64, device=device),
            torch.zeros(rows + 1, dtype=torch.int32, device=device),
            torch.zeros(rows, dtype=torch.int32, device=device),
            torch.zeros(rows, blocks, dtype=torch.int32, device=device),
        )

    def of(self, choice: Choice) -> StepTensors:
        """What a graph of the whole pass reads: its tuples say how large a row may be, and nothing of any step."""
        columns, tokens = self._part(choice), choice.tokens
        rows = Rows(
            tuple(range(0, tokens + 1, choice.per_row)),
            (self._limits.context,) * choice.rows,
            columns.table_RB,
            self._limits.block_size,
            Placed(columns.starts_R1, columns.contexts_R),
        )
        return StepTensors(columns.ids_T, columns.positions_T, columns.slots_T, rows, self._limits.cache)

    def trial(self, choice: Choice) -> StepTensors:
        """One row of as many tokens, which are padding, and of its first block as often as it has blocks."""
        to, size = self._part(choice), self._limits.block_size
        table = torch.zeros(1, -(-choice.tokens // size), dtype=torch.int32, device=to.ids_T.device)
        rows = Rows((0, choice.tokens), (choice.tokens,), table, size)
        return StepTensors(to.ids_T, to.positions_T, to.slots_T, rows, self._limits.cache)

    def padded(self, given: StepTensors, choice: Choice) -> StepTensors:
        """A step with its tokens in this memory, padded, and rows of its own, which attention reads between pieces."""
        to = self._part(choice)
        return StepTensors(to.ids_T, to.positions_T, to.slots_T, given.rows, given.cache)

    def clear(self, choice: Choice) -> None:
        """Nothing but padding."""
        self._fill(self._none(), self._part(choice), choice.per_row, self._limits.block_size)

    def take(self, given: StepTensors, choice: Choice) -> None:
        """Copies a step's inputs and pads them."""
        device, rows = self._limits.cache.device, given.rows
        placed = rows.placed
        if choice.mode is not Mode.FULL:
            none = self._none()
            columns = none._replace(ids_T=given.ids_T, positions_T=given.positions_T, slots_T=given.slots_T)
        elif placed is not None:
            numbers = placed.starts_R1, placed.contexts_R
            columns = Columns(given.ids_T, given.positions_T, given.slots_T, *numbers, rows.block_table_RB)
        else:
            flat = torch.tensor([*rows.row_starts, *rows.context_lens], dtype=torch.int32)
            starts, contexts = torch.split(flat.to(device, non_blocking=True), [rows.count + 1, rows.count])
            columns = Columns(given.ids_T, given.positions_T, given.slots_T, starts, contexts, rows.block_table_RB)
        self._fill(columns, self._part(choice), choice.per_row, self._limits.block_size)

    def _none(self) -> Columns:
        """A step of nothing."""
        return Columns(*(column[:0] for column in self._columns))

    def _part(self, choice: Choice) -> Columns:
        ids, positions, slots, starts, contexts, table = self._columns
        tokens, rows = choice.tokens, choice.rows
        return Columns(
            ids[:tokens], positions[:tokens], slots[:tokens], starts[: rows + 1], contexts[:rows], table[:rows]
        )
