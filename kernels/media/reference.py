"""What tokens read of media, in place of their embeddings and on top of their hidden states: the specification.

T tokens   M tokens that read an embedding   P parts of what one reads   D hidden size   E rotated pairs
"""

from __future__ import annotations

import torch

from kernels.ops import MediaTensors


def replace_rows(x_TD: torch.Tensor, media: MediaTensors | None, part: int) -> torch.Tensor:
    """y[places[m]] = rows[m, part], and y[t] = x[t] elsewhere."""
    if media is None:
        return x_TD
    return x_TD.index_copy(0, media.places_M, media.rows_MPD[:, part].to(x_TD.dtype))


def add_rows(x_TD: torch.Tensor, media: MediaTensors | None, part: int) -> torch.Tensor:
    """y[places[m]] = x[places[m]] + rows[m, part], and y[t] = x[t] elsewhere."""
    if media is None:
        return x_TD
    return x_TD.index_add(0, media.places_M, media.rows_MPD[:, part].to(x_TD.dtype))


def rope_axes_cos_sin(
    positions_3T: torch.Tensor, inv_freq_3E: torch.Tensor, scale: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the sum over three axes of position * inv_freq, times scale: [T, E] each.

    A pair that turns with one axis has a frequency of 0 on the others, so that the sum is exact. In float32, cos and
    sin in float64, as those of one axis (kernels/rope).
    """
    angle_TE = (positions_3T.float()[:, :, None] * inv_freq_3E.float()[:, None, :]).sum(0).double()
    return (angle_TE.cos() * scale).to(dtype), (angle_TE.sin() * scale).to(dtype)
