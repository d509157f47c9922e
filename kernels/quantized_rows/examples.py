"""Launches to compile; see kernels.examples."""

from __future__ import annotations

from collections.abc import Iterator

from kernels.launch import Chip, Launch
from kernels.quantized_rows import triton as rows
from kernels.quantized_rows.reference import Kind
from kernels.shapes import Shape, tensor

_EPS = 1e-5


def examples(shape: Shape, chip: Chip, tokens: int) -> Iterator[tuple[str, Launch]]:
    """Each kernel, for the kinds that the chip has."""
    x, weight = tensor(shape, tokens, shape.hidden), tensor(shape, shape.hidden)
    kinds: tuple[Kind, ...] = ("int8", "fp8") if chip.capability >= 89 else ("int8",)
    for kind in kinds:
        yield f"quantize_rows, {kind}", rows.plan_quantize(x, kind)[0]
        yield f"rms_norm, {kind}", rows.plan_norm(x, None, weight, _EPS, kind)[0]
        yield f"add_rms_norm, {kind}", rows.plan_norm(x, x, weight, _EPS, kind)[0]
        yield f"silu_mul, {kind}", rows.plan_silu_mul(tensor(shape, tokens, 2 * shape.feed_forward), kind)[0]
