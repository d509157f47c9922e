"""A step's inputs copied to the memory that a graph reads, and padded: the specification.

T tokens   R rows   B blocks of the longest row; those of the graph are the sizes of what is written
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class Columns(NamedTuple):
    """What a forward pass reads of a step, as it lies on the device."""

    ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64
    slots_T: torch.Tensor  # int64
    starts_R1: torch.Tensor  # int32
    contexts_R: torch.Tensor  # int32
    table_RB: torch.Tensor  # int32


def fill(given: Columns, to: Columns, per_row: int, block_size: int) -> None:
    """Copies and pads.

    Padding tokens have the slot -1. A padding row has a context of 0 and the next `per_row` padding tokens, as far as
    there are any. Of the table, the blocks of `block_size` tokens are copied that a row's context has.
    """
    tokens, rows, all_tokens = len(given.ids_T), len(given.contexts_R), len(to.ids_T)
    for column, (x, y) in enumerate(zip(given[:3], to[:3], strict=True)):
        y[:tokens] = x
        y[tokens:] = -1 if column == 2 else 0
    to.contexts_R[:rows] = given.contexts_R
    to.contexts_R[rows:] = 0
    padding = torch.arange(len(to.starts_R1) - rows, dtype=torch.int32, device=to.starts_R1.device)
    to.starts_R1[:rows] = given.starts_R1[:rows]
    to.starts_R1[rows:] = (tokens + padding * per_row).clamp(max=all_tokens)
    for row, context in enumerate(given.contexts_R.tolist()):
        blocks = -(-context // block_size)
        to.table_RB[row, :blocks] = given.table_RB[row, :blocks]
