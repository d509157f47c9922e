"""Launches to compile; see kernels.examples."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.int4 import triton as products
from kernels.int4.reference import SPAN, Packed
from kernels.launch import Chip, Launch
from kernels.linear.triton import counters_for
from kernels.shapes import Shape, tensor

_TOKENS = {"decode": 1, "32 tokens": 32, "64 tokens": 64, "prefill": 2048}


def examples(shape: Shape, chip: Chip, tokens: int) -> Iterator[tuple[str, Launch]]:
    """The product that goes up to the feed-forward size, for each size of blocks, and a split one that goes down."""
    del tokens
    counters = torch.empty(counters_for(chip, torch.device("cpu")).shape, dtype=torch.int32, device="meta")
    weight = _packed(2 * shape.feed_forward, shape.hidden)
    for what, count in _TOKENS.items():
        launch, _ = products.plan_product(tensor(shape, count, shape.hidden), weight, None, counters, chip=chip)
        yield f"linear int4, {what}", launch
    weight = _packed(shape.hidden, shape.feed_forward)
    launch, _ = products.plan_product(tensor(shape, 1, shape.feed_forward), weight, None, counters, chip=chip)
    yield "linear int4, decode, split", launch


def _packed(outputs: int, inputs: int, group: int = 32) -> Packed:
    spans = -(-inputs // SPAN)
    words = torch.empty(outputs, spans * (SPAN // 8), dtype=torch.int32, device="meta")
    scales = torch.empty(spans * (SPAN // group), outputs, 2, dtype=torch.float16, device="meta")
    return Packed(words, scales, inputs, group)
