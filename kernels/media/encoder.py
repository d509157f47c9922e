"""The ops that an encoder of media is written over, and how they run on tensors. V is an array, as in kernels.ops.

N patches   C size of hidden states   H heads   A head size   E = A / 2   U patches of an embedding   M = N / U
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F

from kernels import eager
from kernels.rope.reference import rope

V = TypeVar("V")
Tensor = torch.Tensor


@dataclass(slots=True, frozen=True)
class Patches(Generic[V]):
    """What one pass of an encoder reads besides the weights."""

    x_NC: V
    positions_NC: V
    cos_NE: V
    sin_NE: V
    attend: Callable[[V, V], V]
    """(qk_NXA, v_NHA) -> x_NC, of queries and keys that are turned: every patch attends to those of its frame."""


@dataclass(slots=True, frozen=True)
class EncoderOps(Generic[V]):
    """One implementation of every op."""

    add: Callable[[V, V], V]
    layer_norm: Callable[[V, Tensor, Tensor, float], V]  # x_NC, weight_C, bias_C, eps
    gelu: Callable[[V, str], V]  # x, "none" or "tanh"
    split_heads: Callable[[V, Sequence[int], int], tuple[V, ...]]  # as in kernels.ops
    rope: Callable[[V, V, V], V]  # x_NXA, cos_NE, sin_NE
    join: Callable[[V, int], V]  # x_NC, U -> x_MX, X = U * C
    stack: Callable[[Sequence[V]], V]  # P of x_MD -> x_MPD
    by_parts: Callable[[Callable[[V], V], V, int], V]  # of rows by themselves, so many at once at most


Mathematics = Callable[[EncoderOps[V], Patches[V]], V]


class Sizes(NamedTuple):
    """What is known of a pass before there is one."""

    hidden: int
    pairs: int  # that are turned in a head
    most: int  # patches; a larger pass runs as it stands
    dtype: torch.dtype


Compile = Callable[[Mathematics[Any], Sizes], Callable[[Patches[Tensor]], Tensor]]
"""Makes a pass."""


def layer_norm(x_NC: Tensor, weight_C: Tensor, bias_C: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias, over the last axis."""
    return F.layer_norm(x_NC, x_NC.shape[-1:], weight_C, bias_C, eps)


def gelu(x_NF: Tensor, approximate: str) -> Tensor:
    """x times the normal distribution's share below x; "tanh" is its approximation."""
    return F.gelu(x_NF, approximate=approximate)


def join(x_NC: Tensor, count: int) -> Tensor:
    """So many rows beside each other as one."""
    return x_NC.reshape(-1, count * x_NC.shape[1])


def stack(parts: Sequence[Tensor]) -> Tensor:
    """[M, P, D] of P parts."""
    return torch.stack(list(parts), dim=1)


def by_parts(function: Callable[[Tensor], Tensor], x_NC: Tensor, most: int) -> Tensor:
    """The function of all rows, which it takes one by one: what it needs for a moment is bounded."""
    return function(x_NC) if len(x_NC) <= most else torch.cat([function(some) for some in torch.split(x_NC, most)])


EAGER: EncoderOps[Tensor] = EncoderOps(torch.add, layer_norm, gelu, eager.split_heads, rope, join, stack, by_parts)
