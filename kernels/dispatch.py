"""Which implementation of every op runs: the one switch.

"reference"      the specifications, for tests and for doubt
"auto"           the fastest that the device has
deterministic    whatever the choice: rows that are bit-equal whatever else is in the batch
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from kernels.attention import batched, chunked
from kernels.attention import reference as attention_reference
from kernels.attention.rows import Rows
from kernels.embedding import reference as embedding_reference
from kernels.kv_write import reference as kv_write_reference
from kernels.kv_write import scatter
from kernels.linear import packed, tiled
from kernels.linear import reference as linear_reference
from kernels.rms_norm import reference as rms_norm_reference
from kernels.rope import reference as rope_reference
from kernels.silu_mul import reference as silu_mul_reference

CHOICES = ("auto", "reference")


Tensor = torch.Tensor

Linear = Callable[[Tensor], Tensor]
"""A prepared weight: x_TI -> y_TO."""
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""A prepared attention, called once per layer: (q_THD, k_cache_NPKD, v_cache_NPKD, scale) -> out_THD."""


@dataclass(slots=True, frozen=True)
class Ops:
    """One implementation of every op; kernels/<op>/reference.py says what each does."""

    embedding: Callable[[Tensor, Tensor], Tensor]  # ids_T, table_VD
    prepare_linear: Callable[[Tensor, Tensor | None], Linear]  # weight_OI, bias_O: once, when the weight is loaded
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]  # x_XD, weight_D, eps
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]  # x, residual, weight_D, eps
    rope_cos_sin: Callable[
        [Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor]
    ]  # positions_T, inv_freq_E, scale
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]  # x_TND, cos_TE, sin_TE
    kv_write: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]  # k_TKD, v_TKD, k_cache, v_cache, slots_T
    prepare_attention: Callable[[Rows, int | None], Attend]  # rows, window: once per step and window
    silu_mul: Callable[[Tensor], Tensor]  # gate_up_T2F


def choose_ops(choice: str = "auto", *, deterministic: bool = False) -> Ops:
    """The ops of one run of the worker. Raises ValueError for a choice that does not exist."""
    if choice not in CHOICES:
        raise ValueError(f"ops must be one of {', '.join(CHOICES)}, not {choice!r}")
    fast = choice == "auto"
    attention: Callable[[Rows, int | None], Attend] = batched.Attention if fast else attention_reference.Attention
    return Ops(
        embedding=embedding_reference.embedding,
        prepare_linear=_linear(fast, deterministic),
        rms_norm=rms_norm_reference.rms_norm,
        add_rms_norm=rms_norm_reference.add_rms_norm,
        rope_cos_sin=rope_reference.rope_cos_sin,
        rope=rope_reference.rope,
        kv_write=scatter.kv_write if fast else kv_write_reference.kv_write,
        prepare_attention=chunked.Attention if deterministic else attention,
        silu_mul=silu_mul_reference.silu_mul,
    )


def _linear(fast: bool, deterministic: bool) -> Callable[[Tensor, Tensor | None], Linear]:
    def prepare(weight_OI: Tensor, bias_O: Tensor | None) -> Linear:
        kind = packed.Linear if fast and packed.is_available(weight_OI) else linear_reference.Linear
        return kind(weight_OI, bias_O)

    return partial(tiled.Linear, prepare) if deterministic else prepare
