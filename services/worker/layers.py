"""The weights of a decoder, ready to be used. Knows no names of checkpoints.

D hidden size   H query heads   K key/value heads   A head size   F feed-forward size   V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
