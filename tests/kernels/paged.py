"""Random rows in a paged cache whose unused memory is NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention.rows import Rows


@dataclass(slots=True, frozen=True)
class Case:
    """The input of attention, and the dense keys and values it stands for."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    rows: Rows
    dense: list[tuple[torch.Tensor, torch.Tensor]]  # per row: keys, values [context, K, D]


def make_case(
    spans: list[tuple[int, int]],
    *,
    heads: int,
    kv_heads: int,
    size: int,
    block_size: int = 16,
    seed: int = 0,
    hidden_before: int | None = None,
) -> Case:
    """Rows given as (tokens before, new tokens). Positions under `hidden_before` of every row are NaN too."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-(before + new) // block_size) for before, new in spans]
    order = torch.randperm(sum(blocks) + 3, generator=generator).tolist()
    k_cache = torch.full((len(order), block_size, kv_heads, size), torch.nan)
    v_cache = torch.full_like(k_cache, torch.nan)
    table = torch.full((len(spans), max(blocks) + 1), 10**6, dtype=torch.int32)
    starts, dense = [0], []
    for row, (before, new) in enumerate(spans):
        keys, values = (torch.randn(before + new, kv_heads, size, generator=generator) for _ in range(2))
        for block in range(blocks[row]):
            number = table[row, block] = order.pop()
            part = slice(block * block_size, (block + 1) * block_size)
            k_cache[number, : len(keys[part])] = keys[part]
            v_cache[number, : len(values[part])] = values[part]
            hidden = max(0, (hidden_before or 0) - part.start)
            k_cache[number, :hidden] = v_cache[number, :hidden] = torch.nan
        starts.append(starts[-1] + new)
        dense.append((keys, values))
    q = torch.randn(starts[-1], heads, size, generator=generator)
    contexts = tuple(before + new for before, new in spans)
    return Case(q, k_cache, v_cache, Rows(tuple(starts), contexts, table, block_size), dense)
