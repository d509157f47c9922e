"""What log probabilities are made of, on a GPU that nobody waits for: the sum, the rank of a token, the likeliest.

P rows of logits   B parts of a row   K likeliest
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.largest.triton import key_of, place_of
from kernels.launch import Launch, power_of_two, rows_of
from kernels.selection.draws import PART

_BLOCK = 4096
"""Logits of one program: 32 for each thread of four warps."""
_NOTHING = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # under every key


@triton.jit
def _weigh(x, tokens, peaks, sums, counts, width, x_row, blocks, BLOCK: tl.constexpr):
    # One program takes the largest of BLOCK logits of one row, their mass beside it, and how many are above a token's.
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(x + row * x_row + at, mask=at < width, other=float("-inf"))
    chosen = tl.load(x + row * x_row + tl.load(tokens + row))
    peak = tl.max(number, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    to = row * blocks + tl.program_id(1)
    tl.store(peaks + to, peak)
    tl.store(sums + to, tl.sum(tl.exp(number - base), 0))
    tl.store(counts + to, tl.sum((number > chosen).to(tl.int32), 0))


@triton.jit
def _total(peaks, sums, counts, totals, ranks, blocks, BLOCK_B: tl.constexpr):
    # One program puts the parts of one row together.
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK_B)
    peak = tl.load(peaks + row * blocks + at, mask=at < blocks, other=float("-inf"))
    mass = tl.load(sums + row * blocks + at, mask=at < blocks, other=0.0)
    count = tl.load(counts + row * blocks + at, mask=at < blocks, other=0)
    best = tl.max(peak, 0)
    base = tl.where(best == float("-inf"), 0.0, best)
    tl.store(totals + row, base + tl.log(tl.sum(mass * tl.exp(peak - base), 0)))
    tl.store(ranks + row, tl.sum(count, 0) + 1)


@triton.jit
def _parts(x, best, width, x_row, count, PART: tl.constexpr, BLOCK: tl.constexpr):
    # One program writes the largest key of each PART of BLOCK logits of one row.
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1) * (BLOCK // PART) + tl.arange(0, BLOCK // PART)
    at = part[:, None] * PART + tl.arange(0, PART)[None, :]
    number = tl.load(x + row * x_row + at, mask=at < width, other=0.0)
    key = tl.where(at < width, key_of(number, at), _NOTHING)
    tl.store(best + row * count + part, tl.max(key, 1), mask=part < count)


@triton.jit(do_not_specialize=["wanted"])  # one machine code for any number of likeliest
def _take(x, best, values, ids, wanted, width, x_row, count, PART: tl.constexpr, BLOCK_B: tl.constexpr):
    # One program takes the first key of one row time after time, and looks for the next in the part that it came from.
    row = tl.program_id(0).to(tl.int64)
    at_b = tl.arange(0, BLOCK_B)
    left = tl.load(best + row * count + at_b, mask=at_b < count, other=_NOTHING)
    for index in range(wanted):
        first = tl.max(left, 0)
        place = place_of(first)
        tl.store(ids + row * wanted + index, place.to(tl.int64))
        tl.store(values + row * wanted + index, tl.load(x + row * x_row + place))
        at = place // PART * PART + tl.arange(0, PART)
        number = tl.load(x + row * x_row + at, mask=at < width, other=0.0)
        key = key_of(number, at)
        second = tl.max(tl.where((at < width) & (key < first), key, _NOTHING), 0)
        left = tl.where(left == first, second, left)


def plan_weigh(x_PV: torch.Tensor, tokens_P: torch.Tensor) -> tuple[Launch, Launch, tuple[torch.Tensor, torch.Tensor]]:
    """The launches; the log of each row's sum of exponentials, float32, and its token's rank, int32."""
    rows, width = x_PV.shape
    block = min(_BLOCK, power_of_two(width))
    blocks = -(-width // block)

    def column(kind: torch.dtype, *sizes: int) -> torch.Tensor:
        return torch.empty(rows, *sizes, dtype=kind, device=x_PV.device)

    of_parts = column(torch.float32, blocks), column(torch.float32, blocks), column(torch.int32, blocks)
    out = column(torch.float32), column(torch.int32)
    given = (x_PV, tokens_P, *of_parts, width, x_PV.stride(0), blocks)
    first = Launch(_weigh, (rows, blocks), given, {"BLOCK": block})
    second = Launch(_total, (rows,), (*of_parts, *out, blocks), {"BLOCK_B": power_of_two(blocks)}, warps=1)
    return first, second, out


def weigh(x_PV: torch.Tensor, tokens_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row the log of the sum of exponentials, float32, and 1 + how many are above its token's, int32."""
    first, second, out = plan_weigh(rows_of(x_PV), tokens_P)
    first.run()
    second.run()
    return out


def plan_top(x_PV: torch.Tensor, count: int) -> tuple[Launch, Launch, tuple[torch.Tensor, torch.Tensor]]:
    """The launches, and values and ids of the `count` first of each row."""
    rows, width = x_PV.shape
    count = min(count, width)
    parts = -(-width // PART)
    best_PB = torch.empty(rows, parts, dtype=torch.int64, device=x_PV.device)
    values_PK = torch.empty(rows, count, dtype=torch.float32, device=x_PV.device)
    ids_PK = torch.empty(rows, count, dtype=torch.int64, device=x_PV.device)
    sizes = (width, x_PV.stride(0), parts)
    blocks = {"PART": PART, "BLOCK": _BLOCK}
    first = Launch(_parts, (rows, -(-width // _BLOCK)), (x_PV, best_PB, *sizes), blocks)
    blocks = {"PART": PART, "BLOCK_B": power_of_two(parts)}
    second = Launch(_take, (rows,), (x_PV, best_PB, values_PK, ids_PK, count, *sizes), blocks)
    return first, second, (values_PK, ids_PK)


def top(x_PV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values, float32, and ids, int64, of the `count` first of each row: larger ones first, then lower ids."""
    first, second, out = plan_top(rows_of(x_PV), count)
    first.run()
    second.run()
    return out
