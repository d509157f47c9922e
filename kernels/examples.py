"""Launches of every Triton kernel as models of known shapes make them, on tensors without memory: to be compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from kernels.attention.examples import examples as attention
from kernels.graphs.examples import examples as graphs
from kernels.int4.examples import examples as int4
from kernels.kv_write.examples import examples as kv_write
from kernels.largest import triton as largest
from kernels.launch import Chip, Launch
from kernels.linear.examples import examples as linear
from kernels.logits.examples import examples as logits
from kernels.moe.examples import examples as moe
from kernels.quantized_rows.examples import examples as quantized_rows
from kernels.rms_norm import triton as rms_norm
from kernels.rope import triton as rope
from kernels.selection.examples import examples as selection
from kernels.shapes import Shape, tensor
from kernels.silu_mul import triton as silu_mul
from kernels.states.examples import examples as states

ROOMS: tuple[Callable[[Shape, Chip, int], Iterator[tuple[str, Launch]]], ...] = (
    attention,
    kv_write,
    graphs,
    states,
    quantized_rows,
    linear,
    logits,
    selection,
    int4,
    moe,
)
"""The same of each room that has an examples.py."""

_EPS = 1e-5


def launches(shape: Shape, chip: Chip, tokens: int = 64) -> Iterator[tuple[str, Launch]]:
    """Each launch and what it is, of a step with some tokens, with the blocks that a GPU of this kind gets."""
    yield from _rows_of_tokens(shape, tokens)
    for room in ROOMS:
        yield from room(shape, chip, tokens)


def _rows_of_tokens(shape: Shape, tokens: int) -> Iterator[tuple[str, Launch]]:
    x, weight = tensor(shape, tokens, shape.hidden), tensor(shape, shape.hidden)
    yield "rms_norm", rms_norm.plan_norm(x, None, weight, _EPS)[0]
    yield "add_rms_norm", rms_norm.plan_norm(x, x, weight, _EPS)[0]
    qkv = tensor(shape, tokens, shape.heads + 2 * shape.kv_heads, shape.size)
    qk, _ = torch.split(qkv, [shape.heads + shape.kv_heads, shape.kv_heads], dim=1)
    head_weight = tensor(shape, shape.size)
    yield "qk_norm", rms_norm.plan_qk_norm(qk, head_weight, head_weight, shape.heads, _EPS)[0]
    positions = torch.empty(3, tokens, dtype=torch.int64, device="meta")
    frequencies = torch.empty(3, shape.size // 2, device="meta")
    for what, axes in (("rope angles", 1), ("rope angles, three axes", 3)):
        launch, cos, sin = rope.plan_angles(positions[:axes], frequencies[:axes], 1.0, shape.dtype)
        yield what, launch
    yield "rope", rope.plan_rope(qk, cos, sin)[0]
    yield "silu_mul", silu_mul.plan_silu_mul(tensor(shape, tokens, 2 * shape.feed_forward))[0]
    parts, row, _ = largest.plan_pairs(tensor(shape, tokens, shape.vocabulary))
    yield "largest, parts", parts
    yield "largest, row", row
