"""What a sampling feature is: the rows that ask for it, and the edit that it makes to their logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch

from services.worker.step import Int32, NewRow

RowT = TypeVar("RowT")


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

    def apply(self, logits_NV: torch.Tensor, rows: Sequence[int], tokens: Sequence[Int32]) -> None:
        """Edits the logits of those of the rows that ask; `tokens` are the ids before each."""
        if not self._rows:
            return
        for index, row in enumerate(rows):
            state = self._rows.get(row)
            if state is not None:
                self.edit(logits_NV[index], state, tokens[index])

    @abstractmethod
    def prepare(self, new: NewRow) -> RowT | None:
        """What the request needs, or None if it does not ask."""

    @abstractmethod
    def edit(self, logits_V: torch.Tensor, state: RowT, tokens: Int32) -> None:
        """Edits one row's logits in place. The number of tokens is the position to be sampled."""

    def ids(self, values: Sequence[int]) -> torch.Tensor:
        """Token ids as an index."""
        return torch.tensor(sorted(set(values)), dtype=torch.int64, device=self._device)
