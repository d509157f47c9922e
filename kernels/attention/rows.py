"""What attention reads besides tensors: which flat tokens belong to which row, and where a row's keys lie.

flat tokens   | row 0      | row 1 | row 2          |        row_starts = (0, a, b, T)
one row       |<- before ->|<- its new tokens ->|            context_lens[r] covers both
               in the cache, found through block_table_RB[r]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True, frozen=True)
class Rows:
    """The rows of one step. New tokens of a row are the last ones of its context; their keys are in the cache."""

    row_starts: tuple[int, ...]  # R + 1 offsets into the flat axis
    context_lens: tuple[int, ...]  # R
    block_table_RB: torch.Tensor  # int32; entries past a row's context are never read
    block_size: int

    @property
    def count(self) -> int:
        """R."""
        return len(self.context_lens)

    def new_tokens(self, row: int) -> int:
        """How many tokens of a row are queries."""
        return self.row_starts[row + 1] - self.row_starts[row]
