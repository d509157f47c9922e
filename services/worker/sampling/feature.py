"""What a sampling feature is: the rows that ask for it, and the edit that it makes to their logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.step import Int32, NewRow

RowT = TypeVar("RowT")


class Position(NamedTuple):
    """One position to be sampled. A row with drafts has several in one step, one behind the other."""

    row: int
    tokens: Int32  # the ids that stand before it, drafts included
    drafts: int = 0  # how many of the last of them are drafts: they may yet turn out wrong
    mask: NDArray[np.uint8] | None = None  # grammar mask, lowest bit first; None allows every token


class Feature(ABC, Generic[RowT]):
    """Owns what its rows need; a row that does not ask for it costs nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows: dict[int, RowT] = {}

    def add(self, new: NewRow) -> None:
        """Keeps what the request on this row needs, if it asks for the feature."""
        prepared = self.prepare(new)
        if prepared is not None:
            self._rows[new.row] = prepared

    def free(self, row: int) -> None:
        """Forgets the row."""
        self._rows.pop(row, None)

    def edits(self, row: int) -> bool:
        """Whether the request on this row asks for the feature."""
        return row in self._rows

    def apply(self, logits_NV: torch.Tensor, positions: Sequence[Position]) -> None:
        """Edits the logits of those positions whose rows ask."""
        if not self._rows:
            return
        for index, position in enumerate(positions):
            state = self._rows.get(position.row)
            if state is not None:
                self.edit(logits_NV[index], state, position)

    @abstractmethod
    def prepare(self, new: NewRow) -> RowT | None:
        """What the request needs, or None if it does not ask."""

    @abstractmethod
    def edit(self, logits_V: torch.Tensor, state: RowT, position: Position) -> None:
        """Edits the logits of one position in place. What `state` keeps must not depend on drafts."""

    def ids(self, values: Sequence[int]) -> torch.Tensor:
        """Token ids as an index."""
        return torch.tensor(sorted(set(values)), dtype=torch.int64, device=self._device)
