"""Launches of the table of requests, to be compiled."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.launch import Chip, Launch
from kernels.shapes import Shape
from kernels.states import triton as states
from kernels.states.reference import Chosen, Gathered, Tables

_ROWS, _LENGTH, _PAGE = 256, 32768, 16


def examples(shape: Shape, chip: Chip, tokens: int) -> Iterator[tuple[str, Launch]]:
    """Of a step in which every row has one token; what a model is like says nothing here."""
    del shape, chip

    def numbers(*sizes: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(*sizes, dtype=dtype, device="meta")

    tables = Tables(numbers(_ROWS, _LENGTH), numbers(_ROWS, _LENGTH // _PAGE), _PAGE)
    yield "states, stage", states.plan_stage(numbers(tokens, 5), numbers(tokens), tables, 1)
    ids, positions, slots = (numbers(tokens, dtype=torch.int64) for _ in range(3))
    out = Gathered(ids, positions, slots, numbers(tokens + 1), numbers(tokens), numbers(tokens, _LENGTH // _PAGE))
    yield "states, gather", states.plan_gather(numbers(tokens, 6), tables, out, 256)
    pairs = torch.empty(tokens, 2, device="meta")
    chosen = Chosen(numbers(tokens), pairs, pairs)
    yield "states, append", states.plan_append(numbers(tokens, 4), chosen, tables.tokens_RL, numbers(tokens), 0)
