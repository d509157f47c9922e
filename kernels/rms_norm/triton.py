"""Root mean square norms for the GPU: of rows, of a sum with the residual, and of the heads of queries and keys.

Each row is read once and stays in registers, so that a norm costs the memory traffic of its input and output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import Launch, power_of_two, rows_of

_HEADS_BLOCK = 2048
"""Elements of one program over heads: 16 for each thread of four warps."""


@triton.jit
def normed_row(x, residual, total, row, at, real, width, x_row, residual_row, eps, ADD: tl.constexpr):
    """One row divided by its root mean square, in its own type; first its residual is added and the sum stored."""
    values = tl.load(x + row * x_row + at, mask=real, other=0.0)
    if ADD:
        added = values.to(tl.float32) + tl.load(residual + row * residual_row + at, mask=real, other=0.0).to(tl.float32)
        values = added.to(total.dtype.element_ty)
        tl.store(total + row * width + at, values, mask=real)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    # Rounded before the weight multiplies it, as the specification says.
    return (wide * scale).to(values.dtype)


@triton.jit
def _norm_rows(
    x,
    residual,
    weight,
    out,
    total,
    width,
    x_row,
    residual_row,
    eps,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # One program norms one row, and first adds the residual's row to it where there is one.
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    real = at < width
    normed = normed_row(x, residual, total, row, at, real, width, x_row, residual_row, eps, ADD).to(tl.float32)
    factor = tl.load(weight + at, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (factor * normed).to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["count"])
def _norm_heads(
    x,
    q_weight,
    k_weight,
    out,
    count,
    total_heads,
    q_heads,
    x_token,
    x_head,
    eps,
    SIZE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
):
    # One program norms BLOCK_R heads of all tokens' heads one after another, with the weight of their kind.
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    token, head = row // total_heads, row % total_heads
    at = tl.arange(0, BLOCK_A)
    real = (row < count)[:, None] & (at < SIZE)[None, :]
    values = tl.load(x + token[:, None] * x_token + head[:, None] * x_head + at[None, :], mask=real, other=0.0)
    wide = values.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / SIZE + eps)
    normed = (wide * scale[:, None]).to(values.dtype).to(tl.float32)
    q_factor = tl.load(q_weight + at, mask=at < SIZE, other=0.0).to(tl.float32)
    k_factor = tl.load(k_weight + at, mask=at < SIZE, other=0.0).to(tl.float32)
    factor = tl.where((head < q_heads)[:, None], q_factor[None, :], k_factor[None, :])
    tl.store(out + row[:, None] * SIZE + at[None, :], (factor * normed).to(out.dtype.element_ty), mask=real)


def plan_norm(
    x_XD: torch.Tensor, residual_XD: torch.Tensor | None, weight_D: torch.Tensor, eps: float
) -> tuple[Launch, torch.Tensor, torch.Tensor]:
    """The launch, what it norms into, and the sum with the residual."""
    x_RD = rows_of(x_XD)
    count, width = x_RD.shape
    residual_RD = None if residual_XD is None else rows_of(residual_XD)
    out = torch.empty(x_XD.shape, dtype=torch.promote_types(x_XD.dtype, weight_D.dtype), device=x_XD.device)
    total = x_XD if residual_RD is None else torch.empty(x_XD.shape, dtype=x_XD.dtype, device=x_XD.device)
    block = power_of_two(width)
    given = (
        x_RD,
        residual_RD,
        weight_D,
        out,
        None if residual_RD is None else total,
        width,
        x_RD.stride(0),
        0 if residual_RD is None else residual_RD.stride(0),
        eps,
    )
    # 16 elements a thread: enough loads under way for the memory, few enough that a row needs no spilling.
    warps = min(16, max(1, block // 512))
    return Launch(_norm_rows, (count,), given, {"ADD": residual_RD is not None, "BLOCK": block}, warps), out, total


def rms_norm(x_XD: torch.Tensor, weight_D: torch.Tensor, eps: float) -> torch.Tensor:
    """See reference.rms_norm."""
    launch, out, _ = plan_norm(x_XD, None, weight_D, eps)
    launch.run()
    return out


def add_rms_norm(
    x_XD: torch.Tensor, residual_XD: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See reference.add_rms_norm."""
    launch, out, total = plan_norm(x_XD, residual_XD, weight_D, eps)
    launch.run()
    return out, total


def plan_qk_norm(
    qk_TNA: torch.Tensor, q_norm_A: torch.Tensor, k_norm_A: torch.Tensor, heads: int, eps: float
) -> tuple[Launch, torch.Tensor]:
    """The launch, and what it norms into."""
    if qk_TNA.stride(2) != 1:
        qk_TNA = qk_TNA.contiguous()
    tokens, total_heads, size = qk_TNA.shape
    out = torch.empty(qk_TNA.shape, dtype=torch.promote_types(qk_TNA.dtype, q_norm_A.dtype), device=qk_TNA.device)
    block = power_of_two(size)
    rows = max(1, _HEADS_BLOCK // block)
    count = tokens * total_heads
    given = (qk_TNA, q_norm_A, k_norm_A, out, count, total_heads, heads, *qk_TNA.stride()[:2], eps)
    blocks = {"SIZE": size, "BLOCK_R": rows, "BLOCK_A": block}
    return Launch(_norm_heads, (-(-count // rows),), given, blocks), out


def qk_norm(
    qk_TNA: torch.Tensor, q_norm_A: torch.Tensor, k_norm_A: torch.Tensor, heads: int, eps: float
) -> torch.Tensor:
    """The norm of every head: the first `heads` are queries and take q_norm, the others take k_norm."""
    launch, out = plan_qk_norm(qk_TNA, q_norm_A, k_norm_A, heads, eps)
    launch.run()
    return out
