"""Scatter of new keys and values into the paged cache: the specification.

T tokens   K key/value heads   D head size   N blocks   P tokens of a block
"""

from __future__ import annotations

import torch


def kv_write(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    k_cache_NPKD: torch.Tensor,
    v_cache_NPKD: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    """cache[slot // P, slot % P] = new, for every token whose slot is not -1 (a slot is block * P + offset).

    The cache may have a type of its own; see `stored`.
    """
    block_size = k_cache_NPKD.shape[1]
    k_TKD, v_TKD = stored(k_TKD, k_cache_NPKD.dtype), stored(v_TKD, v_cache_NPKD.dtype)
    for token, slot in enumerate(slots_T.tolist()):
        if slot >= 0:
            k_cache_NPKD[slot // block_size, slot % block_size] = k_TKD[token]
            v_cache_NPKD[slot // block_size, slot % block_size] = v_TKD[token]


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The nearest in the cache's type. Beyond the largest of float8 e4m3, which is 448, it is that one."""
    if dtype != torch.float8_e4m3fn:
        return x.to(dtype)
    return x.float().clamp(-448, 448).to(dtype)


def as_bytes(x_TKD: torch.Tensor) -> torch.Tensor:
    """What a cache of bytes keeps of keys or values: the nearest of 255 steps of a token and head's largest number."""
    scale_TK1 = x_TKD.abs().amax(-1, keepdim=True) / 127
    inverse_TK1 = torch.where(scale_TK1 > 0, 1 / scale_TK1, 0)
    return (x_TKD * inverse_TK1).round() * scale_TK1
