"""The largest of each row for the GPU, in two passes, so that one row of a large vocabulary keeps many programs busy.

A number and its place are one int64 whose order is theirs: the number's bits, ordered, above the place counted
backwards. A NaN is above every number, and among equals the first place wins, in whatever order they are compared.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import Launch, power_of_two, rows_of

_BLOCK = 4096
"""Numbers of one program: 32 for each thread of four warps, and 32 programs for a row of 128 k."""


@triton.jit
def key_of(number, at):
    """The int64 of a float32 and its place; above -2^63 + 1, which stands for nothing."""
    number = tl.where(number == 0.0, 0.0, number)  # the two zeros are equal
    bits = number.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FFFFFFF, order)  # NaN
    return (order.to(tl.int64) << 32) + (0x7FFFFFFF - at).to(tl.int64)


@triton.jit
def bits_of(key):
    """The bits of the float32 in a key."""
    order = (key >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order)


@triton.jit
def place_of(key):
    """The place in a key."""
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _largest_of_parts(x, parts, width, x_row, parts_row, BLOCK: tl.constexpr):
    # One program finds the largest of BLOCK numbers of one row.
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(x + row * x_row + at, mask=at < width, other=float("-inf")).to(tl.float32)
    both = tl.where(at < width, key_of(number, at), -0x7FFFFFFFFFFFFFFF)
    tl.store(parts + row * parts_row + tl.program_id(1), tl.max(both, 0))


@triton.jit
def _largest_of_row(parts, out, count, BLOCK: tl.constexpr):
    # One program finds the largest of one row's parts, and takes number and place apart.
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    both = tl.max(tl.load(parts + row * count + at, mask=at < count, other=-0x7FFFFFFFFFFFFFFF), 0)
    tl.store(out + row * 2, place_of(both))
    tl.store(out + row * 2 + 1, bits_of(both))


def plan_pairs(x_NV: torch.Tensor) -> tuple[Launch, Launch, torch.Tensor]:
    """Two launches, and what they write: [N, 2] int32, the place and the bits of the number."""
    x_NV = rows_of(x_NV)
    count, width = x_NV.shape
    block = min(_BLOCK, power_of_two(width))
    parts = -(-width // block)
    parts_NP = torch.empty(count, parts, dtype=torch.int64, device=x_NV.device)
    out_N2 = torch.empty(count, 2, dtype=torch.int32, device=x_NV.device)
    first = Launch(_largest_of_parts, (count, parts), (x_NV, parts_NP, width, x_NV.stride(0), parts), {"BLOCK": block})
    second = Launch(_largest_of_row, (count,), (parts_NP, out_N2, parts), {"BLOCK": power_of_two(parts)}, warps=1)
    return first, second, out_N2


def pairs(x_NV: torch.Tensor) -> torch.Tensor:
    """See reference.pairs."""
    first, second, out_N2 = plan_pairs(x_NV)
    first.run()
    second.run()
    return out_N2.view(torch.float32)
