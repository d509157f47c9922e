"""Matrix product with a weight: the specification."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.linear.blocks import Blocks


class Linear:
    """y = x weight^T + bias: [T, I] and [O, I] give [T, O]. Blocks are what they stand for, in float32."""

    def __init__(self, weight_OI: torch.Tensor | Blocks, bias_O: torch.Tensor | None = None) -> None:
        self.weight_OI = weight_OI.dequantize() if isinstance(weight_OI, Blocks) else weight_OI
        self.bias_O = bias_O

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """The product for every row of x."""
        return F.linear(x_TI, self.weight_OI, self.bias_O)
