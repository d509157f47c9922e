"""A model whose products are a GPU's quantized ones, by their references: no GPU is needed to know what they cost."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.int4 import reference as int4
from kernels.linear import reference
from kernels.linear.quantized import GROUP, Kind
from kernels.quantized_rows.reference import QuantizedRows, quantize_rows
from services.worker.models.decoder import Decoder

ROUNDED: dict[str, Kind] = {"gpu-int8": "int8", "gpu-fp8": "fp8", "gpu-int4": "int4"}
"""Modes of tests.bench.accuracy, and what `--quantize` calls them."""


class Rounded:
    """A product of quantized rows, in float32: sums of 576 numbers of 8 bits are exact in it, or nearly so."""

    def __init__(self, plain: reference.Linear, kind: Kind) -> None:
        self._kind = kind
        self._bias_O = plain.bias_O
        if kind == "int4":
            packed = int4.quantize(plain.weight_OI, GROUP)
            self.nbytes = packed.nbytes
            self._weight = QuantizedRows(packed.dequantize(), torch.ones(()))
        else:
            rows = quantize_rows(plain.weight_OI, kind)
            self.nbytes = sum(part.nbytes for part in rows)
            self._weight = QuantizedRows(rows.numbers_TI.float(), rows.scale_T)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """The product for every row of x."""
        if self._kind == "int4":
            return torch.nn.functional.linear(x_TI, self._weight.numbers_TI, self._bias_O)
        x = quantize_rows(x_TI, self._kind)
        sums_TO = x.numbers_TI.float() @ self._weight.numbers_TI.T
        y_TO = sums_TO * x.scale_T[:, None] * self._weight.scale_T
        return y_TO if self._bias_O is None else y_TO + self._bias_O


def rounded(model: Decoder, kind: Kind) -> tuple[Decoder, int]:
    """The model with every product rounded, and bytes of those, its head among them; it must run reference ops."""
    weights = model._weights
    layers = tuple(
        replace(
            layer,
            qkv=Rounded(layer.qkv, kind),
            output=Rounded(layer.output, kind),
            gate_up=Rounded(layer.gate_up, kind),
            down=Rounded(layer.down, kind),
        )
        for layer in weights.layers
    )
    head = Rounded(weights.head, kind)
    products = [head, *(each for one in layers for each in (one.qkv, one.output, one.gate_up, one.down))]
    own = replace(weights, layers=layers, head=head)
    return Decoder(model.config, own, model.ops), sum(product.nbytes for product in products)
