"""One token for each row of logits, on a GPU that nobody waits for; services/worker/sampling/draw.py specifies it.

    scaled = (logits - best) / temperature                       float32, the best is 0
    token = argmax of scaled + noise(key, id), in float64

Without cutoffs the logits are read once: a bound of what each part of a row can reach, with noise that is cheap, is
written, and then the few parts that could hold the winner are looked at with exact noise.

P positions, a row of logits for each   B parts of a row
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import Launch, power_of_two, rows_of
from kernels.selection.cutoffs import draw_among_kept
from kernels.selection.draws import Draws, best_of, cut, drawn, scaled
from kernels.selection.noise import bits_of_noise, most_noise, noise

_BLOCK = 2048
"""Logits of one program: 16 for each thread of four warps, with the registers that 64-bit noise takes."""
_PART = 256
"""Logits that one bound stands for, and that are looked at together: what one winner costs in exact noise, which is
two float64 logarithms each."""
_SLACK = tl.constexpr(1e-3)  # much more than a bound is off: rounding of numbers up to 45


@triton.jit
def _bound(x, pairs, wholes, parts, peaks, width, x_row, count, BLOCK: tl.constexpr, PART: tl.constexpr):
    # One program bounds scaled logit and noise of BLOCK logits of one row that has no cutoffs, PART by PART.
    row = tl.program_id(0).to(tl.int64)
    if drawn(pairs, wholes, row) & ~cut(wholes, parts, row, width):
        part = tl.program_id(1) * (BLOCK // PART) + tl.arange(0, BLOCK // PART)
        at = part[:, None] * PART + tl.arange(0, PART)[None, :]
        number = tl.load(x + row * x_row + at, mask=at < width, other=float("-inf"))
        times = 1.0 / tl.load(parts + row * 3).to(tl.float32)
        high = bits_of_noise(tl.load(wholes + row * 3 + 1), at) >> 21
        most = (number - best_of(pairs, row)) * times + most_noise(high.to(tl.uint32))
        tl.store(peaks + row * count + part, tl.max(most, 1), mask=part < count)


@triton.jit
def _draw(x, pairs, wholes, parts, peaks, tokens, width, x_row, count, PART: tl.constexpr, BLOCK_B: tl.constexpr):
    # One program writes one row's token: the likeliest, or without cutoffs the winner, which it looks for in part
    # after part, from the highest bound down, until what it has found is above all bounds that are left.
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(pairs + row * 2).to(tl.int32, bitcast=True)
    if drawn(pairs, wholes, row) & ~cut(wholes, parts, row, width):
        key = tl.load(wholes + row * 3 + 1)
        at_b = tl.arange(0, BLOCK_B)
        left = tl.load(peaks + row * count + at_b, mask=at_b < count, other=float("-inf"))
        best = tl.full((), float("-inf"), tl.float64)
        high = tl.max(left, 0)
        while (high + _SLACK >= best) & (high > float("-inf")):
            part = tl.min(tl.where(left == high, at_b, BLOCK_B), 0)
            at = part * PART + tl.arange(0, PART)
            total = scaled(x, pairs, parts, row, at, x_row, width).to(tl.float64)
            total += noise(bits_of_noise(key, at), tl.float64)
            most = tl.max(total, 0)
            first = tl.min(tl.where(total == most, at, 0x7FFFFFFF), 0)
            # Of equals the lowest id.
            token = tl.where(most > best, first, tl.where(most == best, tl.minimum(first, token), token))
            best = tl.maximum(best, most)
            left = tl.where(at_b == part, float("-inf"), left)
            high = tl.max(left, 0)
    tl.store(tokens + row, token)


def plan_draw(x_PV: torch.Tensor, pairs_P2: torch.Tensor, draws: Draws) -> tuple[Launch, Launch, torch.Tensor]:
    """The launches of rows without cutoffs, and the tokens of all rows: int32; of rows with cutoffs their likeliest."""
    rows, width = x_PV.shape
    block = min(_BLOCK, power_of_two(width, _PART))
    count = -(-width // _PART)
    peaks_PB = torch.empty(rows, count, dtype=torch.float32, device=x_PV.device)
    tokens_P = torch.empty(rows, dtype=torch.int32, device=x_PV.device)
    given, sizes = (x_PV, pairs_P2, *draws), (width, x_PV.stride(0), count)
    constants = {"BLOCK": block, "PART": _PART}
    bound = Launch(_bound, (rows, -(-width // block)), (*given, peaks_PB, *sizes), constants)
    constants = {"PART": _PART, "BLOCK_B": power_of_two(count)}
    return bound, Launch(_draw, (rows,), (*given, peaks_PB, tokens_P, *sizes), constants), tokens_P


def sample(x_PV: torch.Tensor, pairs_P2: torch.Tensor, draws: Draws | None, cuts: bool) -> torch.Tensor:
    """Tokens, int32 [P], without waiting for them.

    x_PV float32 logits; pairs_P2 of kernels.largest: place and value of each row's largest; draws None: all greedy;
    cuts: whether any row has cutoffs. Where a row's largest is not finite its token is that place.
    """
    if draws is None:
        return pairs_P2[:, 0].view(torch.int32)
    x_PV = rows_of(x_PV)
    bound, draw, tokens_P = plan_draw(x_PV, pairs_P2, draws)
    bound.run()
    draw.run()
    if cuts:
        draw_among_kept(x_PV, pairs_P2, draws, tokens_P)
    return tokens_P
