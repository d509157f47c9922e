"""Gumbel noise of a candidate: a pure function of (seed, position, token id).

    v = (the 53 highest bits of draw(key, token id) + 1/2) / 2^53       uniform in (0, 1)
    noise = -log(-log(1 - v))                                           from -3.6 to 37.4

The exact noise is float64, so that it is the same wherever in a tensor a candidate stands. `nearly`
gives float32 noise of a whole vocabulary, within 0.05 and fast: it finds the few candidates worth exact noise.
"""

from __future__ import annotations

import torch

from services.worker.sampling.counter import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, signed

_GOLDEN, _MULTIPLIER_1, _MULTIPLIER_2 = signed(GOLDEN), signed(MULTIPLIER_1), signed(MULTIPLIER_2)
_LARGEST_BELOW_1 = 1 - 2.0**-24


def counters(ids: torch.Tensor) -> torch.Tensor:
    """What a token id adds to the key of a position."""
    return (ids + 1) * _GOLDEN


def bits(mixed: torch.Tensor) -> torch.Tensor:
    """53 random bits from key + counter: counter.mix in int64 arithmetic. Overwrites its argument."""
    x = mixed
    x ^= (x >> 30) & ((1 << 34) - 1)
    x *= _MULTIPLIER_1
    x ^= (x >> 27) & ((1 << 37) - 1)
    x *= _MULTIPLIER_2
    x ^= (x >> 31) & ((1 << 33) - 1)
    return (x >> 11) & ((1 << 53) - 1)


def gumbel(keys: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The exact noise of candidates, float64; keys and ids in shapes that go together."""
    uniform = (bits(counters(ids) + keys).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log1p(-uniform))


def nearly(keys_N1: torch.Tensor, counters_V: torch.Tensor) -> torch.Tensor:
    """The noise of a whole vocabulary in float32, within 0.05."""
    uniform = bits(counters_V + keys_N1).float().add_(0.5).mul_(2.0**-53).clamp_(max=_LARGEST_BELOW_1)
    return uniform.neg_().log1p_().neg_().log_().neg_()
