"""The integer hash behind all randomness: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, with the
constants of Stafford's variant 13), used as a counter-based generator. No state: the number drawn
for (seed, position, token id) is always the same.

    key(seed, position)    = mix(mix(seed + GOLDEN) + (position + 1) * GOLDEN)
    draw(key, token id)    = mix(key + (token id + 1) * GOLDEN)          all modulo 2^64
"""

from __future__ import annotations

GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIER_1 = 0xBF58476D1CE4E5B9
MULTIPLIER_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """The finalizer of SplitMix64: a bijection of 64 bits in which each bit depends on all."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * MULTIPLIER_1) & _MASK
    value = ((value ^ (value >> 27)) * MULTIPLIER_2) & _MASK
    return value ^ (value >> 31)


def key(seed: int, position: int) -> int:
    """What all candidates of one sampled position share."""
    return mix(mix(seed + GOLDEN) + (position + 1) * GOLDEN)


def draw(position_key: int, token_id: int) -> int:
    """64 random bits of one candidate."""
    return mix(position_key + (token_id + 1) * GOLDEN)


def signed(value: int) -> int:
    """The 64 bits as a signed number, as int64 arithmetic holds them."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value
