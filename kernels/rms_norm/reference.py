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


def qk_norm(
    qk_TNA: torch.Tensor, q_norm_A: torch.Tensor, k_norm_A: torch.Tensor, heads: int, eps: float
) -> torch.Tensor:
    """Every head normed: the first `heads` with the weight of queries, the others with that of keys."""
    q_THA = rms_norm(qk_TNA[:, :heads], q_norm_A, eps)
    return torch.cat((q_THA, rms_norm(qk_TNA[:, heads:], k_norm_A, eps)), dim=1)
