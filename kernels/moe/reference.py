"""Products of a mixture of experts: the specification.

T tokens   K experts of each token   X = T K pairs of both   E experts   O outputs   I inputs

    pairs     0 .......... o[1] ........ o[2] = o[3] ............ X      sorted by expert, then by token
    expert    | 0          | 1           |  2: empty  | 3         |      o: offsets, on the device as all the rest
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.linear.reference import rows_product
from kernels.quantized_rows.reference import Kind, QuantizedRows, quantize_rows

Tensor = torch.Tensor


class Experts(NamedTuple):
    """The quantized weights of all experts."""

    numbers_EOI: Tensor  # int8 or float8_e4m3fn
    scale_EO: Tensor  # float32


class Sorted(NamedTuple):
    """Pairs of tokens and experts, by expert."""

    tokens_X: Tensor  # int32: the token of each pair
    offsets_E1: Tensor  # int32: where the pairs of each expert begin, and at last X
    places_TK: Tensor  # int64: where each token's pairs lie


def sort_by_expert(experts_TK: Tensor, count: int) -> Sorted:
    """Sorts by expert, of which there are `count`; nothing waits for the device."""
    order_X = torch.argsort(experts_TK.flatten(), stable=True)
    sorted_X = experts_TK.flatten()[order_X]
    bounds = torch.arange(count + 1, dtype=sorted_X.dtype, device=sorted_X.device)
    places_X = torch.empty_like(order_X)
    places_X[order_X] = torch.arange(len(order_X), device=order_X.device)
    return Sorted(
        (order_X // experts_TK.shape[1]).int(),
        torch.searchsorted(sorted_X, bounds, out_int32=True),
        places_X.view(experts_TK.shape),
    )


def grouped_product(x_YI: Tensor, weight_EOI: Tensor, offsets_E1: Tensor, rows_X: Tensor | None = None) -> Tensor:
    """y[p] = x[rows[p]] weight[e]^T for every pair p of expert e: offsets[e] <= p < offsets[e + 1].

    rows_X None: pair p reads row p. Sums in float32, rounded to the type of x.
    """
    x_XI = x_YI if rows_X is None else x_YI[rows_X.long()]
    bounds = offsets_E1.tolist()
    y_XO = x_XI.new_empty(len(x_XI), weight_EOI.shape[1])
    for expert, (first, end) in enumerate(pairwise(bounds)):
        y_XO[first:end] = F.linear(x_XI[first:end].float(), weight_EOI[expert].float()).to(x_YI.dtype)
    return y_XO


def quantize_experts(weight_EOI: Tensor, kind: Kind) -> Experts:
    """A scale for each output of each expert."""
    rows = quantize_rows(weight_EOI, kind)
    return Experts(rows.numbers_TI.view(weight_EOI.shape), rows.scale_T.view(weight_EOI.shape[:2]))


def grouped_rows_product(
    x: QuantizedRows, weight: Experts, offsets_E1: Tensor, dtype: torch.dtype, rows_X: Tensor | None = None
) -> Tensor:
    """The same of quantized rows; see kernels.linear.reference.rows_product. Rounded to `dtype` at last."""
    if rows_X is not None:
        x = QuantizedRows(x.numbers_TI.view(torch.uint8)[rows_X.long()].view(x.numbers_TI.dtype), x.scale_T[rows_X])
    bounds = offsets_E1.tolist()
    y_XO = torch.empty(len(x.scale_T), weight.scale_EO.shape[1], dtype=dtype, device=x.scale_T.device)
    for expert, (first, end) in enumerate(pairwise(bounds)):
        part = QuantizedRows(x.numbers_TI[first:end], x.scale_T[first:end])
        whole = QuantizedRows(weight.numbers_EOI[expert], weight.scale_EO[expert])
        y_XO[first:end] = rows_product(part, whole, None, dtype)
    return y_XO


def combine(y_XO: Tensor, places_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """y[t] = sum over k of weights[t, k] * y[places[t, k]], in float32, rounded to the type of y."""
    return (y_XO[places_TK].float() * weights_TK[..., None].float()).sum(1).to(y_XO.dtype)
