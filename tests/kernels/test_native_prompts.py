"""Products of chips with a matrix unit: tokens of prompts by tiles of bfloat16, others by bytes."""

from __future__ import annotations

import pytest
import torch

from kernels.linear.blocks import Blocks
from kernels.native import library as c
from tests.kernels.native import expect_equal_rows, load, product
from tests.kernels.test_native_linear import make

QUANTIZED = ("q8", "q4")


def of_prompts(library, packed, x, threads=2):
    return product(library, packed, x, threads, [(len(x), 0)])


@pytest.mark.parametrize("kind", QUANTIZED)
def test_is_a_matrix_product_as_far_as_bfloat16_goes(kind):
    library = load("amx")
    for outputs, inputs in ((1, 32), (16, 64), (33, 96), (100, 288), (64, 1312)):
        packed, weight = make(library, kind, outputs, inputs, torch.randn(outputs) if inputs % 64 else None)
        bias = product(library, packed, torch.zeros(1, inputs)).double()
        for count in (1, 2, 15, 16, 17, 31, 32, 33, 64, 257, 300):
            x = torch.randn(count, inputs)
            # a bit of 8 of every weight, half a one of every input
            margin = 1.02 * (2.0**-7 + 2.0**-9) * (x.abs().double() @ weight.abs().T) + 1e-5
            lost = of_prompts(library, packed, x).double() - bias - x.double() @ weight.T
            assert (lost.abs() <= margin).all(), (outputs, inputs, count)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_token_of_a_prompt_is_bit_equal_wherever_it_stands(kind):
    library = load("amx")
    packed, _ = make(library, kind, 100, 608, torch.randn(100))
    counts = (*range(2, 20), 31, 33, 64, 257, 300)
    expect_equal_rows(lambda x, threads: of_prompts(library, packed, x, threads), 608, counts)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_tokens_of_prompts_and_others_share_a_step_without_a_bit_of_difference(kind):
    library = load("amx")
    packed, _ = make(library, kind, 104, 96)
    for prompts in (
        [(0, 1), (0, 1), (37, 0)],
        [(5, 3), (0, 2), (1, 0), (16, 0), (3, 0), (0, 40)],
        [(1, 1)] * 20,
        [(0, 3), (270, 0), (0, 1), (290, 1)],
    ):
        x = torch.randn(sum(map(sum, prompts)), 96)
        whole, rest = of_prompts(library, packed, x), product(library, packed, x)
        of_prompt = torch.cat([torch.arange(prompt + others) < prompt for prompt, others in prompts])
        expected = torch.where(of_prompt[:, None], whole, rest)
        assert torch.equal(product(library, packed, x, prompts=prompts), expected), prompts


@pytest.mark.parametrize("kind", QUANTIZED)
def test_weights_that_become_bfloat16_lose_a_bit_at_most_and_nothing_on_average(kind):
    library = load("amx")
    with torch.random.fork_rng():
        torch.manual_seed(1)  # a weight far below its group's scale can lose more: some draws have one above 1e-3
        packed, weight = make(library, kind, 160, 1312)
    spread = of_prompts(library, packed, torch.eye(1312)).double().T  # inputs of 1 and 0 are multiplied without loss
    lost = ((spread - weight) / weight)[weight.abs() > 1e-3]
    assert lost.abs().max() <= 2.0**-7
    assert lost.mean().abs() < 3e-4
    assert lost.std() < 2e-3, "as if rounded to nearest"


@pytest.mark.parametrize("kind", QUANTIZED)
def test_weights_that_are_bfloat16_stay_what_they_are(kind):
    library = load("amx")
    bits = 4 if kind == "q4" else 8
    numbers = torch.randint(0, 2**bits, (40, 96), dtype=torch.uint8)
    scale = torch.full((40, 3), 0.25).half()
    blocks = Blocks(numbers, scale, (scale * torch.randint(-99, 99, (40, 3))).half() if bits == 4 else None, bits)
    x = torch.randint(-16, 17, (9, 96)).float()
    expected = x @ blocks.dequantize().float().T
    y = of_prompts(library, c.PackedWeight(library, blocks), x)
    torch.testing.assert_close(y, expected, atol=0.1, rtol=0.0)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spoils_its_own_token_only(kind, bad):
    library = load("amx")
    packed, _ = make(library, kind, 40, 64)
    x = torch.randn(40, 64)
    clean = of_prompts(library, packed, x)
    x[21, 37] = bad
    y = of_prompts(library, packed, x)
    others = torch.arange(40) != 21
    assert not y[21].isfinite().any()
    assert torch.equal(y[others], clean[others])


def test_inputs_are_split_in_two_where_weights_are_bfloat16():
    library = load("amx")
    packed, weight = make(library, "bf16", 64, 576)
    assert packed.inputs is c.Inputs.SPLIT
    x = torch.randn(30, 576)
    expected = x.double() @ weight.T
    assert (product(library, packed, x).double() - expected).norm() < 1e-5 * expected.norm()
    assert torch.equal(product(library, packed, x), of_prompts(library, packed, x)), "prompts are nothing special to it"
    assert make(library, "bf16", 64, 70)[0].kind is c.Kind.BF16, "whole tiles of inputs only"
