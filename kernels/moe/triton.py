"""Grouped product of a mixture of experts for the GPU: one launch for all experts, of floats or of quantized rows.

How many tokens an expert has stands on the device, and no one waits for it: there are as many programs as the worst
split of tokens needs, and each finds its expert among the offsets, or that there is nothing for it to do.

    tiles of tokens    T tokens make at most T / BLOCK_T whole ones and one for each expert
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.launch import Chip, Launch, chip_of, interpreted, power_of_two, rows_of
from kernels.linear.triton import Blocks, tile_of
from kernels.linear.triton import blocks_for as blocks_of_rows
from kernels.moe.reference import Experts
from kernels.quantized_rows.reference import QuantizedRows

Tensor = torch.Tensor

_TILES_IN_TURN = 8


def blocks_for(tokens: int, inputs: int, itemsize: int, capability: int) -> Blocks:
    """The blocks for experts with this many tokens on average.

    Numbers of 8 bits take those of kernels.linear.triton. Of 16 bits half as many inputs are as many bytes. float32 is
    multiplied without tensor cores and takes tiles that fit into registers. None spills (kernels/README.md).
    """
    if itemsize == 1:
        return blocks_of_rows(tokens, inputs, capability)
    if itemsize > 2:
        return Blocks(32, 16, min(32, power_of_two(inputs, 16)), 4, 2)
    small = power_of_two(inputs, 16)
    if tokens <= 32:
        return Blocks(64, 16 if tokens <= 16 else 32, min(128, small), 4, 4 if capability >= 90 else 3)
    if tokens <= 64:
        return Blocks(64, 64, min(64, small), 4, 4)
    return Blocks(128, 128, min(64, small), 8, 4 if capability >= 90 else 3)


@triton.jit
def _find_expert(offsets, tile_t, experts, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr):
    """The expert of a tile of tokens, and its first pair; the number of experts for a tile beyond the last."""
    at_e = tl.arange(0, BLOCK_E)
    real = at_e < experts
    first_E = tl.load(offsets + at_e, mask=real, other=0)
    tiles_E = tl.cdiv(tl.load(offsets + at_e + 1, mask=real, other=0) - first_E, BLOCK_T)
    expert = tl.sum((real & (tl.cumsum(tiles_E, 0) <= tile_t)).to(tl.int32), 0)
    before = tl.sum(tl.where(at_e < expert, tiles_E, 0), 0)
    start = tl.sum(tl.where(at_e == expert, first_E, 0), 0)
    return expert, start + (tile_t - before) * BLOCK_T


@triton.jit(do_not_specialize=["tiles_t"])
def _grouped(
    x,
    x_scale,
    weight,
    weight_scale,
    offsets,
    rows,
    out,
    experts,
    outputs,
    inputs,
    tiles_o,
    tiles_t,
    x_row,
    GATHER: tl.constexpr,
    SCALED: tl.constexpr,
    WHOLE: tl.constexpr,
    WIDEN: tl.constexpr,
    IN_TURN: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # One program gives one tile of outputs and of the pairs of one expert.
    tile_o, tile_t = tile_of(tl.program_id(0), tiles_o, tiles_t, IN_TURN)
    expert, first = _find_expert(offsets, tile_t, experts, BLOCK_T, BLOCK_E)
    if expert < experts:
        end = tl.load(offsets + expert + 1)
        at_o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
        at_t = first + tl.arange(0, BLOCK_T)
        real_o, real_t = at_o < outputs, at_t < end
        row = at_t
        if GATHER:
            row = tl.load(rows + at_t, mask=real_t, other=0)
        weight_row = expert.to(tl.int64) * outputs + at_o
        weight_at = weight + weight_row[:, None] * inputs
        x_at = x + row.to(tl.int64)[None, :] * x_row
        sums_OT = tl.zeros((BLOCK_O, BLOCK_T), tl.int32 if WHOLE else tl.float32)
        for block in range(tl.cdiv(inputs, BLOCK_I)):
            at_i = block * BLOCK_I + tl.arange(0, BLOCK_I)
            real_i = at_i < inputs
            weight_OI = tl.load(weight_at + at_i[None, :], mask=real_o[:, None] & real_i[None, :], other=0.0)
            x_IT = tl.load(x_at + at_i[:, None], mask=real_i[:, None] & real_t[None, :], other=0.0)
            if WIDEN:
                weight_OI = weight_OI.to(tl.float32)
                x_IT = x_IT.to(tl.float32)
            if WHOLE:
                sums_OT = tl.dot(weight_OI, x_IT, acc=sums_OT, out_dtype=tl.int32)
            elif SCALED:
                # Hopper's own sums of fp8 keep 14 bits or so: none of them goes on for longer than a block.
                sums_OT += tl.dot(weight_OI, x_IT)
            else:
                sums_OT = tl.dot(weight_OI, x_IT, acc=sums_OT, input_precision="ieee")
        y_OT = sums_OT.to(tl.float32)
        if SCALED:
            x_scale_T = tl.load(x_scale + row, mask=real_t, other=0.0)
            weight_scale_O = tl.load(weight_scale + weight_row, mask=real_o, other=0.0)
            y_OT = y_OT * x_scale_T[None, :] * weight_scale_O[:, None]
        out_at = out + at_t.to(tl.int64)[None, :] * outputs + at_o[:, None]
        tl.store(out_at, y_OT.to(out.dtype.element_ty), mask=real_o[:, None] & real_t[None, :])


def plan_grouped(
    x: Tensor | QuantizedRows,
    weight: Tensor | Experts,
    offsets_E1: Tensor,
    rows_X: Tensor | None,
    *,
    dtype: torch.dtype | None = None,
    chip: Chip | None = None,
) -> tuple[Launch, Tensor]:
    """The launch, and what it writes: in the type of x, or in `dtype`, which quantized rows need.

    Raises ValueError for parts that do not belong together.
    """
    x_YI, x_scale = x if isinstance(x, QuantizedRows) else (x, None)
    weight_EOI, weight_scale = weight if isinstance(weight, Experts) else (weight, None)
    if (x_scale is None) != (weight_scale is None) or x_YI.dtype != weight_EOI.dtype:
        raise ValueError(f"x is {x_YI.dtype} and weights are {weight_EOI.dtype}: both must be of one kind")
    x_YI, weight_EOI = rows_of(x_YI), weight_EOI.contiguous()
    experts, outputs, inputs = weight_EOI.shape
    if x_YI.shape[1] != inputs or len(offsets_E1) != experts + 1:
        raise ValueError(
            f"x has {x_YI.shape[1]} inputs and offsets are {len(offsets_E1)}: weights have {inputs} inputs of"
            f" {experts} experts, whose offsets are one more"
        )
    pairs = x_YI.shape[0] if rows_X is None else rows_X.shape[0]
    chip = chip or chip_of(x_YI.device)
    blocks = blocks_for(-(-pairs // max(1, experts)), inputs, x_YI.element_size(), chip.capability)
    tiles_o, tiles_t = -(-outputs // blocks.outputs), pairs // blocks.tokens + min(experts, pairs)
    out = torch.empty(pairs, outputs, dtype=dtype or x_YI.dtype, device=x_YI.device)
    given = (
        *(x_YI, x_scale, weight_EOI, weight_scale, offsets_E1, rows_X, out),
        *(experts, outputs, inputs, tiles_o, tiles_t, x_YI.stride(0)),
    )
    constants: dict[str, Any] = {
        "GATHER": rows_X is not None,
        "SCALED": x_scale is not None,
        "WHOLE": x_YI.dtype == torch.int8,
        # The interpreter multiplies bfloat16 wrongly, without a word.
        "WIDEN": x_YI.dtype == torch.bfloat16 and interpreted(),
        "IN_TURN": _TILES_IN_TURN,
        "BLOCK_O": blocks.outputs,
        "BLOCK_T": blocks.tokens,
        "BLOCK_I": blocks.inputs,
        "BLOCK_E": power_of_two(experts),
    }
    return Launch(_grouped, (tiles_o * tiles_t,), given, constants, blocks.warps, blocks.stages), out


def grouped_product(x_YI: Tensor, weight_EOI: Tensor, offsets_E1: Tensor, rows_X: Tensor | None = None) -> Tensor:
    """See reference.grouped_product."""
    launch, y_XO = plan_grouped(x_YI, weight_EOI, offsets_E1, rows_X)
    launch.run()
    return y_XO


def grouped_rows_product(
    x: QuantizedRows, weight: Experts, offsets_E1: Tensor, dtype: torch.dtype, rows_X: Tensor | None = None
) -> Tensor:
    """See reference.grouped_rows_product."""
    launch, y_XO = plan_grouped(x, weight, offsets_E1, rows_X, dtype=dtype)
    launch.run()
    return y_XO
