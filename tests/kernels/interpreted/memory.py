"""What tests of interpreted kernels share.

Inputs are views into memory that is NaN beyond them, and every output is NaN before it is written (conftest.py).
"""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "float16": torch.float16}
# One rounding to the type, of a sum that may be added up in another order: a last bit, which is 2^-10 in float16.
TOLERANCE = {torch.float32: {"atol": 1e-6, "rtol": 1e-5}, torch.float16: {"atol": 1e-3, "rtol": 2e-3}}


def inside(x: torch.Tensor) -> torch.Tensor:
    """The same numbers in larger memory, NaN on all sides of the last two axes."""
    around = torch.full((*x.shape[:-2], x.shape[-2] + 2, x.shape[-1] + 5), torch.nan, dtype=x.dtype)
    around[..., 1:-1, : x.shape[-1]] = x
    return around[..., 1:-1, : x.shape[-1]]
