"""Quantized rows for the GPU: of what is there, of a norm and of the gated activation, each in one pass.

A program holds a row in registers, so that its largest is known before the first number is rounded, and neither a
norm nor an activation that only a product reads is ever written in 16 bits.

No product is fused with a sum: `values * factor` is rounded before the sum that rounds it to whole numbers, as the
reference does it, or a GPU would give other numbers than the interpreter near a half.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import Launch, interpreted, power_of_two, rows_of
from kernels.quantized_rows.reference import LEAST, TOPS, TYPES, Kind, QuantizedRows
from kernels.rms_norm.triton import normed_row

Tensor = torch.Tensor


@triton.jit
def _round_half_even(values):
    # Beyond 1.5 * 2^23 a float32 has no fraction: the sum is rounded, half to even, and taking it away is exact.
    return (values + 12582912.0) - 12582912.0


@triton.jit
def _store_row(values, at, real, row, numbers, scales, width, TOP: tl.constexpr, LEAST: tl.constexpr):
    # Quantizes one row of float32 values, whose places beyond the width are zeros.
    size = tl.abs(values)
    most = tl.max(size, 0)
    # A maximum passes over NaN, so that what is not finite is looked for by itself.
    broken = tl.max((~(size < float("inf"))).to(tl.int32), 0) > 0
    some = (most >= LEAST) & ~broken
    divisor = tl.where(some, most, 1.0)
    factor = tl.where(some, tl.div_rn(TOP, divisor), 0.0)
    scale = tl.where(some, tl.div_rn(divisor, TOP), tl.where(broken, float("nan"), 0.0))
    found = tl.where(broken, 0.0, values) * factor
    if numbers.dtype.element_ty == tl.int8:
        found = _round_half_even(found)
    tl.store(numbers + row * width + at, found.to(numbers.dtype.element_ty), mask=real)
    tl.store(scales + row, scale)


@triton.jit
def _quantize(x, numbers, scales, width, x_row, TOP: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    # One program quantizes one row.
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < width
    values = tl.load(x + row * x_row + at, mask=real, other=0.0).to(tl.float32)
    _store_row(values, at, real, row, numbers, scales, width, TOP, LEAST)


@triton.jit
def _norm(
    x,
    residual,
    weight,
    total,
    numbers,
    scales,
    width,
    x_row,
    residual_row,
    eps,
    ADD: tl.constexpr,
    TOP: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program norms and quantizes one row, and first adds the residual's row to it where there is one.
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < width
    normed = normed_row(x, residual, total, row, at, real, width, x_row, residual_row, eps, ADD)
    factor = tl.load(weight + at, mask=real, other=0.0)
    weighed = normed.to(tl.float32) * factor.to(tl.float32)
    if normed.dtype == factor.dtype:  # rounded where the norm alone rounds
        weighed = weighed.to(normed.dtype).to(tl.float32)
    _store_row(tl.where(real, weighed, 0.0), at, real, row, numbers, scales, width, TOP, LEAST)


@triton.jit
def _gate(gate_up, numbers, scales, width, gate_up_row, TOP: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr):
    # One program gives one row of the gated activation, quantized.
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < width
    gate = tl.load(gate_up + row * gate_up_row + at, mask=real, other=0.0)
    up = tl.load(gate_up + row * gate_up_row + width + at, mask=real, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    values = (active * up.to(tl.float32)).to(gate.dtype).to(tl.float32)
    _store_row(values, at, real, row, numbers, scales, width, TOP, LEAST)


def _room(rows: int, width: int, kind: Kind, device: torch.device) -> QuantizedRows:
    """Where rows go. The interpreter rounds to fp8 wrongly, without a word: there torch does it afterwards."""
    dtype = torch.float32 if kind == "fp8" and interpreted() else TYPES[kind]
    return QuantizedRows(
        torch.empty(rows, width, dtype=dtype, device=device), torch.empty(rows, dtype=torch.float32, device=device)
    )


def _done(launch: Launch, rows: QuantizedRows, kind: Kind) -> QuantizedRows:
    launch.run()
    return rows._replace(numbers_TI=rows.numbers_TI.to(TYPES[kind]))


def _constants(width: int, kind: Kind) -> tuple[dict[str, object], int]:
    """Flags and blocks, and warps for 16 elements a thread: as many loads under way as the memory wants.

    Rows beyond 8,192 get more, 32 at 16,384, which still lies in registers (kernels/README.md).
    """
    block = power_of_two(width)
    return {"TOP": TOPS[kind], "LEAST": LEAST, "BLOCK": block}, min(16, max(1, block // 512))


def plan_quantize(x_XI: Tensor, kind: Kind) -> tuple[Launch, QuantizedRows]:
    """The launch, and what it writes."""
    x_TI = rows_of(x_XI)
    count, width = x_TI.shape
    out = _room(count, width, kind, x_XI.device)
    constants, warps = _constants(width, kind)
    return Launch(_quantize, (count,), (x_TI, *out, width, x_TI.stride(0)), constants, warps, fused=False), out


def quantize_rows(x_XI: Tensor, kind: Kind) -> QuantizedRows:
    """See reference.quantize_rows."""
    return _done(*plan_quantize(x_XI, kind), kind)


def plan_norm(
    x_XD: Tensor, residual_XD: Tensor | None, weight_D: Tensor, eps: float, kind: Kind
) -> tuple[Launch, QuantizedRows, Tensor]:
    """The launch, the rows that it writes, and the sum with the residual."""
    x_TD = rows_of(x_XD)
    count, width = x_TD.shape
    residual_TD = None if residual_XD is None else rows_of(residual_XD)
    total = x_XD if residual_TD is None else torch.empty(x_XD.shape, dtype=x_XD.dtype, device=x_XD.device)
    out = _room(count, width, kind, x_XD.device)
    constants, warps = _constants(width, kind)
    given = (
        *(x_TD, residual_TD, weight_D, None if residual_TD is None else total, *out),
        *(width, x_TD.stride(0), 0 if residual_TD is None else residual_TD.stride(0), eps),
    )
    return Launch(_norm, (count,), given, {"ADD": residual_TD is not None, **constants}, warps, fused=False), out, total


def rms_norm(x_XD: Tensor, weight_D: Tensor, eps: float, kind: Kind) -> QuantizedRows:
    """See reference.rms_norm."""
    launch, out, _ = plan_norm(x_XD, None, weight_D, eps, kind)
    return _done(launch, out, kind)


def add_rms_norm(
    x_XD: Tensor, residual_XD: Tensor, weight_D: Tensor, eps: float, kind: Kind
) -> tuple[QuantizedRows, Tensor]:
    """See reference.add_rms_norm."""
    launch, out, total = plan_norm(x_XD, residual_XD, weight_D, eps, kind)
    return _done(launch, out, kind), total


def plan_silu_mul(gate_up_T2F: Tensor, kind: Kind) -> tuple[Launch, QuantizedRows]:
    """The launch, and what it writes."""
    rows = rows_of(gate_up_T2F)
    width = rows.shape[1] // 2
    out = _room(rows.shape[0], width, kind, rows.device)
    constants, warps = _constants(width, kind)
    return Launch(_gate, (rows.shape[0],), (rows, *out, width, rows.stride(0)), constants, warps, fused=False), out


def silu_mul(gate_up_T2F: Tensor, kind: Kind) -> QuantizedRows:
    """See reference.silu_mul."""
    return _done(*plan_silu_mul(gate_up_T2F, kind), kind)
