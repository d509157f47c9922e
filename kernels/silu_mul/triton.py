"""The gated activation for the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import Launch, power_of_two, rows_of

_BLOCK = 1024
"""Outputs of one program: 8 for each thread of four warps, 16 bytes of each 16-bit input."""


@triton.jit
def _gate(gate_up, out, width, gate_up_row, BLOCK: tl.constexpr):
    # One program gives BLOCK outputs of one row.
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = at < width
    gate = tl.load(gate_up + row * gate_up_row + at, mask=real, other=0.0)
    up = tl.load(gate_up + row * gate_up_row + width + at, mask=real, other=0.0)
    wide = gate.to(tl.float32)
    # The activation is rounded before it multiplies, as the specification says.
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(out + row * width + at, (active * up.to(tl.float32)).to(out.dtype.element_ty), mask=real)


def plan_silu_mul(gate_up_T2F: torch.Tensor) -> tuple[Launch, torch.Tensor]:
    """The launch, and what it writes."""
    rows = rows_of(gate_up_T2F)
    width = rows.shape[1] // 2
    out = torch.empty((*gate_up_T2F.shape[:-1], width), dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    block = min(_BLOCK, power_of_two(width))
    grid = (rows.shape[0], -(-width // block))
    return Launch(_gate, grid, (rows, out, width, rows.stride(0)), {"BLOCK": block}), out


def silu_mul(gate_up_T2F: torch.Tensor) -> torch.Tensor:
    """See reference.silu_mul."""
    launch, out = plan_silu_mul(gate_up_T2F)
    launch.run()
    return out
