"""Quantized rows and their products in Triton's interpreter, against their references."""

from __future__ import annotations

import pytest
import torch

from kernels.launch import Chip
from kernels.linear import quantized
from kernels.linear import reference as linear_reference
from kernels.linear import triton as products
from kernels.linear.blocks import Blocks
from kernels.native.build import Unavailable
from kernels.quantized_rows import reference
from kernels.quantized_rows import triton as rows
from kernels.triton_ops import triton_ops
from tests.kernels.interpreted.memory import inside

slow = pytest.mark.slow
KINDS = ("int8", "fp8")


def same(found, expected):
    """To the last bit."""
    assert torch.equal(found.numbers_TI.float(), expected.numbers_TI.float())
    torch.testing.assert_close(found.scale_T, expected.scale_T, atol=0, rtol=0, equal_nan=True)
    assert found.numbers_TI.dtype == expected.numbers_TI.dtype


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 63), (2, 3, 100)], ids=str)
def test_rows_are_rounded_to_the_last_bit(shape, kind, dtype):
    x = inside(torch.randn(shape).mul(30).to(dtype))
    x[..., 0, :] = 0.0
    x[..., 0, -1] = 1e-38  # too small to be a scale
    found = rows.quantize_rows(x, kind)
    same(found, reference.quantize_rows(x, kind))
    # Half a number of 127 at most; an e4m3 number has 3 bits after its first, so that it is off by 1/16 at most.
    off = (found.dequantize() - x.reshape(-1, shape[-1]).float()).abs()
    bound = found.scale_T[:, None] * 0.5001 if kind == "int8" else x.reshape(-1, shape[-1]).float().abs() / 15.9
    assert bool((off <= bound + found.scale_T[:, None] * 2**-9 + 1e-37).all())


def test_no_product_is_fused_with_the_sum_that_rounds_it():
    """The interpreter fuses nothing; a GPU would, and 0.4999999 of one rounding might be a half of two."""
    x, weight = torch.randn(2, 64), torch.randn(64)
    launches = (
        rows.plan_quantize(x, "int8")[0],
        rows.plan_norm(x, x, weight, 1e-5, "int8")[0],
        rows.plan_silu_mul(x, "int8")[0],
    )
    assert not any(launch.options["enable_fp_fusion"] for launch in launches)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_that_is_not_finite_is_nan_and_the_others_are_not(kind):
    x = torch.randn(4, 40)
    x[0, 3], x[2, 39], x[3, 0] = torch.nan, torch.inf, -torch.inf
    found = rows.quantize_rows(x, kind)
    same(found, reference.quantize_rows(x, kind))
    assert found.scale_T.isnan().tolist() == [True, False, True, True]
    assert found.numbers_TI.float().isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 100)])
def test_norms_and_the_activation_are_quantized_in_one_pass(tokens, width, kind, dtype):
    x, residual = (inside(torch.randn(tokens, width).mul(4).to(dtype)) for _ in range(2))
    weight = torch.randn(width).to(dtype)

    def close(found, expected):
        # The norm's own rounding may differ in the last bit of its type, and with it a number by its next.
        step = {torch.float32: 1e-6, torch.float16: 1e-3}[dtype]
        torch.testing.assert_close(found.scale_T, expected.scale_T, atol=0, rtol=2 * step)
        far = {"int8": 1.0, "fp8": 32.0}[kind]
        assert float((found.numbers_TI.float() - expected.numbers_TI.float()).abs().max()) <= far
        assert float((found.numbers_TI.float() != expected.numbers_TI.float()).float().mean()) <= 0.05

    close(rows.rms_norm(x, weight, 1e-5, kind), reference.rms_norm(x, weight, 1e-5, kind))
    found, total = rows.add_rms_norm(x, residual, weight, 1e-5, kind)
    assert torch.equal(total, x + residual)
    close(found, reference.rms_norm(total, weight, 1e-5, kind))
    both = inside(torch.randn(tokens, 2 * width).mul(5).to(dtype))
    close(rows.silu_mul(both, kind), reference.silu_mul(both, kind))


# Tokens, outputs, inputs; multiprocessors: many of them make splits.
PRODUCTS = [(1, 1, 1, 1), (3, 100, 63, 1), (17, 65, 300, 132), (2, 70, 2100, 4), (70, 130, 40, 1)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", PRODUCTS, ids=str)
def test_products(shape, kind, bias, dtype):
    tokens, outputs, inputs, cores = shape
    x = reference.quantize_rows(torch.randn(tokens, inputs), kind)
    x = x._replace(numbers_TI=inside_of_bytes(x.numbers_TI))
    weight = reference.quantize_rows(torch.randn(outputs, inputs) / inputs**0.5, kind)
    bias_O = torch.randn(outputs).to(dtype) if bias else None
    chip = Chip(90, cores)
    counters = products.counters_for(chip, torch.device("cpu"))
    launch, found = products.plan_product(x, weight, bias_O, counters, dtype, chip=chip)
    assert (launch.grid[1] > 1) == (inputs > 2000)
    launch.run()
    expected = linear_reference.rows_product(x, weight, bias_O, dtype)
    tolerance = {torch.float32: 1e-6, torch.float16: 1e-3}[dtype]
    torch.testing.assert_close(found, expected, atol=2 * tolerance, rtol=tolerance)
    assert not counters.any(), "the next product finds zeros"


def inside_of_bytes(numbers):
    """The same numbers in larger memory, the largest byte on all sides: a NaN of e4m3."""
    around = torch.full((numbers.shape[0] + 2, numbers.shape[1] + 5), 127, dtype=torch.uint8)
    around[1:-1, : numbers.shape[1]] = numbers.view(torch.uint8)
    return around.view(numbers.dtype)[1:-1, : numbers.shape[1]]


def test_sums_do_not_depend_on_the_batch():
    """Whole ones never; those of fp8 where it is asked: one cut for all. The interpreter's own products are numpy's."""
    x, weight = torch.randn(40, 2100), torch.randn(70, 2100)
    linear = quantized.prepare(weight, None, "int8")
    assert torch.equal(linear(x)[7:9], linear(x[7:9]))
    linear = quantized.prepare(weight, None, "fp8", deterministic=True)
    many, few = (linear.plan(rows.quantize_rows(part, "fp8"), x.dtype)[0] for part in (x, x[:1]))
    assert many.grid[1] == few.grid[1] == 1
    assert many[3:] == few[3:], "the machine code is the same"


@pytest.mark.parametrize("kind", KINDS)
def test_a_prepared_weight_is_near_the_product_of_floats(kind, dtype):
    weight, x, bias = torch.randn(33, 256), torch.randn(5, 256).to(dtype), torch.randn(33).to(dtype)
    linear = quantized.prepare(weight.to(dtype), bias, kind)
    assert linear.rows == kind
    assert linear.nbytes == 33 * 256 + 33 * 4
    exact = x.float() @ weight.T + bias.float()
    found = linear(x)
    assert found.dtype == dtype
    # Errors of both sides add up as squares: 127 steps to about 3 sigma give 0.7 % each, 3 bits of e4m3 2.6 %.
    assert float((found.float() - exact).norm() / exact.norm()) < {"int8": 0.015, "fp8": 0.05}[kind]
    assert torch.equal(linear.multiply(rows.quantize_rows(x, kind), dtype), found)


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_weight_is_rounded_part_by_part_as_at_once(kind, monkeypatch):
    monkeypatch.setattr(quantized, "_AT_ONCE", 5)
    weight = torch.randn(13, 33)
    found, expected = quantized.RowsLinear(weight, None, kind).weight, reference.quantize_rows(weight, kind)
    assert torch.equal(found.numbers_TI.view(torch.uint8), expected.numbers_TI.view(torch.uint8))
    assert torch.equal(found.scale_T, expected.scale_T)


def test_the_table_quantizes_what_it_prepares():
    weight, x = torch.randn(40, 64), torch.randn(3, 64)
    for kind in KINDS:
        ops = triton_ops("cpu", deterministic=False, quantize=kind)
        expected = quantized.prepare(weight, None, kind)(x)
        assert torch.equal(ops.prepare_linear(weight, None)(x), expected)
        torch.testing.assert_close(ops.prepare_product(weight, None)(x), x @ weight.T)
    plain = triton_ops("cpu", deterministic=False)
    torch.testing.assert_close(plain.prepare_linear(weight, None)(x), x @ weight.T)
    for bits, kind in ((4, "int4"), (8, "int8")):
        blocks = Blocks.of(weight, bits)
        expected = quantized.prepare(blocks, None, kind)(x)
        assert torch.equal(plain.prepare_linear(blocks, None)(x), expected)


def test_what_cannot_be_is_refused_by_name():
    with pytest.raises(ValueError, match="one of int8, fp8, int4, not 'int3'"):
        triton_ops("cpu", deterministic=False, quantize="int3")
    with pytest.raises(Unavailable, match=r"fp8 need a GPU of compute capability 8\.9 or more, and this one has 8\.0"):
        quantized.refuse_fp8(Chip(80, 108))
    weight = torch.randn(4, 32)
    weight[2, 5] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        quantized.prepare(weight, None, "int8")
    linear = quantized.prepare(torch.randn(4, 32), None, "int8")
    with pytest.raises(ValueError, match=r"x has 31 inputs of torch.int8, the weight has 32 of torch.int8"):
        linear(torch.randn(1, 31))
    with pytest.raises(ValueError, match=r"x has 32 inputs of torch.float8_e4m3fn, the weight has 32 of torch.int8"):
        linear.multiply(reference.quantize_rows(torch.randn(1, 32), "fp8"), torch.float32)
