"""Causal attention over a paged cache for the GPU: one kernel for rows of any length, and one that joins parts.

A tile (tiles.py) is some consecutive queries of one row with all heads that share a key head, so that keys and values
are read once for them. Its keys go by in blocks, with a running maximum and sum. Where there are few tiles and long
contexts, the keys of each tile are split between programs; each leaves its maximum, sum and weighted values, which a
second kernel joins (flash decoding).

    keys of a row    0 ........ low ............................ last
    split                        | 0        | 1        | 2       |       whole blocks, counted from position 0

Where rows are placed, starts and contexts are read from the device, and what else the kernels read lies there after
the first pass: then grid and splits come from the tuples alone, and a captured graph holds nothing but launches.

A cache of another type than the queries' is widened in registers: float8 to float16, in which its numbers are exact
and for which the queries are rounded; two types of 16 bits are multiplied as the cache's.

Blocks are counted from position 0 wherever a window begins, so that without splits the sums of a query are the same
whatever is beside it in the batch. Legend as in reference.py; S splits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kernels.attention.rows import Rows
from kernels.attention.tiles import Heads, Kind, Work, lay_out, lay_out_alike
from kernels.kv_write.float8 import FLOAT8, as_stored, knows_float8, widened
from kernels.launch import Chip, Launch, chip_of, interpreted, power_of_two

_LOG2_E = 1.4426950408889634
_APART = 64
"""Queries times heads from which whole blocks get a loop of their own; under it, waiting twice costs more."""
_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@triton.jit
def _over(
    sum_QA,
    total,
    peak,
    q_QA,
    keys,
    values,
    pages,
    begin,
    end,
    low,
    last,
    position,
    window,
    cache_block,
    cache_token,
    scale,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    # Adds what some blocks of keys give. Not masked: every query sees all of them. Maxima are of scores times scale.
    at_a = tl.arange(0, BLOCK_A)
    for block in range(begin, end):
        at_k = block * BLOCK_K + tl.arange(0, BLOCK_K)
        real_k = (at_k >= low) & (at_k < last)
        page = tl.load(pages + at_k // PAGE, mask=real_k if MASKED else None, other=0 if MASKED else None)
        slot = page.to(tl.int64) * cache_block + (at_k % PAGE) * cache_token
        at = slot[:, None] + at_a[None, :]
        # What no query of the tile sees is not read: it may be NaN, and 0 times NaN is no 0. Keys and values lie alike,
        # so that their places are worked out once.
        if MASKED or SIZE < BLOCK_A:
            real = real_k[:, None] & (at_a < SIZE)[None, :]
            k_KA = tl.load(keys + at, mask=real, other=0.0)
            v_KA = tl.load(values + at, mask=real, other=0.0)
        else:
            k_KA = tl.load(keys + at)
            v_KA = tl.load(values + at)
        k_KA = _as(k_KA, q_QA.dtype)
        v_KA = _as(v_KA, q_QA.dtype)
        score = tl.dot(q_QA, tl.trans(k_KA), input_precision="ieee")
        if MASKED:
            seen = real_k[None, :] & (at_k[None, :] <= position[:, None])
            if WINDOW:
                seen = seen & (at_k[None, :] > position[:, None] - window)
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1) * scale)
        base = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher  # some may have seen no key yet
        weight = tl.exp2(score * scale - base[:, None])
        kept = tl.exp2(peak - base)
        total = total * kept + tl.sum(weight, 1)
        sum_QA = tl.dot(weight.to(v_KA.dtype), v_KA, sum_QA * kept[:, None], input_precision="ieee")
        peak = higher
    return sum_QA, total, peak


@triton.jit
def _as(x, DTYPE: tl.constexpr):
    # Bytes are float8 that the GPU does not know.
    return widened(x).to(DTYPE) if x.dtype.is_int() else x.to(DTYPE)


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
    LISTED: tl.constexpr,
    APART: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    # One program attends for one tile, one key head and one split of the tile's keys.
    kv_head = tl.program_id(1)
    row, first, start, new = _tile(tiles, starts, LISTED)
    # A row whose context is 0 stands for none: its queries see nothing, and get zeros.
    context = tl.where(first < new, tl.load(contexts + row), 0)

    place = tl.arange(0, BLOCK_Q)
    query = first + place // GROUP
    head = kv_head * GROUP + place % GROUP
    real_q = (place < BLOCK_Q // GROUP * GROUP) & (query < new)
    position = context - new + query
    token = (start + query).to(tl.int64)
    at_a = tl.arange(0, BLOCK_A)
    real = real_q[:, None] & (at_a < SIZE)[None, :]
    q_at = token[:, None] * q_token + head[:, None] * q_head + at_a[None, :]
    q_QA = tl.load(q + q_at, mask=real, other=0.0).to(DTYPE)

    last = tl.maximum(0, tl.minimum(context, context - new + first + BLOCK_Q // GROUP))
    low = tl.maximum(0, context - new + first - window + 1) if WINDOW else 0
    begin = low // BLOCK_K
    end = tl.cdiv(last, BLOCK_K)
    if SPLIT:
        each = tl.cdiv(end - begin, splits)
        begin = tl.minimum(begin + tl.program_id(2) * each, end)
        end = tl.minimum(begin + each, end)

    total = tl.zeros((BLOCK_Q,), tl.float32)
    peak = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    sum_QA = tl.zeros((BLOCK_Q, BLOCK_A), tl.float32)
    keys += kv_head * cache_head
    values += kv_head * cache_head
    pages = table + row.to(tl.int64) * table_row
    whole = begin
    if APART:
        whole = tl.maximum(begin, tl.minimum(end, (context - new + first + 1) // BLOCK_K))
        sum_QA, total, peak = _over(
            *(sum_QA, total, peak, q_QA, keys, values, pages, begin, whole, low, last, position, window),
            *(cache_block, cache_token, scale, SIZE, PAGE, WINDOW, False, BLOCK_K, BLOCK_A),
        )
    sum_QA, total, peak = _over(
        *(sum_QA, total, peak, q_QA, keys, values, pages, whole, end, low, last, position, window),
        *(cache_block, cache_token, scale, SIZE, PAGE, WINDOW, True, BLOCK_K, BLOCK_A),
    )

    if SPLIT:
        part = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + kv_head) * splits + tl.program_id(2)
        at = part * BLOCK_Q + place
        tl.store(sums + at[:, None] * SIZE + at_a[None, :], sum_QA, mask=real & (begin < end))
        tl.store(peaks + at * 2, peak, mask=real_q)
        tl.store(peaks + at * 2 + 1, total, mask=real_q)
    else:
        mean_QA = sum_QA / tl.where(total == 0.0, 1.0, total)[:, None]  # the places of no query have seen nothing
        to = (token * heads + head)[:, None] * SIZE + at_a[None, :]
        tl.store(out + to, mean_QA.to(out.dtype.element_ty), mask=real)


@triton.jit
def _tile(tiles, starts, LISTED: tl.constexpr):
    # The row, its first query within the tile, its place among the tokens and its number of queries.
    row = tl.program_id(0)
    first = 0
    if LISTED:
        first = tl.load(tiles + row * 2 + 1)
        row = tl.load(tiles + row * 2)
    start = tl.load(starts + row)
    return row, first, start, tl.load(starts + row + 1) - start


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["tiles", "starts"])
def _join(
    sums,
    peaks,
    out,
    tiles,
    starts,
    heads,
    splits,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    LISTED: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    # One program joins what the splits of one query and head left.
    _, first, start, new = _tile(tiles, starts, LISTED)
    query = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    real_q = first + query < new
    split = tl.arange(0, BLOCK_S)
    at_a = tl.arange(0, BLOCK_A)
    part = (tl.program_id(0).to(tl.int64) * (heads // GROUP) + head // GROUP) * splits + split
    at = part * BLOCK_Q + query * GROUP + head % GROUP
    real = (split < splits) & real_q
    peak = tl.load(peaks + at * 2, mask=real, other=float("-inf"))
    total = tl.load(peaks + at * 2 + 1, mask=real, other=0.0)
    # A split without keys has a peak of -inf, left no sums and weighs nothing. Where all are so, the row is none.
    highest = tl.max(peak, 0)
    weight = tl.exp2(peak - tl.where(highest == float("-inf"), 0.0, highest))
    whole = tl.sum(total * weight, 0)
    left = (real & (peak != float("-inf")))[:, None] & (at_a < SIZE)[None, :]
    sum_SA = tl.load(sums + at[:, None] * SIZE + at_a[None, :], mask=left, other=0.0)
    mean_A = tl.sum(sum_SA * weight[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    to = ((start + first + query).to(tl.int64) * heads + head) * SIZE
    tl.store(out + to + at_a, mean_A.to(out.dtype.element_ty), mask=real_q & (at_a < SIZE))


def product_dtype(queries: torch.dtype, cache: torch.dtype) -> torch.dtype:
    """In what type queries and keys are multiplied."""
    if queries.itemsize > 2:
        return queries
    # The interpreter multiplies bfloat16 wrongly, without a word.
    found = torch.float16 if cache == FLOAT8 else cache
    return torch.float32 if found == torch.float32 or (interpreted() and found == torch.bfloat16) else found


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
        self._splits = splits
        self._chip = chip
        self._work: list[Work] | None = None
        self._numbers: tuple[torch.Tensor, torch.Tensor] | None = None  # starts and contexts, on the device

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
        """The launches, and what they write. Scale is more than 0."""
        if k_cache_NPKD.stride() != v_cache_NPKD.stride():
            raise ValueError("keys and values lie in the cache in different ways")
        if scale <= 0:
            raise ValueError(f"scale must be more than 0, not {scale}")
        if q_THD.stride(2) != 1:
            q_THD = q_THD.contiguous()
        chip = self._chip or chip_of(q_THD.device)
        heads = Heads(q_THD.shape[1] // k_cache_NPKD.shape[2], k_cache_NPKD.shape[2])
        dtype = product_dtype(q_THD.dtype, k_cache_NPKD.dtype)
        kind = Kind(q_THD.shape[2], dtype.itemsize, k_cache_NPKD.element_size(), self._window is not None)
        if self._work is None:
            self._work = self._lay_out(heads, kind, chip, q_THD.device)
        caches = (k_cache_NPKD, v_cache_NPKD)
        if interpreted() or not knows_float8(chip.capability):
            caches = (as_stored(k_cache_NPKD), as_stored(v_cache_NPKD))
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        launches = []
        for work in self._work:
            launches += self._launches(work, q_THD, caches, out_THD, (heads, dtype, scale))
        return launches, out_THD

    def _launches(
        self,
        work: Work,
        q_THD: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        out_THD: torch.Tensor,
        how: tuple[Heads, torch.dtype, float],
    ) -> list[Launch]:
        """Those of one size of tiles."""
        (group, kv_heads), dtype, scale = how
        _, heads, size = q_THD.shape
        blocks, split = work.blocks, work.splits > 1
        starts_R1, contexts_R = self._on_device(q_THD.device)
        sums = peaks = None
        if split:
            parts = (work.count, kv_heads, work.splits, blocks.queries)
            sums = torch.empty(*parts, size, dtype=torch.float32, device=q_THD.device)
            peaks = torch.empty(*parts, 2, dtype=torch.float32, device=q_THD.device)
        table_RB = self._rows.block_table_RB
        given = (
            *(q_THD, *caches, out_THD, sums, peaks, work.tiles_X2, starts_R1, contexts_R, table_RB),
            *(heads, self._window or 0, work.splits),
            *(*q_THD.stride()[:2], *caches[0].stride()[:3], table_RB.stride(0)),
            scale * _LOG2_E,
        )
        common = {"GROUP": group, "SIZE": size, "LISTED": work.tiles_X2 is not None, "BLOCK_Q": blocks.queries}
        width = power_of_two(size, 16)
        constants: dict[str, Any] = {
            **common,
            "PAGE": caches[0].shape[1],
            "WINDOW": self._window is not None,
            "SPLIT": split,
            "APART": self._window is None and blocks.queries >= _APART,
            "DTYPE": _TYPES[dtype],
            "BLOCK_K": blocks.keys,
            "BLOCK_A": width,
        }
        grid = (work.count, kv_heads, work.splits)
        launches = [Launch(_attend, grid, given, constants, blocks.warps, blocks.stages)]
        if split:
            of_join = {**common, "BLOCK_S": power_of_two(work.splits), "BLOCK_A": width}
            left = (sums, peaks, out_THD, work.tiles_X2, starts_R1, heads, work.splits)
            launches.append(Launch(_join, (work.count, heads * work.queries), left, of_join))
        return launches

    def _lay_out(self, heads: Heads, kind: Kind, chip: Chip, device: torch.device) -> list[Work]:
        if self._deterministic:
            return lay_out_alike(self._rows, heads, kind, chip, device)
        return lay_out(self._rows, heads, kind, chip, device, window=self._window, splits=self._splits)

    def _on_device(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._rows
        if rows.placed is not None:
            return rows.placed.starts_R1, rows.placed.contexts_R
        if self._numbers is None:
            flat = torch.tensor([*rows.row_starts, *rows.context_lens], dtype=torch.int32)
            starts, contexts = flat.to(device, non_blocking=True).split((rows.count + 1, rows.count))
            self._numbers = starts, contexts
        return self._numbers
