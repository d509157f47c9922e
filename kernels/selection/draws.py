"""How each position's token is drawn, as the kernels read it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

PART = 128
"""Logits whose largest, or what they can reach, is known by itself, so that few of a row are looked at again."""


class Draws(NamedTuple):
    """How each position's token is drawn, on the device."""

    wholes_P3: torch.Tensor  # int64: 1 where drawn, 0 where greedy; noise key; top_k, the vocabulary size keeps all
    parts_P3: torch.Tensor  # float64: temperature; top_p; log of min_p, -inf keeps all


@triton.jit
def best_of(pairs, row):
    """The largest logit of a row, as kernels.largest writes it."""
    return tl.load(pairs + row * 2 + 1)


@triton.jit
def drawn(pairs, wholes, row):
    """Whether the row's token is drawn: rows that are not finite are not, what their token is counts for nobody."""
    return (tl.load(wholes + row * 3) != 0) & (tl.abs(best_of(pairs, row)) < float("inf"))


@triton.jit
def cut(wholes, parts, row, vocabulary):
    """Whether the row has cutoffs."""
    low = tl.load(parts + row * 3 + 2)
    return (tl.load(wholes + row * 3 + 2) < vocabulary) | (tl.load(parts + row * 3 + 1) < 1.0) | (low > float("-inf"))


@triton.jit
def free(wholes, parts, row, vocabulary):
    """Whether no cutoff comes before top_p."""
    return (tl.load(wholes + row * 3 + 2) >= vocabulary) & (tl.load(parts + row * 3 + 2) == float("-inf"))


@triton.jit
def scaled(x, pairs, parts, row, at, x_row, width):
    """(x - best) / temperature of some places of a row, rounded as the specification does; -inf behind its end."""
    temperature = tl.load(parts + row * 3).to(tl.float32)
    number = tl.load(x + row * x_row + at, mask=at < width, other=float("-inf"))
    return tl.div_rn(number - best_of(pairs, row), tl.zeros_like(number) + temperature)
