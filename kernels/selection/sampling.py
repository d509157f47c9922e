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
from kernels.selection.cutoffs import plan_cutoffs
from kernels.selection.draws import PART, Draws, best_of, cut, drawn, free, scaled
from kernels.selection.noise import UNIT, bits_of_noise, noise, reach, reached

_BLOCK = 2048
"""Logits of one program: 16 for each thread of four warps, with the registers that 64-bit noise takes."""
_SLACK = tl.constexpr(1e-3)  # much more than a bound is off: rounding of numbers up to 45


@triton.jit
def _survey(
    x, pairs, wholes, parts, peaks, masses, width, x_row, count,
    PART: tl.constexpr, BLOCK: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    # One program reads BLOCK logits of one row and writes of each PART of them what scaled logit and noise can reach,
    # or where the row has cutoffs the largest scaled logit, and the mass if top_p alone needs it.
    row = tl.program_id(0).to(tl.int64)
    if not drawn(pairs, wholes, row):
        return
    part = tl.program_id(1) * (BLOCK // PART) + tl.arange(0, BLOCK // PART)
    at = part[:, None] * PART + tl.arange(0, PART)[None, :]
    to = row * count + part
    number = tl.load(x + row * x_row + at, mask=at < width, other=float("-inf")) - best_of(pairs, row)
    temperature = tl.load(parts + row * 3).to(tl.float32)
    if cut(wholes, parts, row, width):
        if CUTS:
            most = tl.max(number, 1)
            tl.store(peaks + to, tl.div_rn(most, tl.zeros_like(most) + temperature), mask=part < count)
            if free(wholes, parts, row, width):
                value = tl.div_rn(number, tl.zeros_like(number) + temperature).to(tl.float64)
                tl.store(masses + to, tl.sum(tl.exp(value), 1), mask=part < count)
    else:
        most = tl.max(reach(number * (UNIT / temperature), tl.load(wholes + row * 3 + 1), at), 1)
        tl.store(peaks + to, reached(most), mask=part < count)


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


def plan_sample(
    x_PV: torch.Tensor, pairs_P2: torch.Tensor, draws: Draws, cuts: bool
) -> tuple[tuple[Launch, ...], torch.Tensor]:
    """The launches in order, and the tokens: int32."""
    rows, width = x_PV.shape
    count = -(-width // PART)
    tokens_P = torch.empty(rows, dtype=torch.int32, device=x_PV.device)
    masses_PB: torch.Tensor | None = None
    among_kept: tuple[Launch, ...] = ()
    if cuts:
        peaks_PB, masses_PB, among_kept = plan_cutoffs(x_PV, pairs_P2, draws, tokens_P)
    else:
        peaks_PB = torch.empty(rows, count, dtype=torch.float32, device=x_PV.device)
    given, sizes = (x_PV, pairs_P2, *draws, peaks_PB), (width, x_PV.stride(0), count)
    constants = {"PART": PART, "BLOCK": _BLOCK, "CUTS": cuts}
    survey = Launch(_survey, (rows, -(-width // _BLOCK)), (*given, masses_PB, *sizes), constants)
    constants = {"PART": PART, "BLOCK_B": power_of_two(count)}
    return (survey, Launch(_draw, (rows,), (*given, tokens_P, *sizes), constants), *among_kept), tokens_P


def sample(x_PV: torch.Tensor, pairs_P2: torch.Tensor, draws: Draws | None, cuts: bool) -> torch.Tensor:
    """Tokens, int32 [P], without waiting for them.

    x_PV float32 logits; pairs_P2 of kernels.largest: place and value of each row's largest; draws None: all greedy;
    cuts: whether any row has cutoffs. A row whose largest is not finite gets that place.
    Raises ValueError for other logits.
    """
    if x_PV.dtype != torch.float32:
        raise ValueError(f"logits are sampled in float32, and x_PV is {x_PV.dtype}")
    if draws is None:
        return pairs_P2[:, 0].view(torch.int32)
    x_PV = rows_of(x_PV)
    launches, tokens_P = plan_sample(x_PV, pairs_P2, draws, cuts)
    for launch in launches:
        launch.run()
    return tokens_P
