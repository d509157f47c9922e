"""Quantized tensors of GGUF files, repacked into the blocks that products read. Knows no names and no files.

    Q4_0, Q4_1, Q5_0, Q8_0    without loss: 4, 4, 8 and 8 bits, with the format's own scales and minima
    Q4_K                      4 bits; a scale is the product of two numbers, and is rounded to float16
    every other               rounded anew to 8 bits, whose steps are finer: the format groups otherwise than by 32,
                              or has minima for more than 4 bits

O rows   G groups of 32 in a row   n super-blocks of 256 in a row
"""

from __future__ import annotations

from collections.abc import Callable

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from kernels.linear.blocks import GROUP, ZERO, Blocks

Bytes = NDArray[np.uint8]

FLOATS = {Type.F64, Type.F32, Type.F16, Type.BF16}
"""Types that are no blocks."""


def blocks_of(stored: Bytes, kind: Type) -> Blocks | None:
    """A quantized matrix [O, bytes of a row] as blocks.

    None for what blocks cannot hold: rows that are no whole groups of 32, and weights too large for a scale in 16
    bits. Raises NotImplementedError for a format that nothing here reads.
    """
    block, size = gguf.GGML_QUANT_SIZES[kind]
    if kind in FLOATS or stored.ndim != 2 or stored.shape[1] // size * block % GROUP:
        return None
    repack = _REPACKED.get(kind)
    repacked = None if repack is None else repack(stored.reshape(len(stored), -1, size))
    return repacked or _rounded(stored, kind)


def _rounded(stored: Bytes, kind: Type) -> Blocks | None:
    """The format's values, rounded to 8 bits; some rows at once."""
    step = max(1, _AT_ONCE // stored.shape[1])
    parts = (stored[first : first + step] for first in range(0, len(stored), step))
    try:
        return Blocks.concat([Blocks.of(_dequantized(part, kind)) for part in parts])
    except ValueError:
        return None


def _dequantized(stored: Bytes, kind: Type) -> torch.Tensor:
    """What the library reads, given as one row: it takes 16 rows at a time, however short."""
    return torch.from_numpy(gguf.quants.dequantize(stored.reshape(1, -1), kind)).view(len(stored), -1)


_AT_ONCE = 1 << 18  # bytes


def _q4_0(blocks_OGB: Bytes) -> Blocks:
    """weight = d (q - 8). -8 d is exact in float16, below its normal range too, unless it is too large for it."""
    scale = _halves(blocks_OGB[..., :2])
    numbers = _nibbles(blocks_OGB[..., 2:])
    minimum = scale * -8
    if bool(minimum.isfinite().all()):
        return Blocks(numbers, scale, minimum, 4)
    return Blocks(numbers + (ZERO - 8), scale, None, 8)


def _q4_1(blocks_OGB: Bytes) -> Blocks:
    """weight = d q + m."""
    return Blocks(_nibbles(blocks_OGB[..., 4:]), _halves(blocks_OGB[..., :2]), _halves(blocks_OGB[..., 2:4]), 4)


def _q5_0(blocks_OGB: Bytes) -> Blocks:
    """weight = d (q - 16); the fifth bits of a group are the bits of a word of their own."""
    fifth = np.unpackbits(blocks_OGB[..., 2:6], axis=-1, bitorder="little")
    numbers = _nibbles(blocks_OGB[..., 6:]) + (ZERO - 16)
    numbers += torch.from_numpy(fifth.reshape(numbers.shape)).mul_(16)
    return Blocks(numbers, _halves(blocks_OGB[..., :2]), None, 8)


def _q8_0(blocks_OGB: Bytes) -> Blocks:
    """weight = d q, q with a sign: adding 128 is turning the sign's bit."""
    numbers = blocks_OGB[..., 2:] ^ np.uint8(ZERO)
    return Blocks(torch.from_numpy(numbers.reshape(len(numbers), -1)), _halves(blocks_OGB[..., :2]), None, 8)


def _q4_k(blocks_OnB: Bytes) -> Blocks | None:
    """weight = (d sc) q - (dmin mn), eight groups in a super-block, sc and mn of 6 bits.

        bytes    0 d   2 dmin   4 sc, mn   16 numbers: 32 bytes for a pair of groups, low nibbles the first

    None where a product is too large for float16.
    """
    outputs = len(blocks_OnB)
    packed = blocks_OnB[..., 4:16]
    first, second, high = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    sc = np.concatenate([first & 63, (high & 15) | ((first >> 2) & 48)], axis=-1)
    mn = np.concatenate([second & 63, (high >> 4) | ((second >> 2) & 48)], axis=-1)
    scale = (_floats(blocks_OnB[..., :2]) * torch.from_numpy(sc)).half().view(outputs, -1)
    minimum = (_floats(blocks_OnB[..., 2:4]) * torch.from_numpy(mn)).neg_().half().view(outputs, -1)
    if not bool((scale.isfinite() & minimum.isfinite()).all()):
        return None
    return Blocks(_nibbles(blocks_OnB[..., 16:].reshape(outputs, -1, GROUP)), scale, minimum, 4)


WITHOUT_LOSS = {Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q8_0}
"""Types whose blocks stand for the format's own values to the last bit."""

_REPACKED: dict[Type, Callable[[Bytes], Blocks | None]] = {
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q5_0: _q5_0,
    Type.Q8_0: _q8_0,
    Type.Q4_K: _q4_k,
}


def _nibbles(packed: Bytes) -> torch.Tensor:
    """[O, X, bytes] to numbers [O, I]: of each run of bytes first the low halves, then the high ones."""
    outputs, runs, length = packed.shape
    numbers = np.empty((outputs, runs, 2, length), np.uint8)
    np.bitwise_and(packed, 15, out=numbers[:, :, 0])
    np.right_shift(packed, 4, out=numbers[:, :, 1])
    return torch.from_numpy(numbers.reshape(outputs, -1))


def _halves(stored: Bytes) -> torch.Tensor:
    """[O, X, 2] bytes to float16 [O, X]."""
    return torch.from_numpy(np.ascontiguousarray(stored)).view(torch.float16)[..., 0]


def _floats(stored: Bytes) -> torch.Tensor:
    """[O, X, 2] bytes to float32 [O, X, 1]."""
    return _halves(stored).float()[..., None]
