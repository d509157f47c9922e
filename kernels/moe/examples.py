"""Launches to compile; see kernels.examples."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.launch import Chip, Launch
from kernels.moe import triton as moe
from kernels.moe.reference import Experts
from kernels.quantized_rows.reference import TYPES, Kind, QuantizedRows
from kernels.shapes import Shape, tensor

_EXPERTS, _EACH = 128, 8
_TOKENS = {"decode": 1, "prefill": 4096}


def examples(shape: Shape, chip: Chip, tokens: int) -> Iterator[tuple[str, Launch]]:
    """As many experts as Qwen3-30B-A3B has, of a narrow feed-forward layer."""
    del tokens
    outputs, offsets = shape.feed_forward // 4, torch.empty(_EXPERTS + 1, dtype=torch.int32, device="meta")
    weight = tensor(shape, _EXPERTS, outputs, shape.hidden)
    for what, count in _TOKENS.items():
        rows = torch.empty(count * _EACH, dtype=torch.int32, device="meta")
        x = tensor(shape, count, shape.hidden)
        yield f"grouped, {what}", moe.plan_grouped(x, weight, offsets, rows, chip=chip)[0]
    kinds: tuple[Kind, ...] = ("int8", "fp8") if chip.capability >= 89 else ("int8",)
    for kind in kinds:
        experts = Experts(
            torch.empty(weight.shape, dtype=TYPES[kind], device="meta"),
            torch.empty(_EXPERTS, outputs, device="meta"),
        )
        for what, count in _TOKENS.items():
            rows = torch.empty(count * _EACH, dtype=torch.int32, device="meta")
            numbers = torch.empty(count, shape.hidden, dtype=TYPES[kind], device="meta")
            quantized = QuantizedRows(numbers, torch.empty(count, device="meta"))
            launch, _ = moe.plan_grouped(quantized, experts, offsets, rows, dtype=shape.dtype, chip=chip)
            yield f"grouped {kind}, {what}", launch
