"""Rows of numbers of 8 bits with a scale for each row: the specification.

    x[t, i] is about scale[t] * numbers[t, i]       int8: numbers from -127 to 127      fp8: e4m3, from -448 to 448

Activations are kept so for a product, a scale for each token; weights too, a scale for each output.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from kernels.rms_norm import reference as norms
from kernels.silu_mul import reference as gate

Tensor = torch.Tensor
Kind = Literal["int8", "fp8"]

TYPES: dict[Kind, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
TOPS: dict[Kind, float] = {"int8": 127.0, "fp8": 448.0}
"""The largest number of each kind, which stands for a row's largest."""
LEAST = 1e-30
"""A row whose largest is smaller is kept as zeros: its numbers divided by its scale would be infinite."""


class QuantizedRows(NamedTuple):
    """Some rows; their leading axes are one axis T."""

    numbers_TI: Tensor  # int8 or float8_e4m3fn
    scale_T: Tensor  # float32

    def dequantize(self) -> Tensor:
        """What they stand for, in float32."""
        return self.numbers_TI.float() * self.scale_T[:, None]


def quantize_rows(x_XI: Tensor, kind: Kind) -> QuantizedRows:
    """Rounds each row to the nearest numbers, ties to even; the row's largest magnitude is the largest number.

    A row that is not finite throughout becomes zeros with a scale of NaN, so that what is made of it is NaN too.
    """
    x_TI = x_XI.reshape(-1, x_XI.shape[-1]).float()
    most_T = x_TI.abs().amax(1) if x_TI.shape[1] else x_TI.new_zeros(len(x_TI))
    finite_T = most_T < torch.inf
    some_T = finite_T & (most_T >= LEAST)
    factor_T = torch.where(some_T, TOPS[kind] / most_T, 0.0)
    numbers_TI = torch.where(finite_T[:, None], x_TI, 0.0) * factor_T[:, None]
    if kind == "int8":
        numbers_TI = numbers_TI.round()
    scale_T = torch.where(finite_T, torch.where(some_T, most_T / TOPS[kind], 0.0), torch.nan)
    return QuantizedRows(numbers_TI.to(TYPES[kind]), scale_T)


def rms_norm(x_XD: Tensor, weight_D: Tensor, eps: float, kind: Kind) -> QuantizedRows:
    """The norm, rounded to its type as it is alone, then quantized."""
    return quantize_rows(norms.rms_norm(x_XD, weight_D, eps), kind)


def add_rms_norm(
    x_XD: Tensor, residual_XD: Tensor, weight_D: Tensor, eps: float, kind: Kind
) -> tuple[QuantizedRows, Tensor]:
    """(the norm of the sum, quantized; the sum)."""
    normed, total = norms.add_rms_norm(x_XD, residual_XD, weight_D, eps)
    return quantize_rows(normed, kind), total


def silu_mul(gate_up_T2F: Tensor, kind: Kind) -> QuantizedRows:
    """The gated activation, rounded to its type as it is alone, then quantized."""
    return quantize_rows(gate.silu_mul(gate_up_T2F), kind)
