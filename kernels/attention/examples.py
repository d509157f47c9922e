"""Launches of attention as models make them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.attention.rows import Rows
from kernels.attention.triton import Attention
from kernels.kv_write.float8 import FLOAT8
from kernels.launch import Chip, Launch
from kernels.shapes import Shape, tensor

_PAGE = 16
_DECODE = [(4095, 1)] * 8
_DRAFTS = [(4089, 7)] * 8
_PREFILL = [(0, 512), (100, 300)]


def examples(shape: Shape, chip: Chip, tokens: int) -> Iterator[tuple[str, Launch]]:
    """Each launch and what it is."""
    del tokens  # the rows say how many
    for what, spans, window, splits, deterministic in (
        ("attention, decode", _DECODE, None, 1, False),
        ("attention, decode, split", _DECODE, None, 8, False),
        ("attention, decode, window", _DECODE, 1024, 1, False),
        ("attention, drafts", _DRAFTS, None, 1, False),
        ("attention, prefill", _PREFILL, None, 1, False),
        ("attention, prefill, window", _PREFILL, 1024, 1, False),
        ("attention, deterministic", _PREFILL, None, 1, True),
    ):
        rows, q, cache = _step(shape, spans)
        prepared = Attention(rows, window, splits=splits, deterministic=deterministic, chip=chip)
        found, _ = prepared.plan(q, cache[0], cache[1], shape.size**-0.5)
        for index, launch in enumerate(found):
            yield what if index == 0 else "attention, join", launch
    for what, spans, window in (
        ("attention, decode, float8", _DECODE, None),
        ("attention, prefill, float8", _PREFILL, None),
        ("attention, prefill, float8, window", _PREFILL, 1024),
    ):
        rows, q, cache = _step(shape, spans)
        kept = cache.to(FLOAT8)
        found, _ = Attention(rows, window, splits=1, chip=chip).plan(q, kept[0], kept[1], shape.size**-0.5)
        yield what, found[0]


def _step(shape: Shape, spans: list[tuple[int, int]]) -> tuple[Rows, torch.Tensor, torch.Tensor]:
    """Rows given as (tokens before, new tokens), their queries and the cache."""
    starts = [0]
    for _, new in spans:
        starts.append(starts[-1] + new)
    contexts = tuple(before + new for before, new in spans)
    pages = -(-max(contexts) // _PAGE)
    table = torch.empty(len(spans), pages, dtype=torch.int32, device="meta")
    q = tensor(shape, starts[-1], shape.heads, shape.size)
    cache = tensor(shape, 2, len(spans) * pages, _PAGE, shape.kv_heads, shape.size)
    return Rows(tuple(starts), contexts, table, _PAGE), q, cache
