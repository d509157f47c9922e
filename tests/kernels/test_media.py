"""Positions with three axes and rows of media: the reference against plain formulas, native against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.dispatch import choose_ops
from kernels.native import library as c
from kernels.native.ops import Product
from kernels.native.program import OUTPUT, Op
from kernels.ops import MediaTensors
from tests.kernels.native import LEVELS, instruction, load, pool

OPS = choose_ops("reference")
TOKENS, PARTS = 5, 3


def media(width: int) -> MediaTensors:
    """Tokens 1 and 4 read a row."""
    positions_3T = torch.tensor([[0, 7, 7, 8, 1_000_000], [0, 7, 9, 8, 5], [0, 8, 7, 8, 0]])
    return MediaTensors(positions_3T, torch.tensor([1, 4]), torch.randn(2, PARTS, width))


def test_a_pair_turns_with_its_axis():
    frequency_E, axes = torch.rand(8), [0, 1, 2, 0, 1, 2, 0, 0]
    frequency_3E = torch.zeros(3, 8)
    frequency_3E[axes, range(8)] = frequency_E
    given = media(4)
    cos, sin = OPS.rope_axes_cos_sin(given.positions_3T, frequency_3E, 0.5, torch.float32)
    angle_TE = (given.positions_3T[axes].T.float() * frequency_E).double().numpy()
    np.testing.assert_allclose(cos, 0.5 * np.cos(angle_TE), atol=1e-7)
    np.testing.assert_allclose(sin, 0.5 * np.sin(angle_TE), atol=1e-7)


def test_a_position_that_is_the_same_on_all_axes_is_a_position():
    frequency_E = torch.rand(7)
    frequency_3E = frequency_E * (torch.arange(3)[:, None] == torch.arange(7) % 3)
    positions = torch.tensor([0, 3, 8191])
    found = OPS.rope_axes_cos_sin(positions.expand(3, -1), frequency_3E, 1.0, torch.float32)
    expected = OPS.rope_cos_sin(positions, frequency_E, 1.0, torch.float32)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_rows_take_the_places_of_tokens_or_are_added():
    x_TD, given = torch.randn(TOKENS, 6), media(6)
    for part in range(PARTS):
        replaced, added = OPS.replace_rows(x_TD, given, part), OPS.add_rows(x_TD, given, part)
        for token in range(TOKENS):
            row = {1: given.rows_MPD[0, part], 4: given.rows_MPD[1, part]}.get(token)
            assert torch.equal(replaced[token], x_TD[token] if row is None else row)
            assert torch.equal(added[token], x_TD[token] if row is None else x_TD[token] + row)
    assert OPS.replace_rows(x_TD, None, 0) is x_TD
    assert OPS.add_rows(x_TD, None, 1) is x_TD


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("width", [1, 5, 64])
@pytest.mark.parametrize("some", [True, False])
def test_native_rows(level, width, some):
    library, x_TD, given = load(level), torch.randn(TOKENS, width), media(width)
    view = c.View(0, 0, width)
    ones = torch.ones(width)
    lines = [
        instruction(Op.TAKE, y=view),
        instruction(Op.REPLACE_ROWS, x=view, y=view, layer=0),
        instruction(Op.ADD_ROWS, x=view, y=view, layer=2),
        instruction(Op.RMS_NORM, x=view, y=c.View(OUTPUT, 0, width), number=1e-9, weight=ones.data_ptr()),
    ]
    out = torch.full((TOKENS, width), torch.nan)
    step = c.StepOfC(tokens=TOKENS, input=x_TD.data_ptr(), output=out.data_ptr())
    row_of_T = torch.tensor([-1, 0, -1, -1, 1], dtype=torch.int32)
    if some:
        step.media_of, step.media, step.media_row = row_of_T.data_ptr(), given.rows_MPD.data_ptr(), PARTS * width
    c.CompiledProgram(library, lines, [c.Buffer(width, 0)]).run(pool(library), step)
    known = given if some else None
    expected = OPS.add_rows(OPS.replace_rows(x_TD, known, 0), known, 2)
    torch.testing.assert_close(out, OPS.rms_norm(expected, ones, 1e-9), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("some", [True, False])
def test_native_angles(level, some):
    library, pairs, given = load(level), 12, media(1)
    frequency_3E = torch.rand(pairs) * (torch.arange(3)[:, None] == torch.arange(pairs) % 3)
    line = instruction(Op.ROPE_AXES, y=c.View(OUTPUT, 0, 2 * pairs), number=0.5, weight=frequency_3E.data_ptr())
    out = torch.full((TOKENS, 2 * pairs), torch.nan)
    positions_T = torch.tensor([0, 1, 17, 8191, 1_000_000])
    step = c.StepOfC(tokens=TOKENS, positions=positions_T.data_ptr(), output=out.data_ptr())
    if some:
        step.axes = given.positions_3T.data_ptr()
    c.CompiledProgram(library, [line], []).run(pool(library), step)
    positions_3T = given.positions_3T if some else positions_T.expand(3, -1)
    expected = torch.cat(OPS.rope_axes_cos_sin(positions_3T, frequency_3E, 0.5, torch.float32), dim=1)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_native_products_of_tensors(level, dtype):
    """Of no row, of one, and of more than an item has; outputs that fill no vector; a view that is not contiguous."""
    library = load(level)
    weight_OI, bias_O = torch.randn(37, 50).to(dtype), torch.randn(37)
    product = Product(library, pool(library), c.PackedWeight(library, weight_OI, bias_O))
    for rows in (0, 1, 7, 300):
        x_TI = torch.full((rows, 60), torch.nan)
        x_TI[:, 3:53] = torch.randn(rows, 50)
        expected = torch.nn.functional.linear(x_TI[:, 3:53], weight_OI.float(), bias_O)
        torch.testing.assert_close(product(x_TI[:, 3:53]), expected, atol=1e-4, rtol=1e-5)
    for wrong in (torch.zeros(2, 49), torch.zeros(2, 50, dtype=torch.float64)):
        with pytest.raises(ValueError, match="50 float32 inputs"):
            product(wrong)
