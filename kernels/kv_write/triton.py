"""Scatter of new keys and values into the paged cache, for the GPU. In one kernel with turning: turned.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.kv_write.float8 import as_stored, stored
from kernels.launch import Launch, power_of_two


@triton.jit
def _write(
    keys,
    values,
    k_cache,
    v_cache,
    slots,
    k_token,
    k_head,
    v_token,
    v_head,
    cache_block,
    cache_token,
    cache_head,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program writes one token's keys and values, or nothing where its slot is -1.
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    at = tl.arange(0, BLOCK)
    real = (at < HEADS * SIZE) & (slot >= 0)
    head, place = at // SIZE, at % SIZE
    key = tl.load(keys + token * k_token + head * k_head + place, mask=real, other=0.0)
    value = tl.load(values + token * v_token + head * v_head + place, mask=real, other=0.0)
    to = (slot // PAGE) * cache_block + (slot % PAGE) * cache_token + head * cache_head + place
    DTYPE: tl.constexpr = k_cache.dtype.element_ty
    tl.store(k_cache + to, stored(key, DTYPE), mask=real)
    tl.store(v_cache + to, stored(value, DTYPE), mask=real)


def plan_kv_write(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    k_cache_NPKD: torch.Tensor,
    v_cache_NPKD: torch.Tensor,
    slots_T: torch.Tensor,
) -> Launch:
    """The launch; slots are int64."""
    if k_cache_NPKD.stride() != v_cache_NPKD.stride():
        raise ValueError("keys and values lie in the cache in different ways")
    k_TKD, v_TKD = (x if x.stride(2) == 1 else x.contiguous() for x in (k_TKD, v_TKD))
    tokens, heads, size = k_TKD.shape
    block = power_of_two(heads * size)
    strides = (*k_TKD.stride()[:2], *v_TKD.stride()[:2], *k_cache_NPKD.stride()[:3])
    blocks = {"PAGE": k_cache_NPKD.shape[1], "HEADS": heads, "SIZE": size, "BLOCK": block}
    given = (k_TKD, v_TKD, as_stored(k_cache_NPKD), as_stored(v_cache_NPKD), slots_T, *strides)
    return Launch(_write, (tokens,), given, blocks, warps=min(8, max(1, block // 256)))


def kv_write(
    k_TKD: torch.Tensor,
    v_TKD: torch.Tensor,
    k_cache_NPKD: torch.Tensor,
    v_cache_NPKD: torch.Tensor,
    slots_T: torch.Tensor,
) -> None:
    """See reference.kv_write."""
    plan_kv_write(k_TKD, v_TKD, k_cache_NPKD, v_cache_NPKD, slots_T).run()
