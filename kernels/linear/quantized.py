"""Matrix product with a quantized weight on Triton kernels.

int8   W8A8: a scale for each output and for each token, sums in int32
fp8    W8A8: the same in e4m3, sums in float32; GPUs from compute capability 8.9 on
int4   W4A16: numbers of 4 bits in groups of inputs, dequantized where they are multiplied (kernels/int4)
"""

from __future__ import annotations

from typing import Literal

import torch

from kernels.int4 import reference as int4
from kernels.int4 import triton as int4_products
from kernels.launch import Chip, Launch, chip_of, interpreted
from kernels.linear import triton as products
from kernels.linear.blocks import Blocks
from kernels.native.build import Unavailable
from kernels.quantized_rows import reference
from kernels.quantized_rows.reference import QuantizedRows
from kernels.quantized_rows.triton import quantize_rows

Tensor = torch.Tensor
Kind = Literal["int8", "fp8", "int4"]
KINDS: tuple[Kind, ...] = ("int8", "fp8", "int4")
_FP8_FROM = 89
_AT_ONCE = 4096
GROUP = 32
"""Inputs of a group of 4 bits: nothing is calibrated here, and larger ones lose more (kernels/README.md)."""


class RowsLinear:
    """See reference.Linear: rows are quantized, then multiplied. `multiply` takes rows that are quantized already."""

    def __init__(
        self, weight_OI: Tensor, bias_O: Tensor | None, kind: reference.Kind, *, deterministic: bool = False
    ) -> None:
        self.rows: reference.Kind = kind
        """The kind of rows that `multiply` takes."""
        self._chip = chip_of(weight_OI.device)
        self._weight = _quantize(weight_OI, kind)
        self._bias_O = bias_O
        self._deterministic = deterministic
        self._counters = products.counters_for(self._chip, weight_OI.device)

    @property
    def weight(self) -> QuantizedRows:
        """Numbers [O, I], and a scale for each output."""
        return self._weight

    @property
    def bias(self) -> Tensor | None:
        """[O]; None where there is none."""
        return self._bias_O

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and its scales."""
        return sum(part.nbytes for part in self._weight)

    def __call__(self, x_TI: Tensor) -> Tensor:
        """The product for every row of x, in the type of x."""
        return self.multiply(quantize_rows(x_TI, self.rows), x_TI.dtype)

    def multiply(self, x: QuantizedRows, dtype: torch.dtype) -> Tensor:
        """The product of quantized rows, in that type."""
        launch, y_TO = self.plan(x, dtype)
        launch.run()
        return y_TO

    def plan(self, x: QuantizedRows, dtype: torch.dtype) -> tuple[Launch, Tensor]:
        """The launch, and what it writes."""
        return products.plan_product(
            x, self._weight, self._bias_O, self._counters, dtype, deterministic=self._deterministic, chip=self._chip
        )


class Int4Linear:
    """See reference.Linear. It reads floats: `rows` is None."""

    rows = None

    def __init__(self, weight: int4.Packed, bias_O: Tensor | None, *, deterministic: bool = False) -> None:
        self._chip = chip_of(weight.words_OW.device)
        self._weight = weight
        self._bias_O = bias_O
        self._deterministic = deterministic
        self._counters = products.counters_for(self._chip, weight.words_OW.device)

    @property
    def weight(self) -> int4.Packed:
        """The weight as it is kept."""
        return self._weight

    @property
    def bias(self) -> Tensor | None:
        """[O]; None where there is none."""
        return self._bias_O

    @property
    def nbytes(self) -> int:
        """Bytes of the weight and its scales."""
        return self._weight.nbytes

    def __call__(self, x_TI: Tensor) -> Tensor:
        """The product for every row of x, in the type of x."""
        launch, y_TO = self.plan(x_TI)
        launch.run()
        return y_TO

    def plan(self, x_TI: Tensor) -> tuple[Launch, Tensor]:
        """The launch, and what it writes."""
        return int4_products.plan_product(
            x_TI, self._weight, self._bias_O, self._counters, deterministic=self._deterministic, chip=self._chip
        )


Linear = RowsLinear | Int4Linear


def refuse(kind: str, device: torch.device) -> None:
    """Raises ValueError for a kind that does not exist, and Unavailable for one that this GPU cannot multiply."""
    if kind not in KINDS:
        raise ValueError(f"quantized products are one of {', '.join(KINDS)}, not {kind!r}")
    if kind == "fp8" and device.type == "cuda" and not interpreted():
        refuse_fp8(chip_of(device))


def refuse_fp8(chip: Chip) -> None:
    """Raises Unavailable for a GPU without products of fp8."""
    if chip.capability < _FP8_FROM:
        found, needed = (f"{number // 10}.{number % 10}" for number in (chip.capability, _FP8_FROM))
        raise Unavailable(
            f"products of fp8 need a GPU of compute capability {needed} or more, and this one has {found}: int8 has"
            " the same size"
        )


def prepare(
    weight_OI: Tensor | Blocks,
    bias_O: Tensor | None,
    kind: Kind,
    *,
    deterministic: bool = False,
    device: torch.device | None = None,
) -> Linear:
    """A weight, ready to be multiplied with. Blocks of 4 bits stay what they are as int4, others are dequantized first.

    It is kept on `device`; None: where it is. Raises ValueError for a kind that does not exist, and for a weight that
    is not finite; Unavailable for a kind that the GPU cannot multiply.
    """
    device = device or (weight_OI.numbers_OI if isinstance(weight_OI, Blocks) else weight_OI).device
    refuse(kind, device)
    if kind == "int4" and isinstance(weight_OI, Blocks) and weight_OI.bits == 4:
        on_device = Blocks(
            weight_OI.numbers_OI.to(device), weight_OI.scale_OG.to(device), _moved(weight_OI.minimum_OG, device), 4
        )
        return Int4Linear(int4.pack_blocks(on_device), bias_O, deterministic=deterministic)
    floats_OI = (weight_OI.dequantize() if isinstance(weight_OI, Blocks) else weight_OI).to(device)
    if kind == "int4":
        return Int4Linear(int4.quantize(floats_OI, GROUP), bias_O, deterministic=deterministic)
    linear = RowsLinear(floats_OI, bias_O, kind, deterministic=deterministic)
    if not bool(linear.weight.scale_T.isfinite().all()):
        raise ValueError("some weights are not finite")
    return linear


def _quantize(weight_OI: Tensor, kind: reference.Kind) -> QuantizedRows:
    """Part by part: what is rounded is float32 for a moment, 2 GB of a head of 128 k."""
    numbers_OI = torch.empty(weight_OI.shape, dtype=reference.TYPES[kind], device=weight_OI.device)
    scale_O = torch.empty(len(weight_OI), device=weight_OI.device)
    for first in range(0, len(weight_OI), _AT_ONCE):
        part = slice(first, first + _AT_ONCE)
        numbers_OI[part], scale_O[part] = reference.quantize_rows(weight_OI[part], kind)
    return QuantizedRows(numbers_OI, scale_O)


def _moved(part: Tensor | None, device: torch.device) -> Tensor | None:
    return None if part is None else part.to(device)
