"""The table of requests on the device, for the GPU: three launches a step, whatever is in it.

Each program reads the numbers of one write or span and moves one part of it. Programs behind the end of a short one end
at once, which costs less than a grid that follows their lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import Launch, power_of_two
from kernels.states.reference import BLOCKS, Chosen, Gathered, Tables

_BLOCK = 1024
"""Numbers that one program moves: eight for each thread of four warps. Most spans and writes have one."""
_LEAST_DRAFTS = 32
"""Positions that a program of `append` has room for, so that one machine code serves most numbers of drafts."""
_BLOCKS = tl.constexpr(BLOCKS)


@triton.jit(do_not_specialize=["tokens_row", "blocks_row"], do_not_specialize_on_alignment=["writes", "values"])
def _stage(writes, values, tokens, blocks, tokens_row, blocks_row, BLOCK: tl.constexpr):
    # One program moves BLOCK values of one write.
    write = writes + tl.program_id(0) * 5
    count = tl.load(write + 3)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) * BLOCK < count:
        row = tl.load(write + 1).to(tl.int64)
        begin = tl.load(write + 2)
        value = tl.load(values + tl.load(write + 4) + at, mask=at < count, other=0)
        if tl.load(write) == _BLOCKS:
            tl.store(blocks + row * blocks_row + begin + at, value, mask=at < count)
        else:
            tl.store(tokens + row * tokens_row + begin + at, value, mask=at < count)


@triton.jit(do_not_specialize=["tokens_row", "blocks_row", "table_row"], do_not_specialize_on_alignment=["spans"])
def _gather(
    spans,
    tokens,
    blocks,
    ids,
    positions,
    slots,
    starts,
    contexts,
    table,
    tokens_row,
    blocks_row,
    table_row,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program gathers BLOCK tokens of one span, and BLOCK entries of its row of blocks.
    number = tl.program_id(0)
    span = spans + number * 6
    row = tl.load(span).to(tl.int64)
    begin = tl.load(span + 1)
    count = tl.load(span + 2)
    flat = tl.load(span + 3)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    of_row = blocks + row * blocks_row

    if tl.program_id(1) * BLOCK < count:
        real = at < count
        place = begin + at
        tl.store(
            ids + flat + at, tl.load(tokens + row * tokens_row + place, mask=real, other=0).to(tl.int64), mask=real
        )
        tl.store(positions + flat + at, (place + tl.load(span + 5)).to(tl.int64), mask=real)
        block = tl.load(of_row + place // PAGE, mask=real, other=0).to(tl.int64)
        slot = tl.where(place < tl.load(span + 4), -1, block * PAGE + place % PAGE)
        tl.store(slots + flat + at, slot, mask=real)

    held = tl.cdiv(begin + count, PAGE)
    if tl.program_id(1) * BLOCK < held:
        number_of_block = tl.load(of_row + at, mask=at < held, other=0)
        tl.store(table + number.to(tl.int64) * table_row + at, number_of_block, mask=at < held)

    if tl.program_id(1) == 0:
        if number == 0:
            tl.store(starts, 0)
        tl.store(starts + number + 1, flat + count)
        tl.store(contexts + number, begin + count)


@triton.jit(
    do_not_specialize=["sampled_step", "tokens_row", "length"], do_not_specialize_on_alignment=["spans", "counted"]
)
def _append(spans, sampled, raw, edited, tokens, counted, sampled_step, tokens_row, length, BLOCK: tl.constexpr):
    # One program takes in what one span has sampled.
    span = spans + tl.program_id(0) * 4
    row = tl.load(span).to(tl.int64)
    known = tl.load(span + 1)
    drafts = tl.load(span + 2)
    first = tl.load(span + 3)
    at = tl.arange(0, BLOCK)
    real = (at <= drafts) & (row >= 0)
    token = tl.load(sampled + (first + at) * sampled_step, mask=real, other=-1)
    bits = tl.load(raw + (first + at) * 2 + 1, mask=real, other=0x7F800000)
    value = tl.load(edited + (first + at) * 2 + 1, mask=real, other=0).to(tl.float32, bitcast=True)
    found = ((bits & 0x7F800000) != 0x7F800000) & (value > float("-inf"))
    to = tokens + row * tokens_row + known + at
    draft = tl.load(to, mask=(at < drafts) & (row >= 0) & (known + at < length), other=-1)
    # What counts ends before a position without a token, and behind one that is not the draft.
    ends = tl.where(found, tl.where((at < drafts) & (token == draft), BLOCK, at + 1), at)
    count = tl.min(ends, 0)
    tl.store(to, token, mask=real & (at < count) & (known + at < length))
    tl.store(counted + tl.program_id(0), count)


def plan_stage(writes_W5: torch.Tensor, values_N: torch.Tensor, tables: Tables, longest: int) -> Launch:
    """The launch; no write is longer than `longest`."""
    grid = (len(writes_W5), -(-longest // _BLOCK))
    tokens_RL, blocks_RB, _ = tables
    given = (writes_W5, values_N, tokens_RL, blocks_RB, tokens_RL.stride(0), blocks_RB.stride(0))
    return Launch(_stage, grid, given, {"BLOCK": _BLOCK})


def plan_gather(
    spans_S6: torch.Tensor,
    tables: Tables,
    out: Gathered,
    longest: int,
) -> Launch:
    """The launch; no span has more tokens than `longest`, and no row of it more blocks."""
    grid = (len(spans_S6), -(-longest // _BLOCK))
    tokens_RL, blocks_RB, block_size = tables
    strides = (tokens_RL.stride(0), blocks_RB.stride(0), out.table_SB.stride(0))
    given = (spans_S6, tokens_RL, blocks_RB, *out, *strides)
    return Launch(_gather, grid, given, {"PAGE": block_size, "BLOCK": _BLOCK})


def plan_append(
    spans_C4: torch.Tensor,
    chosen: Chosen,
    tokens_RL: torch.Tensor,
    counted_C: torch.Tensor,
    drafts: int,
) -> Launch:
    """The launch; no span has more drafts than `drafts`."""
    raw_P2, edited_P2 = chosen.raw_P2.view(torch.int32), chosen.edited_P2.view(torch.int32)
    given = (
        spans_C4,
        chosen.tokens_P,
        raw_P2,
        edited_P2,
        tokens_RL,
        counted_C,
        chosen.tokens_P.stride(0),  # of greedy ones they are the places of pairs
        tokens_RL.stride(0),
        tokens_RL.shape[1],
    )
    return Launch(_append, (len(spans_C4),), given, {"BLOCK": power_of_two(drafts + 1, _LEAST_DRAFTS)}, warps=1)


def stage(writes_W5: torch.Tensor, values_N: torch.Tensor, tables: Tables, longest: int) -> None:
    """See reference.stage."""
    plan_stage(writes_W5, values_N, tables, longest).run()


def gather(
    spans_S6: torch.Tensor,
    tables: Tables,
    out: Gathered,
    longest: int,
) -> None:
    """See reference.gather."""
    plan_gather(spans_S6, tables, out, longest).run()


def append(
    spans_C4: torch.Tensor,
    chosen: Chosen,
    tokens_RL: torch.Tensor,
    counted_C: torch.Tensor,
    drafts: int,
) -> None:
    """See reference.append."""
    plan_append(spans_C4, chosen, tokens_RL, counted_C, drafts).run()
