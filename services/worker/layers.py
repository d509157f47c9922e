"""The weights of a decoder and of an encoder of media, ready to be used. Knows no names of checkpoints.

D hidden size   H query heads   K key/value heads   A head size   F feed-forward size   V vocabulary
C size of the encoder's hidden states   U patches of an embedding   S learned positions of a side   B values of a patch
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from kernels.ops import Linear


@dataclass(slots=True, frozen=True)
class Layer:
    """The weights of one layer; products are prepared for the device."""

    attention_norm_D: torch.Tensor
    qkv: Linear[Any]  # D -> (H + K + K) * A
    q_norm_A: torch.Tensor | None
    k_norm_A: torch.Tensor | None
    output: Linear[Any]  # H * A -> D
    mlp_norm_D: torch.Tensor
    gate_up: Linear[Any]  # D -> 2 * F
    down: Linear[Any]  # F -> D


@dataclass(slots=True, frozen=True)
class Weights:
    """All weights of a decoder."""

    embedding: Any  # a prepared table [V, D]
    layers: tuple[Layer, ...]
    final_norm_D: torch.Tensor
    head: Linear[Any]  # D -> V
    memory: dict[str, int]  # bytes by the type that weights are kept in: int4, int8, float16, bfloat16, float32
    dtype: torch.dtype  # that a step computes in
    device: torch.device

    @property
    def nbytes(self) -> int:
        """All of them."""
        return sum(self.memory.values())


class LayerNorm(NamedTuple):
    """What a normed vector is multiplied with, and what is added."""

    weight_X: torch.Tensor
    bias_X: torch.Tensor


@dataclass(slots=True, frozen=True)
class VisionBlock:
    """One block of the encoder."""

    attention_norm: LayerNorm
    qkv: Linear[torch.Tensor]  # C -> 3 * C
    output: Linear[torch.Tensor]  # C -> C
    mlp_norm: LayerNorm
    up: Linear[torch.Tensor]
    down: Linear[torch.Tensor]


@dataclass(slots=True, frozen=True)
class Merger:
    """U patches into one vector of the decoder."""

    norm: LayerNorm  # of C each; of U * C where they are joined first
    up: Linear[torch.Tensor]  # U * C -> U * C
    down: Linear[torch.Tensor]  # U * C -> D


@dataclass(slots=True, frozen=True)
class VisionWeights:
    """All weights of an encoder."""

    patch: Linear[torch.Tensor]  # B -> C
    positions_SSC: torch.Tensor
    blocks: tuple[VisionBlock, ...]
    merger: Merger
    deepstack: tuple[Merger, ...]
    memory: dict[str, int]  # bytes by the type that weights are kept in
    dtype: torch.dtype
    device: torch.device

    @property
    def nbytes(self) -> int:
        """All of them."""
        return sum(self.memory.values())
