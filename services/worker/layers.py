"""The weights of a decoder, ready to be used. Knows no names of checkpoints.

D hidden size   H query heads   K key/value heads   A head size   F feed-forward size   V vocabulary
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.dispatch import Linear


@dataclass(slots=True, frozen=True)
class Layer:
    """The weights of one layer; products are prepared for the device."""

    attention_norm_D: torch.Tensor
    qkv: Linear  # D -> (H + K + K) * A
    q_norm_A: torch.Tensor | None
    k_norm_A: torch.Tensor | None
    output: Linear  # H * A -> D
    mlp_norm_D: torch.Tensor
    gate_up: Linear  # D -> 2 * F
    down: Linear  # F -> D


@dataclass(slots=True, frozen=True)
class Weights:
    """All weights of a decoder."""

    embedding_VD: torch.Tensor
    layers: tuple[Layer, ...]
    final_norm_D: torch.Tensor
    head: Linear  # D -> V
    nbytes: int
