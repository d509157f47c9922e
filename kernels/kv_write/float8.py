"""Numbers of 8 bits in a cache of keys and values (float8 e4m3), for the GPU: made and read by their bits.

    sign | 4 bits of exponent, of which 7 is taken | 3 of fraction        448 at most; no infinity; 0x7F is NaN

The scale is 1 for every tensor: keys and values of the models that we know lie far below 448, and what is larger is
stored as 448. A GPU knows this type from sm_89 up (`knows_float8`); what follows needs none that does.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FLOAT8 = torch.float8_e4m3fn


def knows_float8(capability: int) -> bool:
    """Whether the GPU converts the type itself."""
    return capability >= 89


def as_stored(cache: torch.Tensor) -> torch.Tensor:
    """The cache as kernels write it: bytes in place of float8."""
    return cache.view(torch.uint8) if cache.dtype == FLOAT8 else cache


@triton.jit
def stored(x, DTYPE: tl.constexpr):
    """x in the type of a cache that `as_stored` gave: float8 as its bits, the nearest, ties to even, 448 at most."""
    return _bits(x.to(tl.float32)) if DTYPE.is_int() else x.to(DTYPE)


@triton.jit
def _bits(x):
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    is_nan = size > 0x7F800000
    least = tl.minimum(size, 0x43E00000)  # 448
    normal = ((least + 0x7FFFF + ((least >> 20) & 1)) >> 20) - 960  # exponents begin at 127, here at 7
    # Under 2^-6 are eighths of it: beside 2^23 a float32 has no fraction, so that the sum rounds to whole ones.
    eighths = (least.to(tl.float32, bitcast=True) * 512.0 + 8388608.0).to(tl.uint32, bitcast=True) - 0x4B000000
    found = tl.where(least < 0x3C800000, eighths, normal)
    return (tl.where(is_nan, 0x7F, found) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def widened(bits):
    """float16 of the bits of float8, exactly: the same fields 7 places higher, with an exponent that is 8 too small."""
    wide = bits.to(tl.uint16)
    size = wide & 0x7F
    half = (((wide & 0x80) << 8) | (size << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where(size == 0x7F, float("nan"), half).to(tl.float16)
