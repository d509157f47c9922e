"""The paged KV cache: one tensor of keys and one of values per layer, and the sum of their bytes.

A block holds `block_size` tokens of every layer under the same number; which request owns it is the engine's business.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from services.common.errors import FailedPrecondition
from services.worker.step import CacheShape

_AHEAD = 1 << 29
"""Bytes of a cache whose pages are made ahead: what a few dozen conversations with a small model take."""
_PIECE = 1 << 21  # of these, at once: one huge page
_MADV_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it


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

    def make_pages(self) -> threading.Thread | None:
        """Makes pages ahead, of all layers' first blocks, in a thread of lowest priority: no step waits for them.

        A page that the system hands out anew is cleared by it, and in a virtual machine often asked of the host: 0.2
        to 0.7 GB a second were measured, where memory that is there takes 20. The thread ends by itself, and soon after
        the cache has been let go. None: memory of the device is made when it is asked for.
        """
        if self.tensor.device.type != "cpu":
            return None
        layers = [layer.data_ptr() for layer in self.tensor]
        size = min(self.nbytes, _AHEAD) // len(layers)
        thread = threading.Thread(target=_populate, args=(weakref.ref(self), layers, size), daemon=True)
        thread.start()
        return thread

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer."""
        return self.tensor[index, 0], self.tensor[index, 1]


def _populate(cache: Callable[[], KVCache | None], layers: list[int], size: int) -> None:
    """Has the system make `size` bytes of pages from each of the addresses on, piece by piece in turn.

    What is written meanwhile stays.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for offset in range(0, size, _PIECE):
        for layer in layers:
            held = cache()
            begin, end = (layer + offset) // mmap.PAGESIZE * mmap.PAGESIZE, layer + min(size, offset + _PIECE)
            if held is None or madvise(begin, end - begin, _MADV_POPULATE_WRITE):
                return  # it was let go, or the system cannot
            del held  # which would live as long as this thread


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On the CPU the system hands the pages out as they are written, huge ones where it has them."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, math.prod(size) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(size)
