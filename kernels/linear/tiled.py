"""Matrix product whose rows do not depend, to the last bit, on how many other rows there are.

A matrix library chooses its blocking by the number of rows, and with it the order of the sums. Here every product has
the same number of rows: the input is cut into tiles of 32, the last one padded with zeros. Outputs are padded to
whole vectors, because libraries treat a row's odd end differently from row to row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

TILE = 32
VECTOR = 16


class Linear:
    """See reference.Linear; `prepare` makes the product of one tile."""

    def __init__(
        self,
        prepare: Callable[[torch.Tensor, torch.Tensor | None], Callable[[torch.Tensor], torch.Tensor]],
        weight_OI: torch.Tensor,
        bias_O: torch.Tensor | None = None,
    ) -> None:
        self._outputs = weight_OI.shape[0]
        missing = -self._outputs % VECTOR
        if missing:
            weight_OI = F.pad(weight_OI, (0, 0, 0, missing))
            bias_O = None if bias_O is None else F.pad(bias_O, (0, missing))
        self._inner = prepare(weight_OI, bias_O)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """The product for every row of x."""
        count = x_TI.shape[0]
        padded = x_TI.new_zeros(-(-count // TILE) * TILE, x_TI.shape[1])
        padded[:count] = x_TI
        return torch.cat([self._inner(tile) for tile in torch.split(padded, TILE)])[:count, : self._outputs]
