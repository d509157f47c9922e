"""Root mean square norm of the last axis: the specification."""

from __future__ import annotations

import torch


def rms_norm(x_XD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """y = weight * x / sqrt(mean(x^2) + eps), the mean in float32 over the last axis.

    x [..., D], weight [D]. The normalized value is rounded to x's dtype before the weight multiplies it.
    """
    x32 = x_XD.float()
    scale = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return weight_D * (x32 * scale).to(x_XD.dtype)


def add_rms_norm(
    x_XD: torch.Tensor, residual_XD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(x + residual), x + residual): the norm that follows a residual connection."""
    total = x_XD + residual_XD
    return rms_norm(total, weight_D, eps), total
