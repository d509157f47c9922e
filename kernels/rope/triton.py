"""Rotary position embedding for the GPU: the angles of a step's positions, once, and the turning of heads.

Positions may have several axes, of which each pair turns with one (kernels/media).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import Launch, power_of_two

_BLOCK = 1024
"""Pairs of one program that turns: 8 for each thread of four warps."""
_ANGLES_BLOCK = 512
"""Pairs of one program that makes angles: float64 takes the registers of 4 more."""


@triton.jit(do_not_specialize=["count", "positions_axis"])
def _angles(
    positions,
    inv_freq,
    cos,
    sin,
    count,
    pairs,
    positions_axis,
    inv_freq_axis,
    scale,
    AXES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program takes BLOCK pairs of all tokens' pairs one after another.
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    real = at < count
    token, pair = at // pairs, at % pairs
    angle = tl.zeros((BLOCK,), tl.float32)
    for axis in tl.static_range(AXES):
        position = tl.load(positions + axis * positions_axis + token, mask=real, other=0).to(tl.float32)
        # Of the axes all but one add an exact zero.
        angle += position * tl.load(inv_freq + axis * inv_freq_axis + pair, mask=real, other=0.0)
    # The angle is reduced to an eighth of a turn around a multiple of pi / 2 in float64, of which float32 would lose
    # the last digits. What is left is small, so that the hardware's float32 functions would do; float64 is as fast
    # here, where memory is waited for, and exact.
    wide = angle.to(tl.float64)
    quarter = tl.floor(wide * 0.6366197723675814 + 0.5)
    rest = (wide - quarter * 1.5707963267948966) - quarter * 6.123233995736766e-17
    square = rest * rest
    even = _cos_of(square)
    odd = _sin_of(rest, square)
    turn = quarter.to(tl.int64) & 3
    c = tl.where(turn % 2 == 0, even, odd)
    s = tl.where(turn % 2 == 0, odd, even)
    c = tl.where((turn == 1) | (turn == 2), -c, c)
    s = tl.where(turn >= 2, -s, s)
    tl.store(cos + at, (c * scale).to(tl.float32).to(cos.dtype.element_ty), mask=real)
    tl.store(sin + at, (s * scale).to(tl.float32).to(sin.dtype.element_ty), mask=real)


@triton.jit
def _cos_of(square):
    # Taylor's series to the 14th power: at pi / 4 the next term is 1e-15.
    y = 1.0 - square * (1.0 / 182.0)
    y = 1.0 - square * (1.0 / 132.0) * y
    y = 1.0 - square * (1.0 / 90.0) * y
    y = 1.0 - square * (1.0 / 56.0) * y
    y = 1.0 - square * (1.0 / 30.0) * y
    y = 1.0 - square * (1.0 / 12.0) * y
    return 1.0 - square * (1.0 / 2.0) * y


@triton.jit
def _sin_of(rest, square):
    # Taylor's series to the 15th power: at pi / 4 the next term is 5e-17.
    y = 1.0 - square * (1.0 / 210.0)
    y = 1.0 - square * (1.0 / 156.0) * y
    y = 1.0 - square * (1.0 / 110.0) * y
    y = 1.0 - square * (1.0 / 72.0) * y
    y = 1.0 - square * (1.0 / 42.0) * y
    y = 1.0 - square * (1.0 / 20.0) * y
    return rest * (1.0 - square * (1.0 / 6.0) * y)


@triton.jit
def turned_pairs(x, cos, sin, at, token, pair, real, PAIRS: tl.constexpr):
    """Both halves of some heads, turned by their tokens' angles, in float32. `at` is where the first halves lie."""
    first = tl.load(x + at, mask=real, other=0.0).to(tl.float32)
    second = tl.load(x + at + PAIRS, mask=real, other=0.0).to(tl.float32)
    angle = token[:, None] * PAIRS + pair[None, :]
    c = tl.load(cos + angle, mask=real, other=0.0).to(tl.float32)
    s = tl.load(sin + angle, mask=real, other=0.0).to(tl.float32)
    return first * c - second * s, second * c + first * s


@triton.jit(do_not_specialize=["count"])
def _turn(
    x,
    cos,
    sin,
    out,
    count,
    heads,
    x_token,
    x_head,
    PAIRS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # One program turns BLOCK_R heads of all tokens' heads one after another.
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token, head = row // heads, row % heads
    pair = tl.arange(0, BLOCK_E)
    real = (row < count)[:, None] & (pair < PAIRS)[None, :]
    at = token[:, None] * x_token + head[:, None] * x_head + pair[None, :]
    first, second = turned_pairs(x, cos, sin, at, token, pair, real, PAIRS)
    to = row[:, None] * (2 * PAIRS) + pair[None, :]
    tl.store(out + to, first.to(out.dtype.element_ty), mask=real)
    tl.store(out + to + PAIRS, second.to(out.dtype.element_ty), mask=real)


def plan_angles(
    positions_XT: torch.Tensor, inv_freq_XE: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """The launch, cos and sin, of positions [axes, T] and frequencies [axes, E]."""
    axes, tokens = positions_XT.shape
    pairs = inv_freq_XE.shape[1]
    if positions_XT.stride(1) != 1:
        positions_XT = positions_XT.contiguous()
    inv_freq_XE = inv_freq_XE.float().contiguous()
    cos_TE, sin_TE = (torch.empty(tokens, pairs, dtype=dtype, device=positions_XT.device) for _ in range(2))
    count = tokens * pairs
    strides = (positions_XT.stride(0), inv_freq_XE.stride(0))
    given = (positions_XT, inv_freq_XE, cos_TE, sin_TE, count, pairs, *strides, scale)
    return Launch(_angles, (-(-count // _ANGLES_BLOCK),), given, {"AXES": axes, "BLOCK": _ANGLES_BLOCK}), cos_TE, sin_TE


def rope_cos_sin(
    positions_T: torch.Tensor, inv_freq_E: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.rope_cos_sin."""
    return rope_axes_cos_sin(positions_T[None], inv_freq_E[None], scale, dtype)


def rope_axes_cos_sin(
    positions_3T: torch.Tensor, inv_freq_3E: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels.media.reference.rope_axes_cos_sin."""
    launch, cos_TE, sin_TE = plan_angles(positions_3T, inv_freq_3E, scale, dtype)
    launch.run()
    return cos_TE, sin_TE


def plan_rope(x_TND: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> tuple[Launch, torch.Tensor]:
    """The launch, and what it turns into."""
    if x_TND.stride(2) != 1:
        x_TND = x_TND.contiguous()
    tokens, heads, size = x_TND.shape
    out_TND = torch.empty(x_TND.shape, dtype=x_TND.dtype, device=x_TND.device)
    block = power_of_two(size // 2)
    rows = max(1, _BLOCK // block)
    count = tokens * heads
    given = (x_TND, cos_TE.contiguous(), sin_TE.contiguous(), out_TND, count, heads, *x_TND.stride()[:2])
    blocks = {"PAIRS": size // 2, "BLOCK_R": rows, "BLOCK_E": block}
    return Launch(_turn, (-(-count // rows),), given, blocks), out_TND


def rope(x_TND: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
    """See reference.rope. The sums are in float32 and rounded once."""
    launch, out_TND = plan_rope(x_TND, cos_TE, sin_TE)
    launch.run()
    return out_TND
