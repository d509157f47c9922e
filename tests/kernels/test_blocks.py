from __future__ import annotations

import pytest
import torch

from kernels.linear import blocks, reference
from kernels.linear.blocks import Blocks

SHAPES = [(1, 32), (7, 96), (33, 576), (1000, 1536)]


def random_blocks(outputs: int, inputs: int, bits: int) -> Blocks:
    numbers = torch.randint(0, 1 << bits, (outputs, inputs), dtype=torch.uint8)
    scale = torch.randn(outputs, inputs // 32).half()
    return Blocks(numbers, scale, torch.randn(outputs, inputs // 32).half() if bits == 4 else None, bits)


def plainly(given: Blocks) -> torch.Tensor:
    scale = given.scale_OG.double().repeat_interleave(32, 1)
    if given.minimum_OG is None:
        return (given.numbers_OI.double() - 128) * scale
    return given.numbers_OI.double() * scale + given.minimum_OG.double().repeat_interleave(32, 1)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stand_for_scale_times_number_and_minimum(shape, bits):
    given = random_blocks(*shape, bits)
    assert torch.equal(given.dequantize(), plainly(given).float())
    assert given.shape == shape
    groups = shape[0] * shape[1] // 32
    assert given.nbytes == groups * (20 if bits == 4 else 34)


@pytest.mark.parametrize("bits", [4, 8])
def test_the_reference_multiplies_with_what_they_stand_for(bits):
    given, x, bias = random_blocks(5, 64, bits), torch.randn(3, 64), torch.randn(5)
    torch.testing.assert_close(reference.Linear(given, bias)(x), x @ given.dequantize().T + bias)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rounding_is_to_the_nearest_number(shape, bits):
    weight = torch.randn(shape) * torch.rand(shape[0], 1) * 10
    given = Blocks.of(weight, bits)
    off = (given.dequantize() - weight).abs().unflatten(1, (-1, 32)).amax(-1)
    # half a number, and what the rounding of the scale itself moves the outermost number by
    assert bool((off <= given.scale_OG.float() * 0.57).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounds_weights_of_16_bits_and_views(dtype):
    weight = torch.randn(64, 40).to(dtype)
    given = Blocks.of(weight.T)
    assert torch.equal(given.dequantize(), Blocks.of(weight.T.contiguous().float()).dequantize())


@pytest.mark.parametrize("size", [0.0, 1e-10, 6e-8, 1e-6, 1e-4, 0.0078, 1.0, 65504.0, 8e6])
@pytest.mark.parametrize("bits", [4, 8])
def test_tiny_and_huge_weights_keep_their_size(bits, size):
    weight = torch.linspace(-1, 1, 32)[None] * size
    if bits == 4 and size > 65504:
        with pytest.raises(ValueError, match="too large"):
            Blocks.of(weight, bits)
        return
    given = Blocks.of(weight, bits)
    step = max(2 * size / 15 if bits == 4 else size / 127, 6e-8)
    assert float((given.dequantize() - weight).abs().max()) <= step


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e8])
def test_weights_that_no_scale_holds_are_refused(bad):
    weight = torch.randn(3, 64)
    weight[1, 40] = bad
    with pytest.raises(ValueError, match="not finite, or too large"):
        Blocks.of(weight)


def test_inputs_that_fill_no_groups_are_refused():
    with pytest.raises(ValueError, match="48 inputs"):
        Blocks.of(torch.randn(2, 48))


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_taken_in_the_order_asked_for(bits):
    given, order = random_blocks(6, 64, bits), torch.tensor([5, 0, 3])
    assert torch.equal(given.rows(order).dequantize(), given.dequantize()[order])
    assert torch.equal(given.rows(slice(1, 3)).dequantize(), given.dequantize()[1:3])


@pytest.mark.parametrize("bits", [4, 8])
def test_equal_kinds_are_joined_as_they_are(bits):
    parts = [random_blocks(outputs, 64, bits) for outputs in (3, 1, 7)]
    whole = Blocks.concat(parts)
    assert whole.bits == bits
    assert torch.equal(whole.dequantize(), torch.cat([part.dequantize() for part in parts]))


def test_kinds_that_differ_are_joined_in_8_bits():
    four, eight = random_blocks(3, 64, 4), random_blocks(2, 64, 8)
    whole = Blocks.concat([four, eight])
    assert whole.bits == 8
    assert torch.equal(whole.rows(slice(3, 5)).dequantize(), eight.dequantize())
    off = (whole.rows(slice(0, 3)).dequantize() - four.dequantize()).abs().unflatten(1, (-1, 32)).amax(-1)
    assert bool((off <= whole.rows(slice(0, 3)).scale_OG.float() * 0.57).all())


def test_a_minimum_of_whole_scales_becomes_8_bits_without_loss():
    four = random_blocks(9, 64, 4)
    four = Blocks(four.numbers_OI, four.scale_OG, four.scale_OG * -8, 4)
    four.scale_OG[0, 0] = four.minimum_OG[0, 0] = 0  # a group of zeros has no scale
    eight = four.with_8_bits()
    assert eight.bits == 8
    assert torch.equal(eight.dequantize(), four.dequantize())


@pytest.mark.parametrize(
    ("numbers", "scale", "minimum", "bits"),
    [
        (torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 2).half(), None, 4),
        (torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 2).half(), torch.zeros(2, 2).half(), 8),
        (torch.zeros(2, 64, dtype=torch.int8), torch.zeros(2, 2).half(), None, 8),
        (torch.zeros(2, 48, dtype=torch.uint8), torch.zeros(2, 1).half(), None, 8),
        (torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 3).half(), None, 8),
        (torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 2), None, 8),
        (torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 2).half(), None, 6),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(numbers, scale, minimum, bits):
    with pytest.raises(ValueError, match=r"bits|numbers|scale"):
        Blocks(numbers, scale, minimum, bits)


def test_works_on_little_at_once(monkeypatch):
    weight = torch.randn(37, 64)
    whole = Blocks.of(weight)
    monkeypatch.setattr(blocks, "_AT_ONCE", 5 * 64)
    part = Blocks.of(weight)
    assert torch.equal(part.numbers_OI, whole.numbers_OI)
    assert torch.equal(part.scale_OG, whole.scale_OG)
    assert torch.equal(part.dequantize(), plainly(whole).float())
