"""Gumbel noise inside Triton kernels: services/worker/sampling/noise.py says what it is."""

from __future__ import annotations

import math

import triton
import triton.language as tl

_GOLDEN = tl.constexpr(0x9E3779B97F4A7C15 - 2**64)
_MULTIPLIER_1 = tl.constexpr(0xBF58476D1CE4E5B9 - 2**64)
_MULTIPLIER_2 = tl.constexpr(0x94D049BB133111EB - 2**64)
UNIT = tl.constexpr(2**23 / math.log(2))  # of 1: the logarithm of base 2 as the bits of a float hold it
_SMALL = tl.constexpr(1 / 64)


@triton.jit
def _mixed(key, ids):
    """64 bits of each candidate, all but mixed. Signed arithmetic wraps as unsigned does."""
    x = (ids + 1).to(tl.uint32, bitcast=True).to(tl.int64) * _GOLDEN + key  # the product of 32 and 64 bits is cheaper
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MULTIPLIER_1
    return (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MULTIPLIER_2


@triton.jit
def bits_of_noise(key, ids):
    """The 53 bits that make the noise of each candidate: the smaller a number they are, the larger is the noise."""
    x = _mixed(key, ids)
    return ((x ^ ((x >> 31) & 0x1FFFFFFFF)) >> 11) & 0x1FFFFFFFFFFFFF


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
def reach(number, key, ids):
    """What a scaled logit in UNITs and its noise can reach together, float32, of which a maximum is to be taken.

    noise = -log(u + u^2/2 + u^3/3 + ...): three terms, of a u with 32 bits that is not above that of the noise. The
    logarithm is read from a float's exponent and mantissa, log2(1 + m) >= m. Together at most 0.2 above a noise that
    is positive, for some 30 instructions of a GPU instead of 200.
    """
    high = (_mixed(key, ids) >> 32).to(tl.int32)
    high = high ^ ((high >> 31) & 1)  # in 32 bits, which are converted four times as fast as 64
    u = high.to(tl.uint32, bitcast=True).to(tl.float32)
    terms = u * (1.0 + u * (2.0**-33 + u * (2.0**-64 / 3.0)))  # 2^32 of them
    return number - terms.to(tl.int32, bitcast=True).to(tl.float32)


@triton.jit
def reached(most):
    """What `reach` gave, as scaled logit and noise; by rounding 1e-4 less."""
    return (most + (127 + 32) * 2.0**23) * (1.0 / UNIT)
