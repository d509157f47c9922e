"""The largest of each row: the specification."""

from __future__ import annotations

import torch


def largest(x_NV: torch.Tensor) -> tuple[list[int], list[float]]:
    """Its place, the first of equals, and its value; a NaN counts as the largest."""
    on_cpu = x_NV.device.type == "cpu"  # numpy's is several times faster there
    ids: list[int] = (x_NV.numpy() if on_cpu else x_NV).argmax(-1).tolist()
    at_N1 = torch.tensor(ids, device=x_NV.device).unsqueeze(-1)
    values: list[float] = x_NV.gather(-1, at_N1).flatten().tolist()
    return ids, values
