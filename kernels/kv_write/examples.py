"""Launches of the writes to the cache as models make them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.kv_write.float8 import FLOAT8
from kernels.kv_write.triton import plan_kv_write
from kernels.kv_write.turned import plan_turn_and_write
from kernels.launch import Chip, Launch
from kernels.shapes import Shape, tensor

_PAGE = 16


def examples(shape: Shape, chip: Chip, tokens: int) -> Iterator[tuple[str, Launch]]:
    """Each launch and what it is."""
    del chip
    qkv = tensor(shape, tokens, shape.heads + 2 * shape.kv_heads, shape.size)
    qk, v = torch.split(qkv, [shape.heads + shape.kv_heads, shape.kv_heads], dim=1)
    angles = (tensor(shape, tokens, shape.size // 2), tensor(shape, tokens, shape.size // 2))
    slots = torch.empty(tokens, dtype=torch.int64, device="meta")
    cache = tensor(shape, 2, 64, _PAGE, shape.kv_heads, shape.size)
    yield "kv_write", plan_kv_write(qk[:, shape.heads :], v, cache[0], cache[1], slots)
    yield "rope and kv_write", plan_turn_and_write(qk, v, angles, cache, slots)[0]
    yield "rope and kv_write, float8", plan_turn_and_write(qk, v, angles, cache.to(FLOAT8), slots)[0]
