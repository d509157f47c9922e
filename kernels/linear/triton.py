"""Product of quantized rows with a quantized weight for the GPU: W8A8, of int8 or of fp8.

A tile is BLOCK_O outputs of BLOCK_T tokens; the weight is the first operand, so that the 16 tokens of a small decode
are the narrow side, which tensor cores allow. Where there are fewer tiles than the GPU holds programs, as in a decode
of any model, the inputs of each tile are split between programs: otherwise few of them would read the weight. Each
leaves its sums in memory, and the one that arrives last adds them up in order, so that no second launch is needed
and no sum depends on who was first.

    inputs    0 ............................................ I
    split     | 0           | 1           | 2           |          whole blocks
    counters  one for each tile: how many of its splits have arrived; the last one puts 0 back

Sums of int8 are exact, and equal to the last bit whatever the blocks. Those of fp8 are in float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from kernels.launch import Chip, Launch, chip_of, power_of_two, rows_of
from kernels.quantized_rows.reference import QuantizedRows

Tensor = torch.Tensor

_PROGRAMS_PER_CORE = 2
"""Programs that should be under way on each multiprocessor, for enough loads to be so."""
_LEAST_BLOCKS = 4
"""A split has at least as many blocks of inputs, or filling its pipeline costs more than it saves."""
_MOST_SPLITS = 16
_TILES_IN_TURN = 8
"""Tiles of tokens that go by for one tile of outputs before the next: what they read stays in the L2 cache."""


class Blocks(NamedTuple):
    """A tile, inputs that go by at once, and how a program runs."""

    outputs: int
    tokens: int
    inputs: int
    warps: int
    stages: int


def blocks_for(tokens: int, inputs: int, capability: int) -> Blocks:
    """The blocks for this many tokens.

    Few tokens wait for the weight: 64 outputs by 256 inputs are 16 KB in each stage, so that two programs on a
    multiprocessor have 80 KB or more under way, twice what the memory's delay asks for (4.8 TB/s for 0.7 us over 132
    multiprocessors is 25 KB). Many tokens compute: 128 by 128 sums use each byte 128 times, in 8 warps, and need no
    more than 64 registers of a thread. None of these spills (kernels/README.md).
    """
    small = power_of_two(inputs, 32)
    if tokens <= 32:
        return Blocks(64, 16 if tokens <= 16 else 32, min(256, small), 4, 4 if capability >= 90 else 3)
    if tokens <= 64:
        return Blocks(64, 64, min(128, small), 4, 4)
    return Blocks(128, 128, min(128, small), 8, 4 if capability >= 90 else 3)


@triton.jit
def tile_of(program, tiles_o, tiles_t, IN_TURN: tl.constexpr):
    """Which tile of outputs and of tokens a program has: some tiles of tokens for each of outputs, then the next."""
    in_group = IN_TURN * tiles_o
    first = program // in_group * IN_TURN
    count = tl.minimum(tiles_t - first, IN_TURN)
    return program % in_group // count, first + program % in_group % count


@triton.jit
def join_splits(sums_OT, partial, counters, tile, split, splits, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr):
    """The sums of all splits, and whether this program is the last to arrive and so has them."""
    at = tl.arange(0, BLOCK_O)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    first = partial + tile.to(tl.int64) * splits * (BLOCK_O * BLOCK_T)
    tl.store(first + split * (BLOCK_O * BLOCK_T) + at, sums_OT)
    # One thread announces what all have written: they must have done so, and the atomic releases it to the GPU.
    tl.debug_barrier()
    last = tl.atomic_add(counters + tile, 1, sem="acq_rel") == splits - 1
    tl.debug_barrier()
    if last:
        sums_OT = tl.zeros_like(sums_OT)
        for each in range(splits):
            sums_OT += tl.load(first + each * (BLOCK_O * BLOCK_T) + at, cache_modifier=".cg")
        tl.store(counters + tile, 0)
    return sums_OT, last


@triton.jit
def store_tile(y_OT, bias, out, at_o, at_t, tokens, outputs, done, BIAS: tl.constexpr):
    """Writes a tile of float32 outputs, with what is added to each; nothing where it is not done."""
    real_o, real_t = at_o < outputs, at_t < tokens
    if BIAS:
        y_OT += tl.load(bias + at_o, mask=real_o, other=0.0).to(tl.float32)[:, None]
    out_at = out + at_t.to(tl.int64)[None, :] * outputs + at_o[:, None]
    tl.store(out_at, y_OT.to(out.dtype.element_ty), mask=real_o[:, None] & real_t[None, :] & done)


@triton.jit(do_not_specialize=["tokens", "tiles_t", "splits"])
def _product(
    x,
    x_scale,
    weight,
    weight_scale,
    bias,
    out,
    partial,
    counters,
    tokens,
    outputs,
    inputs,
    tiles_o,
    tiles_t,
    splits,
    x_row,
    BIAS: tl.constexpr,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    IN_TURN: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    # One program gives one tile of outputs and tokens, or adds one split of its inputs.
    tile = tl.program_id(0)
    tile_o, tile_t = tile_of(tile, tiles_o, tiles_t, IN_TURN)
    at_o = tile_o * BLOCK_O + tl.arange(0, BLOCK_O)
    at_t = tile_t * BLOCK_T + tl.arange(0, BLOCK_T)
    real_o, real_t = at_o < outputs, at_t < tokens
    weight_at = weight + at_o.to(tl.int64)[:, None] * inputs
    x_at = x + at_t.to(tl.int64)[None, :] * x_row

    begin = 0
    end = tl.cdiv(inputs, BLOCK_I)
    if SPLIT:
        each = tl.cdiv(end, splits)
        begin = tl.program_id(1) * each
        end = tl.minimum(begin + each, end)
    sums_OT = tl.zeros((BLOCK_O, BLOCK_T), tl.int32 if WHOLE else tl.float32)
    for block in range(begin, end):
        at_i = block * BLOCK_I + tl.arange(0, BLOCK_I)
        real_i = at_i < inputs
        weight_OI = tl.load(weight_at + at_i[None, :], mask=real_o[:, None] & real_i[None, :], other=0.0)
        x_IT = tl.load(x_at + at_i[:, None], mask=real_i[:, None] & real_t[None, :], other=0.0)
        if WHOLE:
            sums_OT = tl.dot(weight_OI, x_IT, acc=sums_OT, out_dtype=tl.int32)
        else:
            # Hopper's own sums of fp8 keep 14 bits or so: none of them goes on for longer than a block.
            sums_OT += tl.dot(weight_OI, x_IT)

    done = True
    if SPLIT:
        sums_OT, done = join_splits(sums_OT, partial, counters, tile, tl.program_id(1), splits, BLOCK_O, BLOCK_T)
    x_scale_T = tl.load(x_scale + at_t, mask=real_t, other=0.0)
    weight_scale_O = tl.load(weight_scale + at_o, mask=real_o, other=0.0)
    y_OT = sums_OT.to(tl.float32) * x_scale_T[None, :] * weight_scale_O[:, None]
    store_tile(y_OT, bias, out, at_o, at_t, tokens, outputs, done, BIAS)


class Work(NamedTuple):
    """The tiles of a product, and the memory in which splits meet; None where none are."""

    tiles_o: int
    tiles_t: int
    splits: int
    partial: Tensor | None

    @property
    def grid(self) -> tuple[int, int]:
        """A program for each tile and split."""
        return self.tiles_o * self.tiles_t, self.splits


def share(
    sizes: tuple[int, int, int], tile: tuple[int, int, int], cores: int, *, one: bool, like: tuple[torch.dtype, Any]
) -> Work:
    """How (tokens, outputs, inputs) are shared between programs with tiles of that many of each.

    `one`: a single program for each tile. `like` is the type and the device of sums.
    """
    tiles_t, tiles_o, blocks = (-(-size // block) for size, block in zip(sizes, tile, strict=True))
    wanted = 1 if one else cores * _PROGRAMS_PER_CORE // max(1, tiles_o * tiles_t)
    splits = max(1, min(wanted, blocks // _LEAST_BLOCKS, _MOST_SPLITS))
    if splits == 1:
        return Work(tiles_o, tiles_t, 1, None)
    room = tiles_o * tiles_t * splits * tile[0] * tile[1]
    return Work(tiles_o, tiles_t, splits, torch.empty(room, dtype=like[0], device=like[1]))


def counters_for(chip: Chip, device: torch.device) -> Tensor:
    """Zeros, one for each tile that may be split: int32. More tiles than programs that are wanted never are."""
    return torch.zeros(chip.cores * _PROGRAMS_PER_CORE, dtype=torch.int32, device=device)


def plan_product(
    x: QuantizedRows,
    weight: QuantizedRows,
    bias_O: Tensor | None,
    counters: Tensor,
    dtype: torch.dtype,
    *,
    deterministic: bool = False,
    chip: Chip | None = None,
) -> tuple[Launch, Tensor]:
    """The launch, and what it writes: [T, O] in `dtype`. `counters` are those of `counters_for`, zeros.

    Deterministic: rows do not depend on how many there are; whole numbers never do.
    Raises ValueError for rows of another width or kind than the weight's.
    """
    x_TI, weight_OI = rows_of(x.numbers_TI), weight.numbers_TI
    tokens, inputs = x_TI.shape
    if (inputs, x_TI.dtype) != (weight_OI.shape[1], weight_OI.dtype):
        raise ValueError(
            f"x has {inputs} inputs of {x_TI.dtype}, the weight has {weight_OI.shape[1]} of {weight_OI.dtype}"
        )
    outputs, device = weight_OI.shape[0], x_TI.device
    chip = chip or chip_of(device)
    whole = weight_OI.dtype == torch.int8
    fixed = deterministic and not whole
    blocks = blocks_for(64 if fixed else tokens, inputs, chip.capability)
    work = share(
        (tokens, outputs, inputs),
        (blocks.tokens, blocks.outputs, blocks.inputs),
        chip.cores,
        one=fixed,
        like=(torch.int32 if whole else torch.float32, device),
    )
    out = torch.empty(tokens, outputs, dtype=dtype, device=device)
    given = (
        *(x_TI, x.scale_T, weight_OI, weight.scale_T, bias_O, out, work.partial, counters),
        *(tokens, outputs, inputs, work.tiles_o, work.tiles_t, work.splits, x_TI.stride(0)),
    )
    constants = {
        "BIAS": bias_O is not None,
        "SPLIT": work.splits > 1,
        "WHOLE": whole,
        "IN_TURN": _TILES_IN_TURN,
        "BLOCK_O": blocks.outputs,
        "BLOCK_T": blocks.tokens,
        "BLOCK_I": blocks.inputs,
    }
    return Launch(_product, work.grid, given, constants, blocks.warps, blocks.stages), out
