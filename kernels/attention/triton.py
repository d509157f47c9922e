"""Causal attention over a paged cache for the GPU: one kernel for rows of any length, and one that joins parts.

A tile is some consecutive queries of one row with all heads that share a key head, so that keys and values are read
once for them. Its keys go by in blocks, with a running maximum and sum. Where there are few tiles and long contexts,
the keys of each tile are split between programs; each leaves its maximum, sum and weighted values, which a second
kernel joins (flash decoding).

    keys of a row    0 ........ low ............................ last
    split                        | 0        | 1        | 2       |       whole blocks, counted from position 0

Where rows are placed, starts and contexts are read from the device, and what else the kernels read lies there after
the first pass: then grid and splits come from the tuples alone, and a captured graph holds nothing but launches.

Blocks are counted from position 0 wherever a window begins, so that without splits the sums of a query are the same
whatever is beside it in the batch. Legend as in reference.py; S splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.attention.rows import Rows
from kernels.launch import Chip, Launch, chip_of, interpreted, power_of_two

_LOG2_E = 1.4426950408889634
_SPLIT_KEYS = 256
"""A split has at least this many keys, or joining costs more than it saves."""
_MOST_SPLITS = 64
_PROGRAMS_PER_CORE = 2
"""Programs that one multiprocessor holds at once, about; with fewer in all, some of it waits."""


class Blocks(NamedTuple):
    """Queries times heads of a tile, keys that go by at once, and how a program runs."""

    queries: int
    keys: int
    warps: int
    stages: int


def blocks_for(queries: int, size: int, itemsize: int, capability: int) -> Blocks:
    """The blocks for tiles of about this many queries times heads; `size` is D.

    A tile of a decode waits for memory: while a block of 64 keys is multiplied the next is on its way, 32 KB with a
    head of 128, and a multiprocessor holds three such programs or more. A tile of a prefill computes: 128 queries use
    each key often, and 8 warps hold their sums in registers. Before Hopper the scores lie in registers beside the sums
    and 64 keys would spill. Wide heads take fewer queries or keys for the same room, and float32, which is multiplied
    without tensor cores, fewer still. All of these spill nothing (kernels/README.md).
    """
    if itemsize > 2:
        return Blocks(16 if size > 128 else min(queries, 32), 16, 8, 1)
    if queries <= 32:
        return Blocks(queries, 64, 4, 3) if size <= 128 else Blocks(queries, 32, 8, 3)
    if size > 128:
        return Blocks(64, 32, 8, 2)
    return Blocks(queries, 64 if capability >= 90 or queries <= 64 else 32, 8, 3)


@triton.jit(
    do_not_specialize=["window", "splits", "table_row"],
    do_not_specialize_on_alignment=["tiles", "starts", "contexts", "table"],
)
def _attend(
    q,
    keys,
    values,
    out,
    sums,
    peaks,
    tiles,
    starts,
    contexts,
    table,
    heads,
    window,
    splits,
    q_token,
    q_head,
    cache_block,
    cache_token,
    cache_head,
    table_row,
    scale,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    # One program attends for one tile, one key head and one split of the tile's keys.
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.load(tiles + tile * 2)
    first = tl.load(tiles + tile * 2 + 1)
    start = tl.load(starts + row)
    new = tl.load(starts + row + 1) - start
    context = tl.load(contexts + row)

    place = tl.arange(0, BLOCK_Q)
    query = first + place // GROUP
    head = kv_head * GROUP + place % GROUP
    real_q = (place < BLOCK_Q // GROUP * GROUP) & (query < new)
    position = context - new + query
    token = (start + query).to(tl.int64)
    at_a = tl.arange(0, BLOCK_A)
    real_a = at_a < SIZE
    q_at = token[:, None] * q_token + head[:, None] * q_head + at_a[None, :]
    q_QA = tl.load(q + q_at, mask=real_q[:, None] & real_a[None, :], other=0.0)
    if WIDEN:
        q_QA = q_QA.to(tl.float32)

    # A row whose context is 0 stands for none: its queries see nothing, and get zeros.
    last = tl.maximum(0, tl.minimum(context, context - new + first + BLOCK_Q // GROUP))
    low = tl.maximum(0, context - new + first - window + 1) if WINDOW else 0
    begin = low // BLOCK_K
    end = tl.cdiv(last, BLOCK_K)
    if SPLIT:
        each = tl.cdiv(end - begin, splits)
        begin += tl.program_id(2) * each
        end = tl.minimum(begin + each, end)

    peak = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    sum_QA = tl.zeros((BLOCK_Q, BLOCK_A), tl.float32)
    for block in range(begin, end):
        at_k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        real_k = (at_k >= low) & (at_k < last)
        page = tl.load(table + row.to(tl.int64) * table_row + at_k // PAGE, mask=real_k, other=0).to(tl.int64)
        slot = page * cache_block + (at_k % PAGE) * cache_token + kv_head * cache_head
        # What no query of the tile sees is not read: it may be NaN, and 0 times NaN is no 0.
        k_AK = tl.load(keys + slot[None, :] + at_a[:, None], mask=real_k[None, :] & real_a[:, None], other=0.0)
        v_KA = tl.load(values + slot[:, None] + at_a[None, :], mask=real_k[:, None] & real_a[None, :], other=0.0)
        if WIDEN:
            k_AK = k_AK.to(tl.float32)
            v_KA = v_KA.to(tl.float32)
        score = tl.dot(q_QA, k_AK, input_precision="ieee") * scale
        seen = real_k[None, :] & (at_k[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (at_k[None, :] > position[:, None] - window)
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # a query that has seen no key yet
        weight = tl.exp2(score - base[:, None])
        kept = tl.exp2(peak - base)
        total = total * kept + tl.sum(weight, 1)
        sum_QA = sum_QA * kept[:, None] + tl.dot(weight.to(v_KA.dtype), v_KA, input_precision="ieee")
        peak = higher

    real = real_q[:, None] & real_a[None, :]
    to = token * heads + head
    if SPLIT:
        to = to * splits + tl.program_id(2)
        tl.store(sums + to[:, None] * SIZE + at_a[None, :], sum_QA, mask=real)
        tl.store(peaks + to * 2, peak, mask=real_q)
        tl.store(peaks + to * 2 + 1, total, mask=real_q)
    else:
        mean_QA = sum_QA / tl.where(total == 0.0, 1.0, total)[:, None]  # the places of no query have seen nothing
        tl.store(out + to[:, None] * SIZE + at_a[None, :], mean_QA.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["splits"])
def _join(sums, peaks, out, splits, SIZE: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_A: tl.constexpr):
    # One program joins what the splits of one query and head left.
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    at_a = tl.arange(0, BLOCK_A)
    real_a = at_a < SIZE
    peak = tl.load(peaks + (row * splits + split) * 2, mask=split < splits, other=float("-inf"))
    total = tl.load(peaks + (row * splits + split) * 2 + 1, mask=split < splits, other=0.0)
    # A split without keys has a peak of -inf and weighs nothing. Where all are so, the row stands for none.
    highest = tl.max(peak, 0)
    weight = tl.exp2(peak - tl.where(highest == float("-inf"), 0.0, highest))
    whole = tl.sum(total * weight, 0)
    real = (split < splits)[:, None] & real_a[None, :]
    sum_SA = tl.load(sums + (row * splits + split)[:, None] * SIZE + at_a[None, :], mask=real, other=0.0)
    mean_A = tl.sum(sum_SA * weight[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    tl.store(out + row * SIZE + at_a, mean_A.to(out.dtype.element_ty), mask=real_a)


@dataclass(slots=True, frozen=True)
class _Tiles:
    """The work of a step, on the device."""

    blocks: Blocks
    count: int
    splits: int
    tiles_X2: torch.Tensor  # int32: row, first query within it
    starts_R1: torch.Tensor  # int32
    contexts_R: torch.Tensor  # int32


class Attention:
    """See reference.Attention."""

    def __init__(
        self,
        rows: Rows,
        window: int | None,
        *,
        deterministic: bool = False,
        splits: int | None = None,
        chip: Chip | None = None,
    ) -> None:
        """`splits` is how many programs share the keys of a tile; None chooses. Deterministic: one, in fixed tiles.

        `chip` is the GPU to choose for; None asks the device.
        """
        self._rows = rows
        self._window = window
        self._deterministic = deterministic
        self._splits = 1 if deterministic else splits
        self._chip = chip
        self._tiles: _Tiles | None = None

    def __call__(
        self, q_THD: torch.Tensor, k_cache_NPKD: torch.Tensor, v_cache_NPKD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See reference.Attention."""
        launches, out_THD = self.plan(q_THD, k_cache_NPKD, v_cache_NPKD, scale)
        for launch in launches:
            launch.run()
        return out_THD

    def plan(
        self, q_THD: torch.Tensor, k_cache_NPKD: torch.Tensor, v_cache_NPKD: torch.Tensor, scale: float
    ) -> tuple[list[Launch], torch.Tensor]:
        """The launches, and what they write."""
        if k_cache_NPKD.stride() != v_cache_NPKD.stride():
            raise ValueError("keys and values lie in the cache in different ways")
        if q_THD.stride(2) != 1:
            q_THD = q_THD.contiguous()
        tokens, heads, size = q_THD.shape
        _, page, kv_heads, _ = k_cache_NPKD.shape
        if self._tiles is None:
            self._tiles = self._lay_out(heads // kv_heads, kv_heads, size, q_THD)
        tiles, device = self._tiles, q_THD.device
        out_THD = torch.empty(tokens, heads, size, dtype=q_THD.dtype, device=device)
        sums = peaks = None
        if tiles.splits > 1:
            sums = torch.empty(tokens, heads, tiles.splits, size, dtype=torch.float32, device=device)
            peaks = torch.empty(tokens, heads, tiles.splits, 2, dtype=torch.float32, device=device)
        given = (
            *(q_THD, k_cache_NPKD, v_cache_NPKD, out_THD, sums, peaks),
            *(tiles.tiles_X2, tiles.starts_R1, tiles.contexts_R, self._rows.block_table_RB),
            *(heads, self._window or 0, tiles.splits),
            *(*q_THD.stride()[:2], *k_cache_NPKD.stride()[:3], self._rows.block_table_RB.stride(0)),
            scale * _LOG2_E,
        )
        blocks = tiles.blocks
        constants = {
            "GROUP": heads // kv_heads,
            "SIZE": size,
            "PAGE": page,
            "WINDOW": self._window is not None,
            "SPLIT": tiles.splits > 1,
            # The interpreter multiplies bfloat16 wrongly, without a word.
            "WIDEN": interpreted() and q_THD.dtype == torch.bfloat16,
            "BLOCK_Q": blocks.queries,
            "BLOCK_K": blocks.keys,
            "BLOCK_A": power_of_two(size, 16),
        }
        grid = (tiles.count, kv_heads, tiles.splits)
        launches = [Launch(_attend, grid, given, constants, blocks.warps, blocks.stages)]
        if tiles.splits > 1:
            blocks_of_join = {"SIZE": size, "BLOCK_S": power_of_two(tiles.splits), "BLOCK_A": power_of_two(size)}
            launches.append(Launch(_join, (tokens * heads,), (sums, peaks, out_THD, tiles.splits), blocks_of_join))
        return launches, out_THD

    def _lay_out(self, group: int, kv_heads: int, size: int, q_THD: torch.Tensor) -> _Tiles:
        rows, chip = self._rows, self._chip or chip_of(q_THD.device)
        most = 64 if self._deterministic else group * max(map(rows.new_tokens, range(rows.count)), default=1)
        least = power_of_two(group, 16)
        wanted = max(least, min(128, power_of_two(most)))
        blocks = blocks_for(wanted, size, q_THD.element_size(), chip.capability)
        blocks = blocks._replace(queries=max(least, blocks.queries))
        step = blocks.queries // group
        tiles = [(row, first) for row in range(rows.count) for first in range(0, rows.new_tokens(row), step)]
        splits = self._splits or self._choose_splits(len(tiles) * kv_heads, chip.cores)
        flat, device = [number for tile in tiles for number in tile], q_THD.device
        if rows.placed is not None:
            made, key = rows.placed.made, (__name__, rows.row_starts, step)
            if key not in made:
                made[key] = torch.tensor(flat, dtype=torch.int32).to(device, non_blocking=True)
            return _Tiles(blocks, len(tiles), splits, made[key], rows.placed.starts_R1, rows.placed.contexts_R)
        # One copy to the device for all three.
        numbers = [*flat, *rows.row_starts, *rows.context_lens]
        on_device = torch.tensor(numbers, dtype=torch.int32).to(device, non_blocking=True)
        tiles_X2, starts, contexts = on_device.split((len(flat), rows.count + 1, rows.count))
        return _Tiles(blocks, len(tiles), splits, tiles_X2, starts, contexts)

    def _choose_splits(self, programs: int, cores: int) -> int:
        """As many as fill the GPU, while each has enough keys. Placed contexts never exceed the tuple's."""
        longest = max(self._rows.context_lens, default=1)
        keys = longest if self._window is None else min(longest, self._window)
        wanted = cores * _PROGRAMS_PER_CORE // max(1, programs)
        return max(1, min(wanted, keys // _SPLIT_KEYS, _MOST_SPLITS))
