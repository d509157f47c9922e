"""Frequencies of the rotary embedding, by the kinds that checkpoints name."""

from __future__ import annotations

import math

import torch

from services.worker.models.config import RopeConfig


def frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """(inv_freq [head_dim / 2], the factor on cos and sin): angle = position * inv_freq."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, inv_freq, head_dim)
    return inv_freq, 1.0


def by_axis(inv_freq_E: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """inv_freq [3, E]: each pair has its frequency on its axis, and 0 on the others."""
    axis_3E = torch.arange(3)[:, None] == torch.tensor(axes)
    return inv_freq_E * axis_3E


def _llama3(rope: RopeConfig, inv_freq: torch.Tensor) -> torch.Tensor:
    """Short waves stay, long ones are stretched by the factor, those between go over smoothly."""
    turns = rope.original_max_len * inv_freq / (2 * math.pi)
    smooth = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq


def _yarn(rope: RopeConfig, inv_freq: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, float]:
    """The same idea with a ramp over the index of the pair instead of over the wave length."""

    def pair_that_turns(turns: float) -> float:
        return head_dim * math.log(rope.original_max_len / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp needs some width
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    scale = rope.attention_factor
    if scale is None:
        scale = 1.0 if rope.factor <= 1 else 0.1 * math.log(rope.factor) + 1.0
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp), scale
