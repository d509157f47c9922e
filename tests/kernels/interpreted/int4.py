"""Products with weights of 4 bits in Triton's interpreter, against the reference; and what they stand for."""

from __future__ import annotations

import pytest
import torch

from kernels.int4 import reference
from kernels.int4 import triton as products
from kernels.launch import Chip
from kernels.linear import quantized
from kernels.linear.blocks import Blocks
from kernels.linear.triton import counters_for
from tests.kernels.interpreted.memory import inside

slow = pytest.mark.slow


@pytest.mark.parametrize("inputs", [32, 96, 320])
def test_blocks_stay_what_they_are(inputs):
    blocks = Blocks.of(torch.randn(5, inputs), 4)
    packed = reference.pack_blocks(blocks)
    assert torch.equal(packed.dequantize(), blocks.dequantize())
    assert packed.nbytes == 5 * -(-inputs // 128) * (64 + 4 * 4)
    with pytest.raises(ValueError, match="of 8 bits, not of 4"):
        reference.pack_blocks(Blocks.of(torch.randn(2, 32)))


@pytest.mark.parametrize("group", reference.GROUPS)
@pytest.mark.parametrize("inputs", [1, 63, 300])
def test_rounding_is_to_the_nearest_number(inputs, group):
    weight = torch.randn(6, inputs) * torch.rand(6, 1) * 10
    weight[2] = 0.7
    packed = reference.quantize(weight, group)
    scales = packed.scales_GO2[..., 0].T.float().repeat_interleave(group, 1)[:, :inputs]
    # Half a number, and what float16 makes of the least and of the scale of the 15th number from it.
    bound = scales * (0.5 + 15 * 2**-11) + weight.abs().max() * 2**-11
    assert bool(((packed.dequantize() - weight).abs() <= bound).all())


def test_a_word_holds_what_the_drawing_says():
    numbers = torch.arange(128).remainder(16).to(torch.uint8)[None]
    words = reference.pack(numbers, torch.ones(1, 4).half(), torch.zeros(1, 4).half(), 32).words_OW[0].tolist()
    for w, word in enumerate(words):
        inputs = [2 * w, 32 + 2 * w, 64 + 2 * w, 96 + 2 * w]
        inputs += [each + 1 for each in inputs]
        assert [word >> bit & 15 for bit in range(0, 32, 4)] == [each % 16 for each in inputs]


def test_what_no_number_holds_is_refused():
    weight = torch.randn(3, 64)
    with pytest.raises(ValueError, match="32, 64, 128 inputs, not 16"):
        reference.quantize(weight, 16)
    for bad in (torch.nan, torch.inf, 1e7):
        weight[1, 40] = bad
        with pytest.raises(ValueError, match="not finite, or too large"):
            quantized.prepare(weight, None, "int4")
    packed = reference.quantize(torch.randn(3, 64), 32)
    counters = counters_for(Chip(90, 1), torch.device("cpu"))
    with pytest.raises(ValueError, match="x has 63 inputs, the weight has 64"):
        products.plan_product(torch.randn(1, 63), packed, None, counters)


def check(shape, group, dtype, capability=90):
    tokens, outputs, inputs, cores = shape
    packed = reference.quantize(torch.randn(outputs, inputs) / inputs**0.5, group)
    x, bias = inside(torch.randn(tokens, inputs).to(dtype)), torch.randn(outputs).to(dtype)
    chip = Chip(capability, cores)
    counters = counters_for(chip, torch.device("cpu"))
    launch, found = products.plan_product(x, packed, bias, counters, chip=chip)
    assert (launch.grid[1] > 1) == (cores > 1)
    launch.run()
    # Weights are rounded to the type of x where they are multiplied, and sums at last; those of bfloat16 to 8 bits.
    step = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    torch.testing.assert_close(found.float(), reference.product(x, packed, bias).float(), atol=step, rtol=step)
    assert not counters.any(), "the next product finds zeros"


@pytest.mark.parametrize(
    ("shape", "group", "capability"),
    [
        ((1, 63, 100, 1), 32, 90),
        ((3, 70, 1100, 132), 64, 90),
        ((2, 10, 300, 1), 128, 80),
        *(pytest.param((70, 130, 1100, 132), group, chip, marks=slow) for group in (32, 128) for chip in (80, 90)),
    ],
    ids=str,
)
def test_products(shape, group, capability, dtype):
    check(shape, group, dtype, capability)


def test_products_of_bfloat16():
    check((2, 10, 300, 1), 32, torch.bfloat16)


@slow
@pytest.mark.parametrize("tokens", [20, 40, 100])
def test_products_of_more_tokens(tokens, dtype):
    check((tokens, 100, 160, 1), 32, dtype)


def test_a_prepared_weight_is_near_the_product_of_floats():
    weight, x, bias = torch.randn(33, 256), torch.randn(5, 256).half(), torch.randn(33).half()
    linear = quantized.prepare(weight, bias, "int4")
    assert linear.rows is None
    assert linear.nbytes == 33 * 256 * 5 // 8
    exact = x.float() @ weight.T + bias.float()
    assert float((linear(x).float() - exact).norm() / exact.norm()) < 0.1
    many, few = (quantized.prepare(weight, bias, "int4", deterministic=True).plan(part)[0] for part in (x, x[:1]))
    assert many[3:] == few[3:], "the machine code is the same"
    assert many.grid[1] == few.grid[1] == 1
