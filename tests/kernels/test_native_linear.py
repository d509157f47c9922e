from __future__ import annotations

import pytest
import torch

from kernels.linear.blocks import Blocks
from kernels.native import library as c
from tests.kernels.native import LEVELS, expect_equal_rows, largest_product, load, product

KINDS = ("f32", "f16", "bf16", "q8", "q4")
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
COUNTS = (1, 2, 5, 6, 13, 257)
BYTES = (c.Inputs.BYTES, c.Inputs.MIXED)
"""What makes bytes of the tokens that are of no prompt."""


def make(library, kind, outputs, inputs, bias=None):
    """A packed weight, and the weight that it stands for."""
    if kind in DTYPES:
        weight = torch.randn(outputs, inputs).to(DTYPES[kind])
        return c.PackedWeight(library, weight, bias), weight.double()
    bits = 4 if kind == "q4" else 8
    numbers = torch.randint(0, 2**bits, (outputs, inputs), dtype=torch.uint8)
    scale = (torch.rand(outputs, inputs // 32) * 0.1 + 0.01).half()
    blocks = Blocks(numbers, scale, (-torch.rand(outputs, inputs // 32)).half() if bits == 4 else None, bits)
    return c.PackedWeight(library, blocks, bias), blocks.dequantize().double()


def whole_numbers(count, inputs):
    """Inputs that bytes and words hold without loss: every group has its largest, 127."""
    x = torch.randint(-127, 128, (count, inputs // 32, 32)).float()
    x[:, :, 5] = 127.0
    return x.reshape(count, inputs)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_is_a_matrix_product(level, kind):
    library = load(level)
    shapes = [(1, 32), (16, 64), (33, 96), (100, 288)]
    for outputs, inputs in shapes if kind[0] == "q" else [*shapes, (7, 5), (65, 1), (130, 77)]:
        bias = torch.randn(outputs) if inputs % 64 else None
        packed, weight = make(library, kind, outputs, inputs, bias)
        for count in COUNTS:
            x = whole_numbers(count, inputs) if kind == "q4" else torch.randn(count, inputs)
            expected = x.double() @ weight.T + (0.0 if bias is None else bias.double())
            # words lose 2^-16 of a row's largest value, a product in floats a last bit of each of its sums
            lost = 5e-5 if kind == "q8" else 2e-6
            margin = (lost * x.abs().amax(1, keepdim=True).double() * weight.abs().sum(1) + 1e-6).max().item()
            if kind == "q8" and packed.inputs in BYTES:
                x = whole_numbers(count, inputs)
                expected = x.double() @ weight.T + (0.0 if bias is None else bias.double())
            torch.testing.assert_close(product(library, packed, x).double(), expected, atol=margin, rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_bit_equal_for_every_count_place_and_number_of_threads(level, kind):
    library = load(level)
    packed, _ = make(library, kind, 100, 96, torch.randn(100))
    counts = (*range(1, 16), 64, 257)
    expect_equal_rows(lambda x, threads: product(library, packed, x, threads), 96, counts)


@pytest.mark.parametrize("level", LEVELS)
def test_many_rows_and_inputs_go_in_parts_without_a_bit_of_difference(level):
    library = load(level)
    for inputs in (608, 1312):
        packed, weight = make(library, "q4", 104, inputs, torch.randn(104) if inputs % 64 else None)
        x = whole_numbers(29, inputs)
        bias = product(library, packed, torch.zeros(1, inputs)).double()
        alone = torch.cat([product(library, packed, row[None]) for row in x])
        margin = (2e-6 * 127.0 * weight.abs().sum(1)).max().item()
        torch.testing.assert_close(alone.double(), x.double() @ weight.T + bias, atol=margin, rtol=1e-5)
        for count in (23, 24, 25, 29):
            assert torch.equal(product(library, packed, x[:count]), alone[:count]), (inputs, count)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spoils_its_own_row_only(level, kind, bad):
    library = load(level)
    packed, _ = make(library, kind, 40, 64)
    x = torch.randn(9, 64)
    clean = product(library, packed, x)
    x[4, 37] = bad
    y = product(library, packed, x)
    assert not y[4].isfinite().any()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(y[others], clean[others])


@pytest.mark.parametrize("kind", KINDS)
def test_random_inputs_lose_little(kind):
    library = load("avx2")
    packed, weight = make(library, kind, 64, 576)
    x = torch.randn(30, 576)
    expected = x.double() @ weight.T
    lost = (product(library, packed, x).double() - expected).norm() / expected.norm()
    assert lost < {"f32": 1e-6, "f16": 1e-6, "bf16": 1e-6, "q8": 1e-4, "q4": 1e-2}[kind]


def test_a_row_of_zeros_is_the_bias():
    library, bias = load("auto"), torch.randn(24)
    for kind in KINDS:
        packed, _ = make(library, kind, 24, 32, bias)
        assert torch.equal(product(library, packed, torch.zeros(2, 32)), bias.expand(2, 24))


@pytest.mark.parametrize("level", LEVELS)
def test_groups_of_any_size_lose_at_most_half_a_step_of_their_own(level):
    library = load(level)
    packed, weight = make(library, "q4", 40, 192)
    sizes = torch.tensor([[1.0, 1e-2, 1e-4, 1e-6, 0.0, 30.0], [1.0] * 6, [1e-3, 1e3, 1.0, 1e3, 1e-30, 1e-9]])
    x = torch.randn(3, 6, 32) * sizes[:, :, None]
    largest = x.abs().amax(2, keepdim=True).double()
    # a group's step is a whole number of a row's units, 2^14 of which are its largest step
    step = (largest + largest.amax(1, keepdim=True) / 2**14) / 127
    flat = x.reshape(3, 192).double()
    lost = (step / 2).expand(3, 6, 32).reshape(3, 192) + 1e-6 * flat.abs().amax(1, keepdim=True)
    expected = flat @ weight.T
    assert ((product(library, packed, x.reshape(3, 192)).double() - expected).abs() <= lost @ weight.abs().T).all()


@pytest.mark.parametrize("level", LEVELS)
def test_the_size_of_a_row_changes_nothing(level):
    library = load(level)
    packed, _ = make(library, "q4", 24, 64)
    x = torch.randn(2, 64)
    whole = product(library, packed, x)
    for power in (-90, -40, 60, 100):
        assert torch.equal(product(library, packed, x * 2.0**power), whole * 2.0**power), power
    if packed.inputs in BYTES:  # floats stay what they are, down to those that lose bits
        assert torch.equal(product(library, packed, x * 2.0**-120), torch.zeros(2, 24))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["q8", "q4", "f16"])
def test_the_largest_of_a_product_is_that_of_its_rows(level, kind):
    """The first of equals: weights stand there twice, near each other and far; a NaN is the largest."""
    library = load(level)
    for outputs in (1, 37, 64, 500):
        bits = 4 if kind == "q4" else 8
        numbers = torch.randint(0, 2**bits, (outputs, 64), dtype=torch.uint8)
        numbers[outputs // 2 :] = numbers[: outputs - outputs // 2].clone()
        scale = torch.full((outputs, 2), 0.125).half()
        blocks = Blocks(numbers, scale, -scale if bits == 4 else None, bits)
        packed = c.PackedWeight(library, blocks.dequantize().half() if kind == "f16" else blocks)
        for count in (1, 2, 9, 30, 260):
            x = torch.randn(count, 64)
            x[count // 2, 3] = torch.nan if count == 9 else 0.0
            y, ours = product(library, packed, x), largest_product(library, packed, x, threads=1 + count % 2)
            assert torch.equal(ours[:, 0].contiguous().view(torch.int32).long(), y.argmax(1)), (outputs, count)
            torch.testing.assert_close(ours[:, 1], y.amax(1), atol=0.0, rtol=0.0, equal_nan=True)
