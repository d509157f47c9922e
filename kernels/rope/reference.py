"""Rotary position embedding in the half-split form: the specification.

T tokens   N heads   D head size   E = D / 2 rotated pairs: element e turns together with element e + E
"""

from __future__ import annotations

import torch


def rope_cos_sin(
    positions_T: torch.Tensor, inv_freq_E: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position * inv_freq, times scale: [T, E] each.

    The angle is a float32 product; its cos and sin are taken in float64, so that a vector unit's last bit never
    depends on where in the batch a token stands.
    """
    angle_TE = (positions_T.float()[:, None] * inv_freq_E.float()[None, :]).double()
    return (angle_TE.cos() * scale).to(dtype), (angle_TE.sin() * scale).to(dtype)


def rope(x_TND: torch.Tensor, cos_TE: torch.Tensor, sin_TE: torch.Tensor) -> torch.Tensor:
    """Turns each pair (x[e], x[e + E]) by its angle: (a cos - b sin, b cos + a sin). Shapes [T, N, D], [T, E]."""
    first, second = x_TND.chunk(2, dim=-1)
    cos, sin = cos_TE[:, None, :], sin_TE[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
