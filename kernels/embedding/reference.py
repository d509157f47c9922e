"""Rows of a table by id: the specification."""

from __future__ import annotations

import torch


def embedding(ids_T: torch.Tensor, table_VD: torch.Tensor) -> torch.Tensor:
    """y[t] = table[ids[t]]: [T] int64 and [V, D] give [T, D]."""
    return table_VD[ids_T]
