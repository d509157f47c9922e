"""Launches to compile; see kernels.examples."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.launch import Chip, Launch
from kernels.linear import triton as products
from kernels.quantized_rows.reference import TYPES, Kind, QuantizedRows
from kernels.shapes import Shape

_TOKENS = {"decode": 1, "32 tokens": 32, "64 tokens": 64, "prefill": 2048}


def examples(shape: Shape, chip: Chip, tokens: int) -> Iterator[tuple[str, Launch]]:
    """The product that goes up to the feed-forward size, for each kind that the chip has and each size of blocks."""
    del tokens
    counters = torch.empty(products.counters_for(chip, torch.device("cpu")).shape, dtype=torch.int32, device="meta")
    kinds: tuple[Kind, ...] = ("int8", "fp8") if chip.capability >= 89 else ("int8",)
    for kind in kinds:
        weight = _rows(2 * shape.feed_forward, shape.hidden, kind)
        for what, count in _TOKENS.items():
            x = _rows(count, shape.hidden, kind)
            yield f"linear {kind}, {what}", products.plan_product(x, weight, None, counters, shape.dtype, chip=chip)[0]
        x, weight = _rows(1, shape.feed_forward, kind), _rows(shape.hidden, shape.feed_forward, kind)
        launch, _ = products.plan_product(x, weight, None, counters, shape.dtype, chip=chip)
        yield f"linear {kind}, decode, split", launch


def _rows(count: int, width: int, kind: Kind) -> QuantizedRows:
    return QuantizedRows(torch.empty(count, width, dtype=TYPES[kind], device="meta"), torch.empty(count, device="meta"))
