"""Causal attention over a paged cache in a few large products: rows with one query together, longer ones alone.

Keys are gathered token by token into buffers that all groups and layers of a step share: fresh memory for each would
cost more than the copy. A padded place repeats the row's last key, so that nothing outside a row's context is ever
read, and its weight is zero. Legend as in reference.py; E rows of a group, S slots of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.attention.rows import Rows

QUERY_TILE = 128
"""Queries of a long row that are masked together: the mask has this many rows."""
PADDING = 1.25
"""A group of single-query rows is padded to at most this times its shortest context (or by SLACK keys)."""
SLACK = 64
GROUP_KEYS = 4096
"""Keys of a group: few enough that they are still in the CPU's cache when they are multiplied."""


@dataclass(slots=True, frozen=True)
class _Group:
    """Rows with one query each, padded to L keys."""

    tokens_E: torch.Tensor
    slots_EL: torch.Tensor
    mask_E11L: torch.Tensor | None


@dataclass(slots=True, frozen=True)
class _Long:
    """One row with several queries: tokens start to end of the flat axis, keys first to context_len."""

    start: int
    end: int
    first: int
    context_len: int
    slots_L: torch.Tensor


class Attention:
    """See reference.Attention."""

    def __init__(self, rows: Rows, window: int | None) -> None:
        self._rows = rows
        self._window = window
        singles = [row for row in range(rows.count) if rows.new_tokens(row) == 1]
        longs = [row for row in range(rows.count) if rows.new_tokens(row) > 1]
        self._groups = [self._group(group) for group in self._split(singles)]
        self._longs = [self._long(row) for row in longs]
        self._mask_QL = self._right_aligned_mask(longs)
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def __call__(
        self, q_THD: torch.Tensor, k_cache_NPKD: torch.Tensor, v_cache_NPKD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See reference.Attention."""
        out_THD = torch.empty_like(q_THD)
        k_cache_SKD, v_cache_SKD = k_cache_NPKD.flatten(0, 1), v_cache_NPKD.flatten(0, 1)
        for group in self._groups:
            k_XKD, v_XKD = self._gather(k_cache_SKD, v_cache_SKD, group.slots_EL.flatten())
            out_THD[group.tokens_E] = _attend_group(q_THD[group.tokens_E], k_XKD, v_XKD, group, scale)
        for long in self._longs:
            k_LKD, v_LKD = self._gather(k_cache_SKD, v_cache_SKD, long.slots_L)
            for start in range(long.start, long.end, QUERY_TILE):
                end = min(start + QUERY_TILE, long.end)
                last = long.context_len - (long.end - end)  # one past the last key that the tile sees
                first = self._first_key(last - (end - start))
                keys = slice(first - long.first, last - long.first)
                mask = self._mask_QL[QUERY_TILE - (end - start) :, self._mask_QL.shape[1] - (last - first) :]
                out_THD[start:end] = _attend_tile(q_THD[start:end], k_LKD[keys], v_LKD[keys], mask, scale)
        return out_THD

    def _gather(
        self, k_cache_SKD: torch.Tensor, v_cache_SKD: torch.Tensor, slots_X: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at some slots; valid until the next call."""
        if self._buffers is None:
            most = max(
                [group.slots_EL.numel() for group in self._groups] + [long.slots_L.numel() for long in self._longs]
            )
            size = (most, *k_cache_SKD.shape[1:])
            self._buffers = (k_cache_SKD.new_empty(size), v_cache_SKD.new_empty(size))
        k_XKD, v_XKD = (buffer[: slots_X.numel()] for buffer in self._buffers)
        torch.index_select(k_cache_SKD, 0, slots_X, out=k_XKD)
        torch.index_select(v_cache_SKD, 0, slots_X, out=v_XKD)
        return k_XKD, v_XKD

    def _first_key(self, position: int) -> int:
        return 0 if self._window is None else max(0, position - self._window + 1)

    def _span(self, row: int) -> int:
        """Keys of a row whose only query is its last token."""
        context_len = self._rows.context_lens[row]
        return context_len - self._first_key(context_len - 1)

    def _split(self, singles: list[int]) -> list[list[int]]:
        """Rows of similar length together, so that padding stays bounded."""
        groups: list[list[int]] = []
        for row in sorted(singles, key=self._span):
            span = self._span(row)
            shortest = self._span(groups[-1][0]) if groups else 0
            alike = span <= max(shortest * PADDING, shortest + SLACK)
            if groups and alike and span * (len(groups[-1]) + 1) <= GROUP_KEYS:
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    def _group(self, group: list[int]) -> _Group:
        rows, device = self._rows, self._rows.block_table_RB.device
        spans = [self._span(row) for row in group]
        span_E1 = torch.tensor(spans, device=device)[:, None]
        last_E1 = torch.tensor([rows.context_lens[row] - 1 for row in group], device=device)[:, None]
        steps_1L = torch.arange(max(spans), device=device)[None, :]
        places_EL = torch.minimum(last_E1 - span_E1 + 1 + steps_1L, last_E1)
        blocks_EL = (
            rows.block_table_RB[torch.tensor(group, device=device)].long().gather(1, places_EL // rows.block_size)
        )
        mask = None
        if min(spans) < max(spans):
            mask = torch.zeros(len(group), 1, 1, max(spans), device=device)
            mask.masked_fill_((steps_1L >= span_E1)[:, None, None, :], -torch.inf)
        tokens = torch.tensor([rows.row_starts[row] for row in group], device=device)
        return _Group(tokens, blocks_EL * rows.block_size + places_EL % rows.block_size, mask)

    def _long(self, row: int) -> _Long:
        rows = self._rows
        start, end = rows.row_starts[row], rows.row_starts[row + 1]
        context_len = rows.context_lens[row]
        first = self._first_key(context_len - (end - start))
        places_L = torch.arange(first, context_len, device=rows.block_table_RB.device)
        blocks_L = rows.block_table_RB[row].long()[places_L // rows.block_size]
        return _Long(start, end, first, context_len, blocks_L * rows.block_size + places_L % rows.block_size)

    def _right_aligned_mask(self, longs: list[int]) -> torch.Tensor:
        """One mask for every tile: what a query may see depends only on its distance from the tile's last query.

        keys ->      . . . . x x     the last column is the tile's last key, the last row its last query;
        queries      . . . . . x     a tile takes the lower right corner of its size
          |          . . . . . .     (. seen, x in the future; a window also hides the far left)
        """
        device = self._rows.block_table_RB.device
        width = 0
        for row in longs:
            span = self._rows.context_lens[row]
            width = max(width, span if self._window is None else min(span, self._window + QUERY_TILE))
        from_last_query_Q1 = torch.arange(QUERY_TILE - 1, -1, -1, device=device)[:, None]
        from_last_key_1L = torch.arange(width - 1, -1, -1, device=device)[None, :]
        hidden = from_last_key_1L < from_last_query_Q1
        if self._window is not None:
            hidden |= from_last_key_1L - from_last_query_Q1 >= self._window
        return torch.zeros(QUERY_TILE, width, device=device).masked_fill_(hidden, -torch.inf)


def _attend_group(
    q_EHD: torch.Tensor, k_XKD: torch.Tensor, v_XKD: torch.Tensor, group: _Group, scale: float
) -> torch.Tensor:
    k_EKLD = torch.unflatten(k_XKD, 0, group.slots_EL.shape).transpose(1, 2)
    v_EKLD = torch.unflatten(v_XKD, 0, group.slots_EL.shape).transpose(1, 2)
    q_EKGD = torch.unflatten(q_EHD, 1, (k_XKD.shape[1], -1))
    mask = None if group.mask_E11L is None else group.mask_E11L.to(q_EHD.dtype)
    return F.scaled_dot_product_attention(q_EKGD, k_EKLD, v_EKLD, attn_mask=mask, scale=scale).flatten(1, 2)


def _attend_tile(
    q_QHD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, mask_QL: torch.Tensor, scale: float
) -> torch.Tensor:
    heads, group = k_LKD.shape[1], q_QHD.shape[1] // k_LKD.shape[1]
    q_KGQD = torch.unflatten(q_QHD, 1, (heads, group)).permute(1, 2, 0, 3)
    k_KGLD = k_LKD.transpose(0, 1)[:, None].expand(-1, group, -1, -1)
    v_KGLD = v_LKD.transpose(0, 1)[:, None].expand(-1, group, -1, -1)
    mask = mask_QL.to(q_QHD.dtype)
    out_KGQD = F.scaled_dot_product_attention(q_KGQD, k_KGLD, v_KGLD, attn_mask=mask, scale=scale)
    return out_KGQD.permute(2, 0, 1, 3).flatten(1, 2)
