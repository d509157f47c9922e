"""Turning by positions and the write to the paged cache in one kernel, for the GPU.

Queries are turned into memory of their own, keys are turned into the cache, values are copied there beside them: each
number is read once and written once. Where angles come from (one axis or three) is not seen here. Legend as in
reference.py; H query heads, N = H + K, E = D / 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.kv_write.float8 import as_stored, stored
from kernels.launch import Launch, power_of_two
from kernels.rope.triton import turned_pairs

_BLOCK = 1024
"""Pairs of one program: 8 for each thread of four warps."""


@triton.jit(do_not_specialize=["count"])
def _turn_and_write(
    qk,
    values,
    cos,
    sin,
    queries,
    k_cache,
    v_cache,
    slots,
    count,
    heads,
    kv_heads,
    qk_token,
    qk_head,
    v_token,
    v_head,
    cache_block,
    cache_token,
    cache_head,
    PAGE: tl.constexpr,
    PAIRS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    # One program turns BLOCK_R heads of all tokens' heads one after another; with a head of keys goes that of values.
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    token = (row // (heads + kv_heads)).to(tl.int64)
    head = row % (heads + kv_heads)
    pair = tl.arange(0, BLOCK_E)
    real = (row < count)[:, None] & (pair < PAIRS)[None, :]
    at = token[:, None] * qk_token + head[:, None] * qk_head + pair[None, :]
    first, second = turned_pairs(qk, cos, sin, at, token, pair, real, PAIRS)
    # Rounded to the model's type first, also where the cache has another: that is what a key is.
    turned_first = first.to(queries.dtype.element_ty)
    turned_second = second.to(queries.dtype.element_ty)
    to = (token * heads + head)[:, None] * (2 * PAIRS) + pair[None, :]
    is_query = real & (head < heads)[:, None]
    tl.store(queries + to, turned_first, mask=is_query)
    tl.store(queries + to + PAIRS, turned_second, mask=is_query)

    slot = tl.load(slots + token, mask=(row < count) & (head >= heads), other=-1)
    written = real & (slot >= 0)[:, None]
    kv_head = (head - heads).to(tl.int64)
    of = token[:, None] * v_token + kv_head[:, None] * v_head + pair[None, :]
    value_first = tl.load(values + of, mask=written, other=0.0)
    value_second = tl.load(values + of + PAIRS, mask=written, other=0.0)
    place = (slot // PAGE) * cache_block + (slot % PAGE) * cache_token + kv_head * cache_head
    into = place[:, None] + pair[None, :]
    DTYPE: tl.constexpr = k_cache.dtype.element_ty
    tl.store(k_cache + into, stored(turned_first, DTYPE), mask=written)
    tl.store(k_cache + into + PAIRS, stored(turned_second, DTYPE), mask=written)
    tl.store(v_cache + into, stored(value_first, DTYPE), mask=written)
    tl.store(v_cache + into + PAIRS, stored(value_second, DTYPE), mask=written)


def plan_turn_and_write(
    qk_TND: torch.Tensor,
    v_TKD: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    cache_2NPKD: torch.Tensor,
    slots_T: torch.Tensor,
) -> tuple[Launch, torch.Tensor]:
    """The launch, and the queries that it turns [T, H, D]. Angles are cos and sin [T, E], slots int64."""
    qk_TND, v_TKD = (x if x.stride(2) == 1 else x.contiguous() for x in (qk_TND, v_TKD))
    tokens, both, size = qk_TND.shape
    kv_heads = v_TKD.shape[1]
    q_THD = torch.empty(tokens, both - kv_heads, size, dtype=qk_TND.dtype, device=qk_TND.device)
    block = power_of_two(size // 2)
    rows = max(1, _BLOCK // block)
    count = tokens * both
    cache = as_stored(cache_2NPKD)
    cos_TE, sin_TE = (x.contiguous() for x in angles)
    given = (
        *(qk_TND, v_TKD, cos_TE, sin_TE, q_THD, cache[0], cache[1], slots_T),
        *(count, both - kv_heads, kv_heads),
        *(*qk_TND.stride()[:2], *v_TKD.stride()[:2], *cache.stride()[1:4]),
    )
    blocks = {"PAGE": cache.shape[2], "PAIRS": size // 2, "BLOCK_R": rows, "BLOCK_E": block}
    return Launch(_turn_and_write, (-(-count // rows),), given, blocks), q_THD


def turn_and_write(
    qk_TND: torch.Tensor,
    v_TKD: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    cache_2NPKD: torch.Tensor,
    slots_T: torch.Tensor,
) -> torch.Tensor:
    """See eager.turn_and_write of the references of rope and kv_write: the same numbers, turned in float32."""
    launch, q_THD = plan_turn_and_write(qk_TND, v_TKD, angles, cache_2NPKD, slots_T)
    launch.run()
    return q_THD
