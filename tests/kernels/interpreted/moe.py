"""Grouped products in Triton's interpreter, against their references; and a mixture of experts as a whole."""

from __future__ import annotations

import pytest
import torch

from kernels.moe import reference
from kernels.moe import triton as moe
from kernels.quantized_rows.reference import quantize_rows
from tests.kernels.interpreted.memory import TOLERANCE, inside

slow = pytest.mark.slow


def offsets_of(counts):
    return torch.tensor([0, *counts]).cumsum(0).int()


COUNTS = [[3], [0, 1, 0, 17, 0], [0, 0, 0], [33, 0, 2]]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("gather", [False, True])
def test_groups(counts, gather, dtype):
    pairs = sum(counts)
    x = inside(torch.randn(9 if gather else pairs, 63).to(dtype))
    weight = (torch.randn(len(counts), 70, 63) / 8).to(dtype)
    rows = torch.randint(0, 9, (pairs,), dtype=torch.int32) if gather else None
    found = moe.grouped_product(x, weight, offsets_of(counts), rows)
    expected = reference.grouped_product(x, weight, offsets_of(counts), rows)
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize("gather", [False, True])
def test_groups_of_quantized_rows(kind, gather):
    counts = [0, 5, 18, 0, 1]
    x = quantize_rows(torch.randn(9 if gather else 24, 100), kind)
    weight = reference.quantize_experts(torch.randn(5, 33, 100) / 10, kind)
    rows = torch.randint(0, 9, (24,), dtype=torch.int32) if gather else None
    found = moe.grouped_rows_product(x, weight, offsets_of(counts), torch.float32, rows)
    expected = reference.grouped_rows_product(x, weight, offsets_of(counts), torch.float32, rows)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("experts", [8, pytest.param(40, marks=slow)])
def test_a_mixture_of_experts(experts):
    """Against every token by itself, as its formula says."""
    tokens, each, hidden, inner = 7, 3, 40, 24
    x = torch.randn(tokens, hidden)
    up, down = torch.randn(experts, inner, hidden) / 6, torch.randn(experts, hidden, inner) / 5
    weights, chosen = torch.randn(tokens, experts).softmax(1).topk(each)
    order = reference.sort_by_expert(chosen, experts)
    assert order.offsets_E1.dtype == order.tokens_X.dtype == torch.int32
    y = moe.grouped_product(x, up, order.offsets_E1, order.tokens_X).relu()
    found = reference.combine(moe.grouped_product(y, down, order.offsets_E1), order.places_TK, weights)
    expected = torch.stack(
        [
            sum(weights[t, k] * (down[chosen[t, k]] @ (up[chosen[t, k]] @ x[t]).relu()) for k in range(each))
            for t in range(tokens)
        ]
    )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@slow
@pytest.mark.parametrize("counts", [[100, 0, 40, 300], [20] * 12], ids=str)
def test_tiles_of_many_tokens(counts, dtype):
    x, weight = torch.randn(sum(counts), 40).to(dtype), (torch.randn(len(counts), 150, 40) / 6).to(dtype)
    found = moe.grouped_product(x, weight, offsets_of(counts))
    torch.testing.assert_close(found, reference.grouped_product(x, weight, offsets_of(counts)), **TOLERANCE[dtype])


def test_kinds_that_do_not_meet_are_refused():
    x, weight = torch.randn(2, 8), torch.randn(1, 4, 8)
    with pytest.raises(ValueError, match=r"x is torch.float32 and weights are torch.float16: both must be of one kind"):
        moe.grouped_product(x, weight.half(), offsets_of([2]))
    with pytest.raises(ValueError, match=r"x is torch.int8 and weights are torch.float32"):
        moe.plan_grouped(quantize_rows(x, "int8"), weight, offsets_of([2]), None)


def test_inputs_and_experts_that_do_not_meet_are_refused():
    x, weight = torch.randn(2, 8), torch.randn(3, 4, 8)
    with pytest.raises(ValueError, match="x has 7 inputs and offsets are 4: weights have 8 inputs of 3 experts"):
        moe.grouped_product(x[:, :7], weight, offsets_of([2, 0, 0]))
    with pytest.raises(ValueError, match="x has 8 inputs and offsets are 3: weights have 8 inputs of 3 experts"):
        moe.grouped_product(x, weight, offsets_of([2, 0]))
