"""The paged KV cache: one tensor of keys and one of values per layer, and the sum of their bytes.

A block holds `block_size` tokens of every layer under the same number; which request owns it is the engine's business.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from services.common.errors import FailedPrecondition
from services.worker.step import CacheShape


def _tokens_first(block_size: int, heads: int, head_dim: int) -> tuple[int, ...]:
    return block_size, heads, head_dim


@dataclass(slots=True, frozen=True)
class KvLayout:
    """What one token's keys and values look like."""

    layers: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    block: Callable[[int, int, int], tuple[int, ...]] = _tokens_first
    """(tokens of a block, heads, head_dim) -> the shape of its keys in one layer, which its values have too."""

    @property
    def bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * math.prod(self.block(1, self.heads, self.head_dim)) * self.dtype.itemsize

    def bytes_per_block(self, block_size: int) -> int:
        """Keys and values of one block in all layers."""
        return self.bytes_per_token * block_size


class KVCache:
    """Keys and values of every layer: [layers, 2, N blocks, *the layout's block]."""

    def __init__(self, layout: KvLayout, shape: CacheShape, device: torch.device) -> None:
        self.block_size = shape.block_size
        self.num_blocks = shape.num_blocks
        self.nbytes = shape.num_blocks * layout.bytes_per_block(shape.block_size)
        block = layout.block(shape.block_size, layout.heads, layout.head_dim)
        size = (layout.layers, 2, shape.num_blocks, *block)
        try:
            self.tensor = _zeros(size, layout.dtype, device)
        except (RuntimeError, MemoryError, OSError, OverflowError) as error:
            raise FailedPrecondition(
                f"the KV cache of {shape.num_blocks} blocks, {self.nbytes} bytes, cannot be allocated: {error}",
                field="num_blocks",
            ) from error

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer."""
        return self.tensor[index, 0], self.tensor[index, 1]


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On the CPU the system hands the pages out as they are written, huge ones where it has them."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(size)
