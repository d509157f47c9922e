"""What a step takes besides its forward pass where nobody waits for the device in it: on tensors alone, in its stream.

P positions that are sampled   V vocabulary   K likeliest
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from kernels.states.reference import Chosen, Gathered, Tables

Tensor = torch.Tensor


class OnDevice(NamedTuple):
    """One implementation of each."""

    stage: Callable[[Tensor, Tensor, Tables, int], None]  # see kernels.states.reference
    gather: Callable[[Tensor, Tables, Gathered, int], None]
    append: Callable[[Tensor, Chosen, Tensor, Tensor, int], None]
    pairs: Callable[[Tensor], Tensor]  # see kernels.largest.reference
    logits: Any  # kernels.logits.record.Logits
    sample: Callable[[Tensor, Tensor, tuple[Tensor, Tensor] | None, bool], Tensor]
    """(x_PV, pairs_P2, draws, cuts) -> int32 tokens_P.

    draws are wholes_P3, int64 (1 where drawn, else greedy; noise key; top_k, where V is all), and parts_P3, float64
    (temperature, top_p, log of min_p, where -inf is none); None: all are greedy. cuts: whether any has cutoffs.
    """
    weigh: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    """(x_PV, tokens_P) -> log of the sum of exponentials, float32 [P], and 1 + how many are larger, int32 [P]."""
    top: Callable[[Tensor, int], tuple[Tensor, Tensor]]
    """(x_PV, K) -> values and ids [P, K]: larger ones first, lower ids first among equals."""
