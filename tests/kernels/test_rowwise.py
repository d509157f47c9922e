"""The ops that look at one token at a time, each against an independent formula, and for rows that stay bit-equal."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernels.dispatch import choose_ops
from kernels.kv_write import reference as kv_write_reference
from kernels.kv_write import scatter
from kernels.rope import reference as rope_reference

OPS = choose_ops("reference")


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 2, 24), (70, 576)])
def test_rms_norm(shape):
    x, weight = torch.randn(shape) * 10, torch.randn(shape[-1])
    expected = F.rms_norm(x, shape[-1:], weight, eps=1e-5)
    torch.testing.assert_close(OPS.rms_norm(x, weight, 1e-5), expected)
    residual = torch.randn(shape)
    normed, total = OPS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, F.rms_norm(total, shape[-1:], weight, eps=1e-5))


def test_rms_norm_of_zeros_is_zero_and_takes_its_mean_in_float32():
    assert torch.equal(OPS.rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-5), torch.zeros(2, 4))
    large = torch.full((1, 4), 300.0, dtype=torch.float16)  # its square is beyond float16
    assert torch.equal(OPS.rms_norm(large, torch.ones(4, dtype=torch.float16), 1e-5), torch.ones(1, 4).half())


def test_rope_is_a_rotation_of_pairs():
    positions, frequencies = torch.tensor([0, 1, 5, 8191]), torch.rand(6)
    x = torch.randn(4, 3, 12)
    cos, sin = OPS.rope_cos_sin(positions, frequencies, 1.0, torch.float32)
    turned = rope_reference.rope(x, cos, sin).numpy()
    pairs = x[..., :6].numpy() + 1j * x[..., 6:].numpy()
    angles = (positions[:, None].float() * frequencies).double().numpy()
    expected = pairs * np.exp(1j * angles)[:, None, :]
    np.testing.assert_allclose(turned[..., :6], expected.real, atol=1e-5)
    np.testing.assert_allclose(turned[..., 6:], expected.imag, atol=1e-5)
    assert torch.equal(rope_reference.rope(x, cos, sin)[0], x[0])


def test_rope_scales_cos_and_sin():
    cos, sin = OPS.rope_cos_sin(torch.tensor([1]), torch.tensor([math.pi / 6]), 2.0, torch.float32)
    torch.testing.assert_close(torch.cat((cos, sin), 1), torch.tensor([[3**0.5, 1.0]]))


def test_silu_mul():
    gate, up = torch.randn(5, 7), torch.randn(5, 7)
    expected = gate.double() / (1 + torch.exp(-gate.double())) * up.double()
    torch.testing.assert_close(OPS.silu_mul(torch.cat((gate, up), 1)), expected.float())


def test_embedding():
    table = torch.randn(11, 3)
    assert torch.equal(OPS.embedding(torch.tensor([10, 0, 10]), table), table[[10, 0, 10]])


@pytest.mark.parametrize("write", [kv_write_reference.kv_write, scatter.kv_write])
@pytest.mark.parametrize("slots", [[0, 17, 5], [-1, 9, -1], [-1, -1, -1]])
def test_kv_write_touches_the_slots_and_nothing_else(write, slots):
    both = torch.randn(3, 4, 5)
    keys, values = both[:, :2], both[:, 2:]  # views, as they come out of one fused product
    k_cache, v_cache = torch.full((3, 8, 2, 5), torch.nan), torch.full((3, 8, 2, 5), torch.nan)
    write(keys, values, k_cache, v_cache, torch.tensor(slots))
    for new, cache in ((keys, k_cache), (values, v_cache)):
        written = {slot: token for token, slot in enumerate(slots) if slot >= 0}
        for slot in range(24):
            found = cache[slot // 8, slot % 8]
            assert torch.equal(found, new[written[slot]]) if slot in written else found.isnan().all()


def test_a_row_is_bit_equal_whatever_the_count():
    x, weight, positions = torch.randn(70, 48), torch.randn(48), torch.arange(70) * 113
    norm, gated = OPS.rms_norm(x, weight, 1e-5), OPS.silu_mul(x)
    cos, sin = OPS.rope_cos_sin(positions, torch.rand(8), 1.0, torch.float32)
    heads = x.view(70, 3, 16)
    turned = rope_reference.rope(heads, cos, sin)
    for start, end in ((0, 1), (69, 70), (3, 20), (31, 64), (1, 70)):
        part = slice(start, end)
        assert torch.equal(OPS.rms_norm(x[part].clone(), weight, 1e-5), norm[part])
        assert torch.equal(OPS.silu_mul(x[part].clone()), gated[part])
        assert torch.equal(rope_reference.rope(heads[part].clone(), cos[part], sin[part]), turned[part])


def test_cos_and_sin_do_not_depend_on_the_count():
    frequencies = torch.rand(33)
    cos, sin = OPS.rope_cos_sin(torch.arange(70), frequencies, 1.0, torch.float32)
    for position in (0, 7, 68):
        one_cos, one_sin = OPS.rope_cos_sin(torch.tensor([position]), frequencies, 1.0, torch.float32)
        assert torch.equal(one_cos[0], cos[position])
        assert torch.equal(one_sin[0], sin[position])


def test_an_unknown_choice_of_ops_is_an_error():
    with pytest.raises(ValueError, match="auto, native, triton, torch, reference"):
        choose_ops("cuda")
