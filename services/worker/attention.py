"""Attention of one step: writes the new keys and values, then attends. Prepared once for all layers."""

from __future__ import annotations

import torch

from kernels.attention.rows import Rows
from kernels.dispatch import Ops
from services.worker.batch import Batch
from services.worker.cache import KVCache


class StepAttention:
    """What the layers of one forward pass share: the rows, and per window the prepared kernel."""

    def __init__(self, ops: Ops, batch: Batch, cache: KVCache, windows: tuple[int | None, ...], scale: float) -> None:
        self._ops = ops
        self._slots_T = batch.slots_T
        self._cache = cache
        self._windows = windows
        self._scale = scale
        rows = Rows(batch.row_starts, batch.context_lens, batch.block_table_RB, cache.block_size)
        self._attend = {window: ops.prepare_attention(rows, window) for window in set(windows)}

    def __call__(self, layer: int, q_THA: torch.Tensor, k_TKA: torch.Tensor, v_TKA: torch.Tensor) -> torch.Tensor:
        """The attended values [T, H, A] of one layer."""
        keys, values = self._cache.layer(layer)
        self._ops.kv_write(k_TKA, v_TKA, keys, values, self._slots_T)
        return self._attend[self._windows[layer]](q_THA, keys, values, self._scale)
