"""Draws with cutoffs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.largest.triton import bits_of, key_of, place_of
from kernels.launch import Launch
from kernels.selection.draws import Draws, cut, drawn, scaled
from kernels.selection.noise import bits_of_noise, noise

_BLOCK = 2048
_SORTED_BLOCK = 256


@triton.jit
def _order(x, pairs, parts, keys, sums, width, x_row, blocks, BLOCK: tl.constexpr):
    # One program writes the keys of BLOCK scaled logits of one row, and the sum of their float64 exponentials.
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = scaled(x, pairs, parts, row, at, x_row, width)
    tl.store(keys + row * width + at, key_of(number, at), mask=at < width)
    tl.store(sums + row * blocks + tl.program_id(1), tl.sum(tl.exp(number.to(tl.float64)), 0))


@triton.jit
def _draw_sorted(keys, pairs, wholes, parts, masses, tokens, count, BLOCK: tl.constexpr):
    # One program draws one row's token from its keys in order.
    row = tl.program_id(0).to(tl.int64)
    if not (drawn(pairs, wholes, row) & cut(wholes, parts, row, count)):
        return
    key = tl.load(wholes + row * 3 + 1)
    top_k = tl.load(wholes + row * 3 + 2)
    top_p = tl.load(parts + row * 3 + 1)
    low = tl.load(parts + row * 3 + 2)
    mass = tl.load(masses + row)
    bounded = (top_k < count) | (low > float("-inf"))

    whole = tl.full((), 0.0, tl.float64)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        known = tl.load(keys + row * count + at, mask=at < count, other=-0x7FFFFFFFFFFFFFFF)
        value = bits_of(known).to(tl.float32, bitcast=True).to(tl.float64)
        keep = (at < count) & (at < top_k) & (value >= low)
        whole += tl.sum(tl.where(keep, tl.exp(tl.minimum(value, 0.0)), 0.0), 0)
    limit = tl.where(top_p >= 1.0, float("inf"), top_p * tl.where(bounded, whole, mass))

    before = tl.full((), 0.0, tl.float64)
    best = tl.full((), float("-inf"), tl.float64)
    token = tl.full((), 0x7FFFFFFF, tl.int32)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        known = tl.load(keys + row * count + at, mask=at < count, other=-0x7FFFFFFFFFFFFFFF)
        value = bits_of(known).to(tl.float32, bitcast=True).to(tl.float64)
        keep = (at < count) & (at < top_k) & (value >= low)
        weight = tl.where(keep, tl.exp(tl.minimum(value, 0.0)), 0.0)
        sums = before + tl.cumsum(weight, 0)
        headed = (keep & (sums - weight < limit)) | (at == 0)
        before += tl.sum(weight, 0)
        ids = place_of(known)
        total = tl.where(headed, value + noise(bits_of_noise(key, ids), tl.float64), float("-inf"))
        high = tl.max(total, 0)
        first = tl.min(tl.where(headed & (total == high), ids, 0x7FFFFFFF), 0)
        token = tl.where(high > best, first, tl.where(high == best, tl.minimum(first, token), token))
        best = tl.maximum(best, high)
    tl.store(tokens + row, token)


def draw_among_kept(x_PV: torch.Tensor, pairs_P2: torch.Tensor, draws: Draws, tokens_P: torch.Tensor) -> None:
    """Writes the tokens of rows with cutoffs."""
    rows, width = x_PV.shape
    blocks = -(-width // _BLOCK)
    keys_PV = torch.empty(rows, width, dtype=torch.int64, device=x_PV.device)
    sums_PB = torch.empty(rows, blocks, dtype=torch.float64, device=x_PV.device)
    given = (x_PV, pairs_P2, draws.parts_P3, keys_PV, sums_PB, width, x_PV.stride(0), blocks)
    Launch(_order, (rows, blocks), given, {"BLOCK": _BLOCK}).run()
    keys_PV = keys_PV.sort(-1, descending=True).values
    sorted_keys = (keys_PV, pairs_P2, *draws, sums_PB.sum(-1), tokens_P, width)
    Launch(_draw_sorted, (rows,), sorted_keys, {"BLOCK": _SORTED_BLOCK}, warps=2).run()
