"""The table of ops whose mathematics run on Triton kernels.

Products, lookups, media and the ordering of candidates' keys are torch's.
"""

from __future__ import annotations

from functools import partial

import torch

from kernels import eager
from kernels.attention import triton as attention
from kernels.embedding import reference as embedding
from kernels.kv_write import triton as kv_write
from kernels.largest import triton as largest
from kernels.launch import interpreted
from kernels.media import reference as media
from kernels.native.build import Unavailable
from kernels.ops import Ops
from kernels.rms_norm import triton as rms_norm
from kernels.rope import triton as rope
from kernels.selection.triton import Selection
from kernels.silu_mul import triton as silu_mul


def triton_ops(device: str, *, deterministic: bool) -> Ops[torch.Tensor]:
    """The table. Raises Unavailable where the kernels can neither run nor be interpreted."""
    if not interpreted() and torch.device(device).type != "cuda":
        raise Unavailable(
            f"Triton kernels run on a CUDA GPU, and device is {device!r}; with TRITON_INTERPRET=1 in the environment"
            " they are interpreted on any, for tests"
        )
    linear = eager.linear(fast=False, deterministic=deterministic)
    return Ops(
        name="triton",
        level="interpreted" if interpreted() else "",
        note="",
        kv_dtype=None,
        kv_block=eager.tokens_first,
        prepare_linear=linear,
        prepare_product=linear,
        prepare_embedding=eager.table,
        compile=partial(
            eager.Eager,
            eager.turn_and_write(rope.rope, kv_write.kv_write),
            partial(attention.Attention, deterministic=deterministic),
        ),
        compile_rows=eager.compile_rows,
        embedding=embedding.embedding,
        rms_norm=rms_norm.rms_norm,
        add_rms_norm=rms_norm.add_rms_norm,
        split_heads=eager.split_heads,
        qk_norm=rms_norm.qk_norm,
        rope_cos_sin=rope.rope_cos_sin,
        rope_axes_cos_sin=rope.rope_axes_cos_sin,
        replace_rows=media.replace_rows,
        add_rows=media.add_rows,
        silu_mul=silu_mul.silu_mul,
        largest=largest.pairs,
        selection=Selection(),
        spent_s=lambda: 0.0,
    )
