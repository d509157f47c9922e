"""The likeliest tokens in one strict order: larger logits first, lower ids first among equals.

torch.topk promises nothing about equals, and float32 logits of a 16-bit model are full of them.
"""

from __future__ import annotations

import torch


def largest(x_NV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and ids of the `count` first of each row in the strict order."""
    vocab = x_NV.shape[-1]
    if count >= vocab:
        values, ids = torch.sort(x_NV, dim=-1, descending=True, stable=True)
        return values, ids
    values, ids = torch.topk(x_NV, count + 1, dim=-1)
    if bool((values[:, 1:] == values[:, :-1]).any()):
        values, ids = _settle_equals(x_NV, values, ids)
    return values[:, :count], ids[:, :count]


def _settle_equals(x_NV: torch.Tensor, values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Puts equals into the order of their ids; which of them are in at all is settled at the edge."""
    ids, by_id = torch.sort(ids, dim=-1)
    values, by_value = torch.sort(values.gather(-1, by_id), dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, by_value)
    for row in (values[:, -1] == values[:, -2]).nonzero().flatten().tolist():
        edge = values[row, -1]
        first = int((values[row] > edge).sum())
        equals = (x_NV[row] == edge).nonzero().flatten()
        ids[row, first:] = equals[: ids.shape[-1] - first]
    return values, ids
