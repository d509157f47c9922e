"""The launches of this room, to be compiled."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.graphs.reference import Columns
from kernels.graphs.triton import plan_fill
from kernels.launch import Chip, Launch
from kernels.shapes import Shape

_BLOCKS = 512


def examples(shape: Shape, chip: Chip, tokens: int) -> Iterator[tuple[str, Launch]]:
    """A decode of so many rows, in a graph for eight more."""
    del shape, chip
    given, to = _columns(tokens, _BLOCKS // 2), _columns(tokens + 8, _BLOCKS)
    yield "fill", plan_fill(given, to, 1, 16)


def _columns(rows: int, blocks: int) -> Columns:
    whole = [torch.empty(rows, dtype=torch.int64, device="meta") for _ in range(3)]
    sizes: tuple[tuple[int, ...], ...] = ((rows + 1,), (rows,), (rows, blocks))
    return Columns(*whole, *(torch.empty(size, dtype=torch.int32, device="meta") for size in sizes))
