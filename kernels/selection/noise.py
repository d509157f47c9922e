"""Gumbel noise inside Triton kernels: services/worker/sampling/noise.py says what it is."""

from __future__ import annotations

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB - 2**64)
_SMALL = tl.constexpr(1 / 64)


@triton.jit
def bits_of_noise(key, ids):
    """53 random bits of each candidate: the fewer, the larger its noise. Signed arithmetic wraps as unsigned does."""
    x = (ids.to(tl.int64) + 1) * _GOLDEN + key
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MULTIPLIER_1
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MULTIPLIER_2
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return (x >> 11) & 0x1FFFFFFFFFFFFF


@triton.jit
def noise(bits, KIND: tl.constexpr):
    """-log(-log(1 - u)), u = (bits + 1/2) / 2^53, in float64 or roughly in float32.

    What is left of 1 is taken from the bits, and for small u the inner logarithm is its series, so that neither end
    loses digits: u + u^2/2 + ..., whose tenth term is below 2^-57 of the first at 1/64.
    """
    u = (bits.to(KIND) + 0.5) * (2.0**-53)
    left = ((0x1FFFFFFFFFFFFF - bits).to(KIND) + 0.5) * (2.0**-53)
    y = 1.0 + u * (9.0 / 10.0)
    y = 1.0 + u * (8.0 / 9.0) * y
    y = 1.0 + u * (7.0 / 8.0) * y
    y = 1.0 + u * (6.0 / 7.0) * y
    y = 1.0 + u * (5.0 / 6.0) * y
    y = 1.0 + u * (4.0 / 5.0) * y
    y = 1.0 + u * (3.0 / 4.0) * y
    y = 1.0 + u * (2.0 / 3.0) * y
    y = 1.0 + u * (1.0 / 2.0) * y
    return -tl.log(tl.where(u < _SMALL, u * y, -tl.log(left)))


@triton.jit
def most_noise(high):
    """Not under the noise whose bits begin with these 32, and above it by 0.4 where it is under 0.4, else by less.

    noise = -log(u + u^2/2 + u^3/3 + ...), of which three terms of a smaller u are taken: one logarithm, in float32.
    Rounding may take 1e-5 away.
    """
    u = tl.maximum(high.to(tl.float32), 2.0**-22) * (2.0**-32)  # the least u is 2^-54
    return -tl.log(u * (1.0 + u * (0.5 + u * (1.0 / 3.0))))
