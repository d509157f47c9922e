"""Product with a weight of 4 bits for the GPU: W4A16. What is read of the weight is dequantized in registers.

Tiles and splits are those of kernels/linear/triton. A number becomes a float without a conversion: its four bits are
put where the last bits of 1024 (float16) or 128 (bfloat16) lie, which gives 1024 + number, and the minimum takes the
1024 back. For few tokens the scale is not applied to the weights, of which there are many, but to the sums of each
group, of which there are few: the sum of (1024 + number) * x is exact enough in float32, and

    sum of (scale * number + minimum) * x  =  scale * sum of (1024 + number) * x  +  (minimum - 1024 scale) * sum of x
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.int4.reference import SLICE, SPAN, Packed
from kernels.launch import Chip, Launch, chip_of, interpreted, rows_of
from kernels.linear.triton import Blocks, join_splits, share, store_tile, tile_of

Tensor = torch.Tensor

_TILES_IN_TURN = 8
_SUMS_UP_TO = 32
"""Tokens of a tile up to which sums are scaled: each scaling then is of as many numbers as the group has or fewer.

From Hopper on: before, the compiler does not copy ahead what two products read in different layouts.
"""


def blocks_for(tokens: int, itemsize: int, capability: int) -> Blocks:
    """The blocks for this many tokens; inputs go by in spans of 128.

    Few tokens: 64 outputs are 4 KB of words in each stage, of which six are under way in each of the programs of a
    multiprocessor. Many tokens: each weight is dequantized once for 128 of them. float32 is multiplied without
    tensor cores and takes tiles that fit into registers. None of these spills (kernels/README.md).
    """
    if itemsize > 2:
        return Blocks(32, 16, SPAN, 4, 2)
    if tokens <= _SUMS_UP_TO:
        return Blocks(64, 16 if tokens <= 16 else 32, SPAN, 4, 6 if capability >= 90 else 4)
    if tokens <= 64:
        return Blocks(64, 64, SPAN, 4, 4)
    return Blocks(128, 128, SPAN, 8, 3)


@triton.jit
def _numbers(words_OW, place: tl.constexpr, dtype: tl.constexpr, BLOCK_O: tl.constexpr):
    """One slice of a span: 32 inputs, as floats that are too large by EXCESS."""
    both = (words_OW >> (4 * place)) & 0x000F000F
    if dtype == tl.float16:
        both |= 0x64006400
    elif dtype == tl.bfloat16:
        both |= 0x43004300
    low_OW, high_OW = both & 0xFFFF, both >> 16
    if dtype == tl.float32:
        low_OW, high_OW = low_OW.to(tl.float32), high_OW.to(tl.float32)
    else:
        low_OW = low_OW.to(tl.int16).to(dtype, bitcast=True)
        high_OW = high_OW.to(tl.int16).to(dtype, bitcast=True)
    return tl.reshape(tl.join(low_OW, high_OW), (BLOCK_O, 32))


@triton.jit
def _scales(scales, span, end, at_o, outputs, GROUP: tl.constexpr, SLICE: tl.constexpr):
    """The words of scale and minimum of the four slices of a span; of none beyond the last."""
    first = span * (4 * SLICE)
    real = (at_o < outputs) & (span < end)
    a = tl.load(scales + (first // GROUP).to(tl.int64) * outputs + at_o, mask=real, other=0)
    b = tl.load(scales + ((first + SLICE) // GROUP).to(tl.int64) * outputs + at_o, mask=real, other=0)
    c = tl.load(scales + ((first + 2 * SLICE) // GROUP).to(tl.int64) * outputs + at_o, mask=real, other=0)
    d = tl.load(scales + ((first + 3 * SLICE) // GROUP).to(tl.int64) * outputs + at_o, mask=real, other=0)
    return a, b, c, d


@triton.jit
def _add_slice(
    sums_OT,
    words_OW,
    scales_O,
    x_at,
    real_t,
    first,
    inputs,
    place: tl.constexpr,
    dtype: tl.constexpr,
    SUMS: tl.constexpr,
    EXCESS: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK_O: tl.constexpr,
):
    """The sums with those of one slice."""
    at_i = first + place * SLICE + tl.arange(0, SLICE)
    x_IT = tl.load(x_at + at_i[:, None], mask=(at_i < inputs)[:, None] & real_t[None, :], other=0.0).to(dtype)
    numbers_OI = _numbers(words_OW, place, dtype, BLOCK_O)
    scale_O = (scales_O & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    minimum_O = (scales_O >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    if SUMS:
        minimum_O -= EXCESS * scale_O
        # Sums of x are a product with ones: tensor cores have time for it, a sum across warps would wait.
        total_OT = tl.dot(tl.full((BLOCK_O, SLICE), 1.0, dtype), x_IT, input_precision="ieee")
        part_OT = tl.dot(numbers_OI, x_IT, input_precision="ieee")
        sums_OT += part_OT * scale_O[:, None]
        sums_OT += total_OT * minimum_O[:, None]
    else:
        weight_OI = (numbers_OI.to(tl.float32) - EXCESS) * scale_O[:, None] + minimum_O[:, None]
        sums_OT = tl.dot(weight_OI.to(dtype), x_IT, acc=sums_OT, input_precision="ieee")
    return sums_OT


@triton.jit(do_not_specialize=["tokens", "tiles_t", "splits"])
def _product(
    x,
    words,
    scales,
    bias,
    out,
    partial,
    counters,
    tokens,
    outputs,
    inputs,
    spans,
    tiles_o,
    tiles_t,
    splits,
    x_row,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    SUMS: tl.constexpr,
    WIDEN: tl.constexpr,
    GROUP: tl.constexpr,
    EXCESS: tl.constexpr,
    SLICE: tl.constexpr,
    IN_TURN: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    # One program gives one tile of outputs and tokens, or adds one split of its inputs.
    tile = tl.program_id(0)
    tile_o, tile_t = tile_of(tile, tiles_o, tiles_t, IN_TURN)
    at_o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    at_t = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    at_w = tl.arange(0, SLICE // 2)
    real_o, real_t = at_o < outputs, at_t < tokens
    words_at = words + at_o.to(tl.int64)[:, None] * (spans * (SLICE // 2)) + at_w[None, :]
    x_at = x + at_t.to(tl.int64)[None, :] * x_row
    dtype: tl.constexpr = tl.float32 if WIDEN else x.dtype.element_ty

    begin = 0
    end = spans
    if SPLIT:
        each = tl.cdiv(spans, splits)
        begin = tl.program_id(1) * each
        end = tl.minimum(begin + each, spans)
    sums_OT = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    # The compiler copies ahead what products read. Scales of sums are none of that: they are read a span before.
    a, b, c, d = _scales(scales, begin, end, at_o, outputs, GROUP, SLICE)
    for span in range(begin, end):
        words_OW = tl.load(words_at + span * (SLICE // 2), mask=real_o[:, None], other=0)
        if SUMS:
            next_a, next_b, next_c, next_d = _scales(scales, span + 1, end, at_o, outputs, GROUP, SLICE)
        else:
            a, b, c, d = _scales(scales, span, end, at_o, outputs, GROUP, SLICE)
        first = span * (4 * SLICE)
        sums_OT = _add_slice(sums_OT, words_OW, a, x_at, real_t, first, inputs, 0, dtype, SUMS, EXCESS, SLICE, BLOCK_O)
        sums_OT = _add_slice(sums_OT, words_OW, b, x_at, real_t, first, inputs, 1, dtype, SUMS, EXCESS, SLICE, BLOCK_O)
        sums_OT = _add_slice(sums_OT, words_OW, c, x_at, real_t, first, inputs, 2, dtype, SUMS, EXCESS, SLICE, BLOCK_O)
        sums_OT = _add_slice(sums_OT, words_OW, d, x_at, real_t, first, inputs, 3, dtype, SUMS, EXCESS, SLICE, BLOCK_O)
        if SUMS:
            a, b, c, d = next_a, next_b, next_c, next_d

    done = True
    if SPLIT:
        sums_OT, done = join_splits(sums_OT, partial, counters, tile, tl.program_id(1), splits, BLOCK_O, BLOCK_T)
    store_tile(sums_OT, bias, out, at_o, at_t, tokens, outputs, done, BIAS)


def plan_product(
    x_XI: Tensor,
    weight: Packed,
    bias_O: Tensor | None,
    counters: Tensor,
    *,
    deterministic: bool = False,
    chip: Chip | None = None,
) -> tuple[Launch, Tensor]:
    """The launch, and what it writes: [T, O] in the type of x. `counters` as in kernels.linear.triton.

    Deterministic: rows do not depend on how many there are.
    """
    x_TI = rows_of(x_XI)
    tokens, inputs = x_TI.shape
    if inputs != weight.inputs:
        raise ValueError(f"x has {inputs} inputs, the weight has {weight.inputs}")
    outputs, device = weight.words_OW.shape[0], x_TI.device
    chip = chip or chip_of(device)
    blocks = blocks_for(64 if deterministic else tokens, x_TI.element_size(), chip.capability)
    work = share(
        (tokens, outputs, weight.words_OW.shape[1] * 8),
        (blocks.tokens, blocks.outputs, SPAN),
        chip.cores,
        one=deterministic,
        like=(torch.float32, device),
    )
    out = torch.empty(tokens, outputs, dtype=x_TI.dtype, device=device)
    given = (
        *(x_TI, weight.words_OW, weight.scales_GO2.view(torch.int32), bias_O, out, work.partial, counters),
        *(tokens, outputs, inputs, weight.words_OW.shape[1] // (SPAN // 8)),
        *(work.tiles_o, work.tiles_t, work.splits, x_TI.stride(0)),
    )
    # The interpreter multiplies bfloat16 wrongly, without a word.
    widen = x_TI.dtype == torch.bfloat16 and interpreted()
    constants: dict[str, Any] = {
        "BIAS": bias_O is not None,
        "SPLIT": work.splits > 1,
        "SUMS": blocks.tokens <= _SUMS_UP_TO and chip.capability >= 90,
        "WIDEN": widen,
        "GROUP": weight.group,
        "EXCESS": 0.0 if widen else {torch.float16: 1024.0, torch.bfloat16: 128.0}.get(x_TI.dtype, 0.0),
        "SLICE": SLICE,
        "IN_TURN": _TILES_IN_TURN,
        "BLOCK_O": blocks.outputs,
        "BLOCK_T": blocks.tokens,
    }
    return Launch(_product, work.grid, given, constants, blocks.warps, blocks.stages), out
