"""Causal attention whose queries do not depend, to the last bit, on what else is in the batch.

Every query folds its keys in the same order: chunks of 64 that begin at positions 0, 64, 128 ... of its row, each by
products of one fixed size (16 query rows, padded with zeros). A chunk that a query may not see changes nothing.

    m  largest score so far     l  sum of exp(score - m)     o  sum of exp(score - m) v

Legend as in reference.py; E rows with one query   U tiles   M query rows of a tile   C keys of a chunk.
"""

from __future__ import annotations

import torch

from kernels.attention.rows import Rows

CHUNK = 64
TILE = 16
LOWEST = -1e30
"""Stands for "no score yet": finite, so that differences with it are defined."""


class Attention:
    """See reference.Attention."""

    def __init__(self, rows: Rows, window: int | None) -> None:
        self._rows = rows
        self._window = window
        counts = [rows.new_tokens(row) for row in range(rows.count)]
        self._longs = [row for row, count in enumerate(counts) if count > 1]
        singles = [row for row, count in enumerate(counts) if count == 1]
        self._singles = sorted(singles, key=lambda row: -rows.context_lens[row])
        self._slots_XL = {row: self._slots(row) for row in range(rows.count)}

    def __call__(
        self, q_THD: torch.Tensor, k_cache_NPKD: torch.Tensor, v_cache_NPKD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See reference.Attention."""
        out_THD = torch.empty_like(q_THD)
        k_cache_SKD, v_cache_SKD = k_cache_NPKD.flatten(0, 1), v_cache_NPKD.flatten(0, 1)
        if self._singles:
            tokens_E = torch.tensor([self._rows.row_starts[row] for row in self._singles], device=q_THD.device)
            out_THD[tokens_E] = self._attend_singles(q_THD[tokens_E], k_cache_SKD, v_cache_SKD, scale)
        for row in self._longs:
            tokens = slice(self._rows.row_starts[row], self._rows.row_starts[row + 1])
            out_THD[tokens] = self._attend_long(row, q_THD[tokens], k_cache_SKD, v_cache_SKD, scale)
        return out_THD

    def _first_key(self, position: int) -> int:
        return 0 if self._window is None else max(0, position - self._window + 1)

    def _first_needed(self, row: int) -> int:
        return self._first_key(self._rows.context_lens[row] - self._rows.new_tokens(row))

    def _slots(self, row: int) -> torch.Tensor:
        """Where each place of a row lies, padded to whole chunks; a place outside the context repeats a needed one."""
        rows = self._rows
        context_len = rows.context_lens[row]
        places = torch.arange(-(-context_len // CHUNK) * CHUNK, device=rows.block_table_RB.device)
        places = places.clamp(self._first_needed(row), context_len - 1)
        return rows.block_table_RB[row].long()[places // rows.block_size] * rows.block_size + places % rows.block_size

    def _attend_singles(
        self, q_EHD: torch.Tensor, k_cache_SKD: torch.Tensor, v_cache_SKD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Rows with one query: each is a tile of its own, and all rows fold a chunk together."""
        rows, device = self._rows, q_EHD.device
        heads, group = k_cache_SKD.shape[1], q_EHD.shape[1] // k_cache_SKD.shape[1]
        count, size = q_EHD.shape[0], q_EHD.shape[2]
        tile = -(-group // TILE) * TILE
        q_EKMD = q_EHD.new_zeros(count, heads, tile, size)
        q_EKMD[:, :, :group] = torch.unflatten(q_EHD, 1, (heads, group))
        state = _State(q_EKMD.flatten(0, 1))
        positions_E = torch.tensor([rows.context_lens[row] - 1 for row in self._singles], device=device)
        for start in range(
            min(map(self._first_needed, self._singles)) // CHUNK * CHUNK, rows.context_lens[self._singles[0]], CHUNK
        ):
            active = sum(rows.context_lens[row] > start for row in self._singles)
            slots_EC = torch.stack([self._slots_XL[row][start : start + CHUNK] for row in self._singles[:active]])
            k_UCD, v_UCD = (
                cache_SKD[slots_EC].transpose(1, 2).flatten(0, 1) for cache_SKD in (k_cache_SKD, v_cache_SKD)
            )
            hidden_EC = self._hidden(positions_E[:active, None], start)
            hidden_U1C = hidden_EC[:, None, :].expand(-1, heads, -1).reshape(active * heads, 1, CHUNK)
            state.fold(slice(0, active * heads), k_UCD, v_UCD, hidden_U1C, scale)
        return torch.unflatten(state.result(), 0, (count, heads))[:, :, :group].reshape(q_EHD.shape)

    def _attend_long(
        self, row: int, q_THD: torch.Tensor, k_cache_SKD: torch.Tensor, v_cache_SKD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """One row with several queries: the tiles of a head share each chunk's keys."""
        context_len, count = self._rows.context_lens[row], q_THD.shape[0]
        heads, group = k_cache_SKD.shape[1], q_THD.shape[1] // k_cache_SKD.shape[1]
        tiles = -(-count * group // TILE)
        positions = torch.arange(tiles * TILE, device=q_THD.device) // group + (context_len - count)
        positions_UM1 = positions.clamp(max=context_len - 1).view(tiles, TILE, 1)
        last_positions = positions_UM1[:, -1, 0].tolist()
        q_KXD = q_THD.new_zeros(heads, tiles * TILE, q_THD.shape[2])
        q_KXD[:, : count * group] = torch.unflatten(q_THD, 1, (heads, group)).transpose(0, 1).flatten(1, 2)
        states = [_State(torch.unflatten(q_KXD[head], 0, (tiles, TILE))) for head in range(heads)]
        for start in range(self._first_needed(row) // CHUNK * CHUNK, context_len, CHUNK):
            seeing = slice(sum(position < start for position in last_positions), tiles)
            slots_C = self._slots_XL[row][start : start + CHUNK]
            k_KCD, v_KCD = k_cache_SKD[slots_C].transpose(0, 1), v_cache_SKD[slots_C].transpose(0, 1)
            hidden_UMC = self._hidden(positions_UM1[seeing], start)
            for head, state in enumerate(states):
                shape = (tiles - seeing.start, -1, -1)
                state.fold(seeing, k_KCD[head].expand(shape), v_KCD[head].expand(shape), hidden_UMC, scale)
        out_KXD = torch.stack([state.result().flatten(0, 1)[: count * group] for state in states])
        return torch.unflatten(out_KXD, 1, (count, group)).transpose(0, 1).reshape(q_THD.shape)

    def _hidden(self, positions_X1: torch.Tensor, start: int) -> torch.Tensor:
        """Which keys of the chunk at `start` a query at each position may not see."""
        places_C = torch.arange(start, start + CHUNK, device=positions_X1.device)
        hidden = places_C > positions_X1
        if self._window is not None:
            hidden |= places_C <= positions_X1 - self._window
        return hidden


class _State:
    """Tiles of queries, and what they have folded so far."""

    def __init__(self, q_UMD: torch.Tensor) -> None:
        self._q_UMD = q_UMD.float()
        self._dtype = q_UMD.dtype
        self._m_UM1 = self._q_UMD.new_full((*q_UMD.shape[:2], 1), LOWEST)
        self._l_UM1 = torch.zeros_like(self._m_UM1)
        self._o_UMD = torch.zeros_like(self._q_UMD)

    def fold(
        self, tiles: slice, k_UCD: torch.Tensor, v_UCD: torch.Tensor, hidden_UMC: torch.Tensor, scale: float
    ) -> None:
        """Adds one chunk of keys to some of the tiles."""
        m_old, l_old, o_old = self._m_UM1[tiles], self._l_UM1[tiles], self._o_UMD[tiles]
        scores_UMC = torch.bmm(self._q_UMD[tiles], k_UCD.float().transpose(1, 2)) * scale
        scores_UMC.masked_fill_(hidden_UMC, -torch.inf)
        m_new = torch.maximum(m_old, scores_UMC.amax(-1, keepdim=True))
        weights_UMC = torch.exp(scores_UMC - m_new)
        kept_UM1 = torch.exp(m_old - m_new)
        self._l_UM1[tiles] = l_old * kept_UM1 + weights_UMC.sum(-1, keepdim=True)
        self._o_UMD[tiles] = o_old * kept_UM1 + torch.bmm(weights_UMC, v_UCD.float())
        self._m_UM1[tiles] = m_new

    def result(self) -> torch.Tensor:
        """The attended values: [U, M, D]. Padding rows, which have seen keys too, are for the caller to drop."""
        return (self._o_UMD / self._l_UM1).to(self._dtype)
