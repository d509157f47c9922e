"""Launches of the table of requests, to be compiled."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.launch import Chip, Launch
from kernels.shapes import Shape
from kernels.states import triton as states
from kernels.states.reference import Gathered

_ROWS, _LENGTH, _PAGE = 256, 32768, 16


def examples(shape: Shape, chip: Chip, tokens: int) -> Iterator[tuple[str, Launch]]:
    """Of a step in which every row has one token; what a model is like says nothing here."""
    del shape, chip

    def numbers(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta")

    ids, blocks = numbers(_ROWS, _LENGTH), numbers(_ROWS, _LENGTH // _PAGE)
    yield "states, stage", states.plan_stage(numbers(tokens, 5), numbers(tokens), ids, blocks, 1)
    flat = [numbers(tokens, dtype=torch.int64) for _ in range(3)]
    out = Gathered(*flat, numbers(tokens + 1), numbers(tokens), numbers(tokens, blocks.shape[1]))
    yield "states, gather", states.plan_gather(numbers(tokens, 6), ids, blocks, _PAGE, out, 256)
    pairs = torch.empty(tokens, 2, device="meta")
    yield (
        "states, append",
        states.plan_append(numbers(tokens, 4), numbers(tokens), pairs, pairs, ids, numbers(tokens), 0),
    )
