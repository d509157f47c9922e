"""The gated activation: the specification."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, silu(x) = x / (1 + exp(-x)). [T, 2F] holds gate then up; the result is [T, F]."""
    gate_TF, up_TF = gate_up_T2F.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF
