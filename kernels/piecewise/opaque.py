"""A product that a compiler does not look into: an op of torch that calls a prepared weight by its handle.

The handle is an argument, not part of what is compiled, so that all layers share a piece. It is a tensor on the CPU
that holds a number: reading it waits for no device.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch

from kernels.quantized_rows.reference import QuantizedRows

Tensor = torch.Tensor
Product = Any
"""x_TI -> y_TO; with `multiply` where it takes rows that are quantized already (kernels.linear.quantized)."""

_products: dict[int, Product] = {}
_numbers = itertools.count()


def handle(product: Product) -> Tensor:
    """An int64 number that stands for a product for as long as the tensor lives."""
    number = next(_numbers)
    _products[number] = product
    made = torch.tensor(number)
    weakref.finalize(made, _products.pop, number)
    return made


def _run(x_TI: Tensor, which: Tensor, outputs: int) -> Tensor:
    del outputs
    made: Tensor = _products[int(which)](x_TI)
    return made.contiguous()


def _shape(x_TI: Tensor, which: Tensor, outputs: int) -> Tensor:
    del which
    return x_TI.new_empty(*x_TI.shape[:-1], outputs)


def _run_rows(numbers_TI: Tensor, scale_T: Tensor, which: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
    del outputs
    made: Tensor = _products[int(which)].multiply(QuantizedRows(numbers_TI, scale_T), dtype)
    return made


def _shape_rows(numbers_TI: Tensor, scale_T: Tensor, which: Tensor, outputs: int, dtype: torch.dtype) -> Tensor:
    del scale_T, which
    return numbers_TI.new_empty(len(numbers_TI), outputs, dtype=dtype)


_library: Any = torch.library.Library("triptych", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("product(Tensor x, Tensor which, int outputs) -> Tensor")
_library.impl("product", _run, "CompositeExplicitAutograd")
torch.library.register_fake("triptych::product", _shape, lib=_library)
_library.define("product_of_rows(Tensor numbers, Tensor scale, Tensor which, int outputs, ScalarType dtype) -> Tensor")
_library.impl("product_of_rows", _run_rows, "CompositeExplicitAutograd")
torch.library.register_fake("triptych::product_of_rows", _shape_rows, lib=_library)

product = torch.ops.triptych.product.default
"""(x_TI, handle, outputs) -> y_TO."""
product_of_rows = torch.ops.triptych.product_of_rows.default
"""(numbers_TI, scale_T, handle, outputs, dtype) -> y_TO, of rows that are quantized already."""
