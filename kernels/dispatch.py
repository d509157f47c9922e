"""Which implementation of every op runs: the one switch.

"auto"           the fastest: native on a CPU that can have it, else torch
"native"         C++ (kernels/native); an error where it cannot be had
"torch"          the fastest that torch has
"reference"      the specifications, for tests and for doubt
deterministic    whatever the choice: rows that are bit-equal whatever else is in the batch. Native ones always are
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from kernels.attention import batched, chunked
from kernels.attention import reference as attention_reference
from kernels.attention.rows import Rows
from kernels.embedding import reference as embedding_reference
from kernels.kv_write import reference as kv_write_reference
from kernels.kv_write import scatter
from kernels.largest import reference as largest_reference
from kernels.linear import packed, tiled
from kernels.linear import reference as linear_reference
from kernels.linear.blocks import Blocks
from kernels.media import reference as media_reference
from kernels.native.build import Unavailable
from kernels.native.ops import NativeOptions, native_ops
from kernels.ops import Attention, Linear, Ops, Step, StepTensors
from kernels.rms_norm import reference as rms_norm_reference
from kernels.rope import reference as rope_reference
from kernels.silu_mul import reference as silu_mul_reference

CHOICES = ("auto", "native", "torch", "reference")

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""A prepared attention, called once per layer: (q_THD, k_cache_NPKD, v_cache_NPKD, scale) -> out_THD."""


def choose_ops(
    choice: str = "auto",
    *,
    deterministic: bool = False,
    kv_dtype: torch.dtype = torch.float16,
    head_dim: int = 64,
    native: NativeOptions | None = None,
) -> Ops[Any]:
    """The ops of one run of the worker on a CPU.

    kv_dtype is that of native ops: float16, float32 or int8. Raises ValueError for a choice that does not exist, and
    Unavailable where "native" or an instruction set that is named cannot be had; "auto" is torch then, with a note that
    says why.
    """
    if choice not in CHOICES:
        raise ValueError(f"ops must be one of {', '.join(CHOICES)}, not {choice!r}")
    note = ""
    if choice in ("auto", "native"):
        try:
            return native_ops(native or NativeOptions(), kv_dtype, head_dim)
        except Unavailable as error:
            if choice == "native" or (native is not None and native.isa != "auto"):
                raise
            note = str(error)
    return _torch_ops(fast=choice != "reference", deterministic=deterministic, note=note)


def _torch_ops(*, fast: bool, deterministic: bool, note: str) -> Ops[Tensor]:
    attention: Callable[[Rows, int | None], Attend] = batched.Attention if fast else attention_reference.Attention
    kv_write = scatter.kv_write if fast else kv_write_reference.kv_write
    prepare_attention = chunked.Attention if deterministic else attention
    return Ops(
        name="torch" if fast else "reference",
        level="",
        note=note,
        kv_dtype=None,
        kv_block=lambda block_size, heads, head_dim: (block_size, heads, head_dim),
        prepare_linear=_linear(fast, deterministic),
        prepare_product=_linear(fast, deterministic),
        prepare_embedding=_embedding,
        compile=partial(_Eager, kv_write, prepare_attention),
        compile_rows=_compile_rows,
        embedding=embedding_reference.embedding,
        rms_norm=rms_norm_reference.rms_norm,
        add_rms_norm=rms_norm_reference.add_rms_norm,
        split_heads=_split_heads,
        qk_norm=_qk_norm,
        rope_cos_sin=rope_reference.rope_cos_sin,
        rope_axes_cos_sin=media_reference.rope_axes_cos_sin,
        rope=rope_reference.rope,
        replace_rows=media_reference.replace_rows,
        add_rows=media_reference.add_rows,
        silu_mul=silu_mul_reference.silu_mul,
        largest=largest_reference.pairs,
        selection=None,
        spent_s=lambda: 0.0,
    )


def _linear(fast: bool, deterministic: bool) -> Callable[[Tensor | Blocks, Tensor | None], Linear[Tensor]]:
    def prepare(weight_OI: Tensor, bias_O: Tensor | None) -> Linear[Tensor]:
        kind = packed.Linear if fast and packed.is_available(weight_OI) else linear_reference.Linear
        return kind(weight_OI, bias_O)

    prepare_plain = partial(tiled.Linear, prepare) if deterministic else prepare
    return lambda weight_OI, bias_O: prepare_plain(_plain(weight_OI), bias_O)


def _plain(weight: Tensor | Blocks) -> Tensor:
    return weight.dequantize() if isinstance(weight, Blocks) else weight


def _embedding(table_VD: Tensor | Blocks, head: Linear[Tensor] | None) -> Tensor:
    del head  # it keeps its weight in a layout of its own
    return _plain(table_VD)


def _split_heads(x: Tensor, counts: Sequence[int], head_dim: int) -> tuple[Tensor, ...]:
    x_TNA = torch.unflatten(x, 1, (-1, head_dim)) if x.dim() == 2 else x
    return tuple(torch.split(x_TNA, list(counts), dim=1))


def _qk_norm(qk_TNA: Tensor, q_norm_A: Tensor, k_norm_A: Tensor, heads: int, eps: float) -> Tensor:
    q_THA = rms_norm_reference.rms_norm(qk_TNA[:, :heads], q_norm_A, eps)
    return torch.cat((q_THA, rms_norm_reference.rms_norm(qk_TNA[:, heads:], k_norm_A, eps)), dim=1)


class _Eager:
    """Tensors need no compiling: each step goes through the mathematics; its attention is prepared once per window."""

    listing = ""

    def __init__(
        self,
        kv_write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None],
        prepare_attention: Callable[[Rows, int | None], Attend],
        mathematics: Callable[[Step[Tensor]], Tensor],
    ) -> None:
        self._kv_write = kv_write
        self._prepare_attention = prepare_attention
        self._mathematics = mathematics

    def __call__(self, given: StepTensors) -> Tensor:
        prepared: dict[int | None, Attend] = {}

        def attend(how: Attention, q_THA: Tensor, k_TKA: Tensor, v_TKA: Tensor) -> Tensor:
            keys, values = given.cache[how.layer]
            self._kv_write(k_TKA, v_TKA, keys, values, given.slots_T)
            if how.window not in prepared:
                prepared[how.window] = self._prepare_attention(given.rows, how.window)
            return prepared[how.window](q_THA, keys, values, how.scale).flatten(1)

        media = given.media
        positions_3T = given.positions_T.expand(3, -1) if media is None else media.positions_3T
        return self._mathematics(Step(given.ids_T, given.positions_T, positions_3T, media, attend))


def _compile_rows(mathematics: Callable[[Tensor], Tensor], width: int) -> Callable[[Tensor], Tensor]:
    del width
    return mathematics
