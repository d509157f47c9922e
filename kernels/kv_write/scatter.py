"""Scatter of new keys and values into the paged cache, as one indexed copy per tensor."""

from __future__ import annotations

import torch


def kv_write(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    k_cache_NPKD: torch.Tensor,
    v_cache_NPKD: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    """See reference.kv_write."""
    if bool((slots_T < 0).any()):
        kept = (slots_T >= 0).nonzero().squeeze(1)
        k_TKD, v_TKD, slots_T = k_TKD[kept], v_TKD[kept], slots_T[kept]
    k_cache_NPKD.flatten(0, 1).index_copy_(0, slots_T, k_TKD)
    v_cache_NPKD.flatten(0, 1).index_copy_(0, slots_T, v_TKD)
