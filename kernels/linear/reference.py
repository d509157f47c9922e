"""Matrix product with a weight: the specification."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.linear.blocks import Blocks
from kernels.quantized_rows.reference import QuantizedRows


class Linear:
    """y = x weight^T + bias: [T, I] and [O, I] give [T, O]. Blocks are what they stand for, in float32."""

    def __init__(self, weight_OI: torch.Tensor | Blocks, bias_O: torch.Tensor | None = None) -> None:
        self.weight_OI = weight_OI.dequantize() if isinstance(weight_OI, Blocks) else weight_OI
        self.bias_O = bias_O

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """The product for every row of x."""
        return F.linear(x_TI, self.weight_OI, self.bias_O)


def rows_product(
    x: QuantizedRows, weight: QuantizedRows, bias_O: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """y[t, o] = (sum over i of x.numbers[t, i] * weight.numbers[o, i]) * x.scale[t] * weight.scale[o] + bias[o].

    The sum is exact for int8, as far as float64 holds it; the rest is in float32, rounded to `dtype` at last.
    """
    sums_TO = F.linear(x.numbers_TI.double(), weight.numbers_TI.double()).float()
    y_TO = sums_TO * x.scale_T[:, None] * weight.scale_T
    return (y_TO if bias_O is None else y_TO + bias_O.float()).to(dtype)
