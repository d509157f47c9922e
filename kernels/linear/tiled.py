"""Matrix product whose rows do not depend, to the last bit, on how many other rows there are.

A matrix library chooses its blocking by the number of rows, and with it the order of the sums. Here every product has
the same number of rows: the input is cut into tiles of 32, the last one padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

TILE = 32


class Linear:
    """See reference.Linear; `inner` multiplies one tile."""

    def __init__(self, inner: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._inner = inner

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """The product for every row of x."""
        count = x_TI.shape[0]
        padded = x_TI.new_zeros(-(-count // TILE) * TILE, x_TI.shape[1])
        padded[:count] = x_TI
        return torch.cat([self._inner(tile) for tile in padded.split(TILE)])[:count]
