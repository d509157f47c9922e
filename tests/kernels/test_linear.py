from __future__ import annotations

from functools import partial

import pytest
import torch

from kernels.linear import packed, reference, tiled

SHAPES = [(1, 1), (7, 5), (33, 48), (96, 40), (576, 1536)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["reference", "packed", "tiled"])
def test_is_a_matrix_product(kind, shape, bias):
    outputs, inputs = shape
    weight = torch.randn(outputs, inputs) / inputs**0.5  # outputs of size 1: the error of a sum grows with its terms
    bias_O = torch.randn(outputs) if bias else None
    kinds = {"reference": reference.Linear, "packed": packed.Linear, "tiled": partial(tiled.Linear, reference.Linear)}
    linear = kinds[kind](weight, bias_O)
    for count in (1, 2, 31, 32, 33, 70):
        x = torch.randn(count, inputs)
        expected = x.double() @ weight.double().T + (0.0 if bias_O is None else bias_O.double())
        torch.testing.assert_close(linear(x), expected.float(), atol=1e-5, rtol=1e-5)


def test_packs_only_what_it_can():
    assert packed.is_available(torch.zeros(2, 2))
    assert not packed.is_available(torch.zeros(2, 2, dtype=torch.float64))
    assert not packed.is_available(torch.zeros(2, 2, device="meta"))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", [reference.Linear, packed.Linear])
def test_rows_of_tiles_are_bit_equal_for_every_count_and_place(kind, shape):
    outputs, inputs = shape
    linear = tiled.Linear(kind, torch.randn(outputs, inputs), torch.randn(outputs))
    row = torch.randn(1, inputs)
    expected = linear(row)[0]
    for count in range(1, 71):
        x = torch.randn(count, inputs)
        place = (count * count) // 71
        x[place] = row
        assert torch.equal(linear(x)[place], expected), (count, place)


def test_tiles_take_a_view_that_is_not_contiguous():
    weight = torch.randn(5, 8)
    x = torch.randn(40, 16)[:, ::2]
    torch.testing.assert_close(tiled.Linear(reference.Linear, weight)(x), x @ weight.T)
