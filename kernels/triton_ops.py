"""The table of ops whose mathematics run on Triton kernels.

Products of floats, lookups, media and the ordering of candidates' keys are torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from kernels import eager
from kernels.attention import triton as attention
from kernels.embedding import reference as embedding
from kernels.kv_write import turned
from kernels.largest import triton as largest
from kernels.launch import interpreted
from kernels.linear import quantized
from kernels.linear.blocks import Blocks
from kernels.logits import triton as logits
from kernels.media import reference as media
from kernels.native.build import Unavailable
from kernels.on_device import OnDevice
from kernels.ops import Linear, Ops
from kernels.rms_norm import triton as rms_norm
from kernels.rope import triton as rope
from kernels.selection import ranks, sampling
from kernels.selection.draws import Draws
from kernels.selection.triton import Selection
from kernels.silu_mul import triton as silu_mul
from kernels.states import triton as states

Tensor = torch.Tensor


def triton_ops(device: str, *, deterministic: bool, quantize: str = "none") -> Ops[torch.Tensor]:
    """The table. `quantize` is none or a kind of kernels.linear.quantized, for `prepare_linear`.

    Raises Unavailable where the kernels can neither run nor be interpreted or the GPU cannot multiply that kind, and
    ValueError for a kind that does not exist.
    """
    if not interpreted() and torch.device(device).type != "cuda":
        raise Unavailable(
            f"Triton kernels run on a CUDA GPU, and device is {device!r}; with TRITON_INTERPRET=1 in the environment"
            " they are interpreted on any, for tests"
        )
    linear = eager.linear(fast=False, deterministic=deterministic)
    if quantize != "none":
        quantized.refuse(quantize, torch.device(device))
    return Ops(
        name="triton",
        level="interpreted" if interpreted() else "",
        note="",
        kv_dtype=None,
        kv_block=eager.tokens_first,
        prepare_linear=_linears(linear, quantize, torch.device(device), deterministic=deterministic),
        prepare_product=linear,
        prepare_embedding=eager.table,
        compile=partial(
            eager.Eager,
            turned.turn_and_write,
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
        on_device=OnDevice(
            stage=states.stage,
            gather=states.gather,
            append=states.append,
            pairs=largest.pairs,
            logits=logits,
            sample=_sample,
            weigh=ranks.weigh,
            top=ranks.top,
        ),
    )


def _sample(x_PV: Tensor, pairs_P2: Tensor, draws: tuple[Tensor, Tensor] | None, cuts: bool) -> Tensor:
    return sampling.sample(x_PV, pairs_P2, None if draws is None else Draws(*draws), cuts)


def _linears(
    plain: Callable[[Tensor | Blocks, Tensor | None], Linear[Tensor]],
    quantize: str,
    device: torch.device,
    *,
    deterministic: bool,
) -> Callable[[Tensor | Blocks, Tensor | None], Linear[Tensor]]:
    """Prepares weights: blocks keep their bits, whatever is asked; floats get those that are asked for."""
    wanted = next((kind for kind in quantized.KINDS if kind == quantize), None)

    def prepare(weight_OI: Tensor | Blocks, bias_O: Tensor | None) -> Linear[Tensor]:
        kind = wanted
        if isinstance(weight_OI, Blocks):
            kind = "int4" if weight_OI.bits == 4 else "int8"
        if kind is None:
            return plain(weight_OI, bias_O)
        return quantized.prepare(weight_OI, bias_O, kind, deterministic=deterministic, device=device)

    return prepare
