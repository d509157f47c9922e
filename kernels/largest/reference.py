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


def pairs(x_NV: torch.Tensor) -> torch.Tensor:
    """[N, 2]: the place as the bits of an int32, and the value."""
    ids, values = largest(x_NV.float())
    places_N = torch.tensor(ids, dtype=torch.int32, device=x_NV.device).view(torch.float32)
    return torch.stack((places_N, torch.tensor(values, device=x_NV.device)), dim=1)
