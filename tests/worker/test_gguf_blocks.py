"""Repacked formats against the values that the format's own reader gives."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type

from services.worker.gguf_blocks import blocks_of

OUTPUTS, INPUTS = 7, 512
HALVES = {  # where scales stand in a block, in bytes; the rest may be anything
    Type.Q4_0: (0,),
    Type.Q4_1: (0, 2),
    Type.Q5_0: (0,),
    Type.Q5_1: (0, 2),
    Type.Q8_0: (0,),
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
    Type.IQ4_NL: (0,),
    Type.IQ4_XS: (0,),
}
WITHOUT_LOSS = {Type.Q4_0: 4, Type.Q4_1: 4, Type.Q5_0: 8, Type.Q8_0: 8}


def stored(kind: Type, scale: float = 0.01, inputs: int = INPUTS) -> np.ndarray:
    """Random blocks of a format: every number may occur, and scales of either sign."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(int(kind))
    blocks = random.integers(0, 256, (OUTPUTS, inputs // block, size), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = (random.standard_normal((OUTPUTS, inputs // block, 1)) * scale).astype(np.float16)
        blocks[..., at : at + 2] = halves.view(np.uint8)
    return blocks.reshape(OUTPUTS, -1)


def values(raw: np.ndarray, kind: Type) -> torch.Tensor:
    return torch.from_numpy(gguf.quants.dequantize(raw, kind))


@pytest.mark.parametrize("kind", WITHOUT_LOSS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("inputs", [32, 576])
@pytest.mark.parametrize("scale", [0.01, 1e-6, 1000.0], ids=["normal", "below the normal range", "large"])
def test_without_loss(kind, inputs, scale):
    raw = stored(kind, scale, inputs)
    blocks = blocks_of(raw, kind)
    assert blocks.bits == WITHOUT_LOSS[kind]
    assert torch.equal(blocks.dequantize(), values(raw, kind))


def test_q4_0_whose_minimum_is_too_large_for_float16_takes_8_bits():
    raw = stored(Type.Q4_0)
    raw[3, :2] = np.array([60000], np.float16).view(np.uint8)  # times -8 is beyond 65504
    blocks = blocks_of(raw, Type.Q4_0)
    assert blocks.bits == 8
    assert torch.equal(blocks.dequantize(), values(raw, Type.Q4_0))


def test_q4_k_loses_what_rounding_its_scales_to_float16_loses():
    raw = stored(Type.Q4_K)
    blocks, wanted = blocks_of(raw, Type.Q4_K), values(raw, Type.Q4_K)
    assert blocks.bits == 4
    largest = blocks.scale_OG.float().abs() * 15 + blocks.minimum_OG.float().abs()
    off = (blocks.dequantize() - wanted).abs().unflatten(1, (-1, 32)).amax(-1)
    assert bool((off <= largest * 2**-11).all())


def test_q4_k_whose_scale_is_too_large_for_float16_takes_8_bits():
    raw = stored(Type.Q4_K)
    raw[3, :4] = np.array([3000, 10], np.float16).view(np.uint8)
    raw[3, 4:16] = 63  # scales of 63 times 3000
    blocks, wanted = blocks_of(raw, Type.Q4_K), values(raw, Type.Q4_K)
    assert blocks.bits == 8
    assert_nearest(blocks, wanted)


@pytest.mark.parametrize(
    "kind", [kind for kind in HALVES if kind not in (*WITHOUT_LOSS, Type.Q4_K)], ids=lambda kind: kind.name
)
def test_every_other_format_is_rounded_to_8_bits(kind, monkeypatch):
    monkeypatch.setattr("services.worker.gguf_blocks._AT_ONCE", 1000)  # several pieces
    raw = stored(kind)
    blocks = blocks_of(raw, kind)
    assert (blocks.bits, blocks.shape) == (8, (OUTPUTS, INPUTS))
    assert_nearest(blocks, values(raw, kind))


def assert_nearest(blocks, wanted):
    off = (blocks.dequantize() - wanted).abs().unflatten(1, (-1, 32)).amax(-1)
    assert bool((off <= blocks.scale_OG.float() * 0.57).all())


def test_weights_too_large_for_any_scale_stay_as_they_are():
    raw = stored(Type.Q6_K)
    raw[2, 192:208] = 127
    raw[2, 208:210] = np.array([65504], np.float16).view(np.uint8)
    assert blocks_of(raw, Type.Q6_K) is None


def test_what_is_no_quantized_matrix_of_whole_groups_stays_as_it_is():
    assert blocks_of(np.zeros((3, 64), np.float32), Type.F32) is None
    assert blocks_of(np.zeros((3, 128), np.uint8), Type.BF16) is None
    assert blocks_of(stored(Type.Q8_0)[0], Type.Q8_0) is None
