"""What attention reads besides tensors: which flat tokens belong to which row, and where a row's keys lie.

flat tokens   | row 0      | row 1 | row 2          |        row_starts = (0, a, b, T)
one row       |<- before ->|<- its new tokens ->|            context_lens[r] covers both
               in the cache, found through block_table_RB[r]
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True, frozen=True)
class Placed:
    """The numbers of rows as they lie on the device already, and what was made of them there.

    Where a captured graph runs, these are what counts: the tuples beside them say how many new tokens and how long a
    context each row has at most. A row that only fills a place has a context of 0; what attention gives for it is 0.
    """

    starts_R1: torch.Tensor  # int32
    contexts_R: torch.Tensor  # int32
    made: dict[Hashable, Any] = field(default_factory=dict)
    """What an attention prepared of the rows and takes again, under its own key."""


@dataclass(slots=True, frozen=True)
class Rows:
    """The rows of one step. New tokens of a row are the last ones of its context; their keys are in the cache."""

    row_starts: tuple[int, ...]  # R + 1 offsets into the flat axis
    context_lens: tuple[int, ...]  # R
    block_table_RB: torch.Tensor  # int32; entries past a row's context are never read
    block_size: int
    placed: Placed | None = None  # None: whoever needs them on the device puts them there
    prompts: tuple[int, ...] | None = None  # R: new tokens, a row's first ones, that are of its prompt; None: not known

    @property
    def count(self) -> int:
        """R."""
        return len(self.context_lens)

    def new_tokens(self, row: int) -> int:
        """How many tokens of a row are queries."""
        return self.row_starts[row + 1] - self.row_starts[row]
