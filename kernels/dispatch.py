"""Which implementation of every op runs: the one switch.

"auto"           the fastest: triton on a GPU, native on a CPU that can have it, else torch
"native"         C++ (kernels/native); an error where it cannot be had
"triton"         Triton kernels (kernels/triton_ops); an error where there is no GPU, unless they are interpreted
"torch"          the fastest that torch has
"reference"      the specifications, for tests and for doubt
deterministic    whatever the choice: rows that are bit-equal whatever else is in the batch. Native ones always are
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from kernels import eager
from kernels.attention import batched, chunked
from kernels.attention import reference as attention_reference
from kernels.attention.rows import Rows
from kernels.embedding import reference as embedding_reference
from kernels.kv_write import reference as kv_write_reference
from kernels.kv_write import scatter
from kernels.largest import reference as largest_reference
from kernels.media import reference as media_reference
from kernels.native.build import Unavailable
from kernels.native.ops import NativeOptions, native_ops
from kernels.ops import Ops
from kernels.rms_norm import reference as rms_norm_reference
from kernels.rope import reference as rope_reference
from kernels.silu_mul import reference as silu_mul_reference

CHOICES = ("auto", "native", "triton", "torch", "reference")

Tensor = torch.Tensor


def choose_ops(
    choice: str = "auto",
    *,
    device: str = "cpu",
    deterministic: bool = False,
    quantize: str = "none",
    kv_dtype: torch.dtype | None = None,
    head_dim: int = 64,
    native: NativeOptions | None = None,
) -> Ops[Any]:
    """The ops of one run of the worker on a device.

    quantize is what triton ops round weights to as they are prepared; other ops are given what is quantized already.
    kv_dtype is that of native ops: float16, float32, int8, and bfloat16 where there is a matrix unit; None is bfloat16
    there and float16 elsewhere. Raises ValueError for a choice that does not exist, and
    Unavailable where "native", "triton" or an instruction set that is named cannot be had; "auto" is torch then, with a
    note that says why.
    """
    if choice not in CHOICES:
        raise ValueError(f"ops must be one of {', '.join(CHOICES)}, not {choice!r}")
    note = ""
    on_cpu = device == "cpu"
    if choice == "triton" or (choice == "auto" and not on_cpu):
        from kernels.triton_ops import triton_ops  # a third of a second that others need not wait

        try:
            return triton_ops(device, deterministic=deterministic, quantize=quantize)
        except Unavailable as error:
            if choice == "triton":
                raise
            note = str(error)
    if choice == "native" or (choice == "auto" and on_cpu):
        try:
            return native_ops(native or NativeOptions(), kv_dtype, head_dim, deterministic=deterministic)
        except Unavailable as error:
            if choice == "native" or (native is not None and native.isa != "auto"):
                raise
            note = str(error)
    return _torch_ops(fast=choice != "reference", deterministic=deterministic, note=note)


def _torch_ops(*, fast: bool, deterministic: bool, note: str) -> Ops[Tensor]:
    attention: Callable[[Rows, int | None], eager.Attend] = batched.Attention if fast else attention_reference.Attention
    kv_write = scatter.kv_write if fast else kv_write_reference.kv_write
    prepare_attention = chunked.Attention if deterministic else attention
    return Ops(
        name="torch" if fast else "reference",
        level="",
        note=note,
        kv_dtype=None,
        kv_block=eager.tokens_first,
        prepare_linear=eager.linear(fast, deterministic),
        prepare_product=eager.linear(fast, deterministic),
        prepare_embedding=eager.table,
        compile=partial(eager.Eager, eager.turn_and_write(rope_reference.rope, kv_write), prepare_attention),
        compile_rows=eager.compile_rows,
        embedding=embedding_reference.embedding,
        rms_norm=rms_norm_reference.rms_norm,
        add_rms_norm=rms_norm_reference.add_rms_norm,
        split_heads=eager.split_heads,
        qk_norm=rms_norm_reference.qk_norm,
        rope_cos_sin=rope_reference.rope_cos_sin,
        rope_axes_cos_sin=media_reference.rope_axes_cos_sin,
        replace_rows=media_reference.replace_rows,
        add_rows=media_reference.add_rows,
        silu_mul=silu_mul_reference.silu_mul,
        largest=largest_reference.pairs,
        selection=None,
        spent_s=lambda: 0.0,
    )
