"""The ops of the table in Triton's interpreter, against their references."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import reference as attention_reference
from kernels.attention.triton import Attention
from kernels.compiled import compile_launch
from kernels.dispatch import choose_ops
from kernels.kv_write import reference as kv_write_reference
from kernels.kv_write.triton import kv_write
from kernels.launch import interpreted
from kernels.rms_norm.triton import plan_norm
from kernels.rope import reference as rope_reference
from kernels.rope.triton import rope
from tests.kernels.interpreted.memory import DTYPES, TOLERANCE, inside
from tests.kernels.paged import make_case

OURS, REFERENCE = choose_ops("triton"), choose_ops("reference")
slow = pytest.mark.slow


def test_this_process_interprets():
    assert interpreted()
    assert torch.empty(3).isnan().all()
    assert OURS.level == "interpreted"
    x = torch.randn(2, 8)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET is set"):
        compile_launch(plan_norm(x, None, x[0], 1e-5)[0], 90)


@pytest.mark.parametrize("shape", [(1, 1), (3, 63), (2, 100), (1, 2, 24)], ids=str)
def test_norms(shape, dtype):
    x, residual = (inside(torch.randn(shape).mul(8).to(dtype)) for _ in range(2))
    weight = torch.randn(shape[-1]).to(dtype)
    torch.testing.assert_close(OURS.rms_norm(x, weight, 1e-5), REFERENCE.rms_norm(x, weight, 1e-5), **TOLERANCE[dtype])
    normed, total = OURS.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    torch.testing.assert_close(normed, REFERENCE.rms_norm(total, weight, 1e-5), **TOLERANCE[dtype])


def test_the_mean_of_squares_is_in_float32():
    large = torch.full((1, 4), 300.0, dtype=torch.float16)  # its square is beyond float16
    assert torch.equal(OURS.rms_norm(large, torch.ones(4).half(), 1e-5), torch.ones(1, 4).half())
    assert torch.equal(OURS.rms_norm(torch.zeros(2, 4), torch.ones(4), 1e-5), torch.zeros(2, 4))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 24), (3, 1, 63), (1, 1, 128)])
def test_norms_of_heads(heads, kv_heads, size, dtype):
    x = inside(torch.randn(5, heads + kv_heads, size).to(dtype))
    q_norm, k_norm = torch.randn(2, size).to(dtype)
    expected = REFERENCE.qk_norm(x, q_norm, k_norm, heads, 1e-6)
    torch.testing.assert_close(OURS.qk_norm(x, q_norm, k_norm, heads, 1e-6), expected, **TOLERANCE[dtype])


def test_angles(dtype):
    positions = torch.tensor([0, 1, 2, 5, 63, 8191, 131_071, 1_000_003] * 9)
    frequencies = torch.cat((torch.tensor([1.0]), torch.rand(10), torch.tensor([1e-6])))
    for scale in (1.0, 1.1386):
        ours = OURS.rope_cos_sin(positions, frequencies, scale, dtype)
        for found, expected in zip(ours, REFERENCE.rope_cos_sin(positions, frequencies, scale, dtype), strict=True):
            # The same angle to the last bit: what differs is how the scale and the result are rounded.
            torch.testing.assert_close(found, expected, atol=1.2e-7 if dtype == torch.float32 else 1e-3, rtol=0)


def test_angles_of_three_axes():
    positions = torch.randint(0, 5000, (3, 7))
    axis = torch.tensor([0, 1, 2] * 5)
    frequencies = torch.rand(15) * (axis == torch.arange(3)[:, None])
    ours = OURS.rope_axes_cos_sin(positions, frequencies, 1.0, torch.float32)
    expected = REFERENCE.rope_axes_cos_sin(positions, frequencies, 1.0, torch.float32)
    torch.testing.assert_close(ours, expected, atol=1.2e-7, rtol=0)


@pytest.mark.parametrize(("tokens", "heads", "size"), [(1, 1, 2), (5, 7, 24), (3, 2, 200)])
def test_turning(tokens, heads, size, dtype):
    x = inside(torch.randn(tokens, heads, size).to(dtype))
    cos, sin = REFERENCE.rope_cos_sin(torch.arange(tokens) * 113, torch.rand(size // 2), 1.0, dtype)
    exact = rope_reference.rope(x.double(), cos.double(), sin.double())
    torch.testing.assert_close(rope(x, cos, sin).double(), exact, **TOLERANCE[dtype])


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 63), (2, 1500)])
def test_silu_mul(tokens, width, dtype):
    x = inside(torch.randn(tokens, 2 * width).mul(5).to(dtype))
    torch.testing.assert_close(OURS.silu_mul(x), REFERENCE.silu_mul(x), **TOLERANCE[dtype])


@pytest.mark.parametrize("slots", [[0, 17, 5], [-1, 9, -1], [-1, -1, -1]], ids=str)
def test_kv_write_touches_the_slots_and_nothing_else(slots, dtype):
    both = inside(torch.randn(3, 5, 7).to(dtype))
    keys, values = both[:, :3], both[:, 2:]
    ours, expected = (torch.full((2, 3, 8, 3, 7), torch.nan, dtype=dtype) for _ in range(2))
    kv_write(keys, values, ours[0], ours[1], torch.tensor(slots))
    kv_write_reference.kv_write(keys, values, expected[0], expected[1], torch.tensor(slots))
    assert torch.equal(ours.nan_to_num(777.0), expected.nan_to_num(777.0))


def test_keys_and_values_must_lie_alike():
    keys, cache = torch.randn(1, 2, 8), torch.zeros(1, 4, 2, 8)
    with pytest.raises(ValueError, match="different ways"):
        kv_write(keys, keys, cache, torch.zeros(1, 2, 4, 8).transpose(1, 2), torch.tensor([0]))


@pytest.mark.parametrize("width", [1, 63, 4096, 9000])
def test_largest(width, dtype):
    x = torch.randn(7, width).to(dtype)
    x[1, width // 2 :] = x[1].max()  # the first of equals
    x[2, width // 3] = torch.nan
    x[2, -1] = torch.inf
    x[3] = -torch.inf
    x[4] = -x[4].abs()
    x[5] = -0.0
    x[5, width // 2] = 0.0
    ours, expected = OURS.largest(inside(x)), REFERENCE.largest(x)
    assert torch.equal(ours.view(torch.int32)[:, 0], expected.view(torch.int32)[:, 0])
    torch.testing.assert_close(ours[:, 1], expected[:, 1], equal_nan=True, atol=0, rtol=0)


# Heads, key heads and head size; rows as (tokens before, new tokens); window; splits.
CASES = [
    ((6, 2, 24), [(40, 1), (0, 20), (3, 1), (70, 9)], None, 1),
    ((6, 2, 24), [(40, 1), (0, 20), (3, 1), (70, 9)], 20, 1),
    ((4, 2, 8), [(0, 1), (64, 1), (150, 1)], None, 3),
    ((7, 1, 16), [(150, 2), (5, 1)], 70, 4),
]
MORE = [
    *(((3, 1, 100), [(0, 150)], window, 1) for window in (None, 1, 64)),  # several tiles
    *(((20, 1, 63), [(0, 13), (60, 11)], window, 2) for window in (None, 40)),  # a group larger than a small tile
    ((9, 3, 64), [(n, 1) for n in (0, 15, 16, 17, 300)], None, None),
    ((2, 1, 256), [(0, 70), (90, 1)], 33, 5),
]


@pytest.mark.parametrize(
    ("dtype", "shape", "spans", "window", "splits"),
    [
        *((torch.float32, *case) for case in CASES),
        *((torch.float16, *case) for case in (CASES[0], CASES[3])),
        *(pytest.param(dtype, *case, marks=slow) for dtype in DTYPES.values() for case in MORE),
    ],
)
def test_attention(dtype, shape, spans, window, splits):
    heads, kv_heads, size = shape
    case = make_case(spans, heads=heads, kv_heads=kv_heads, size=size)
    q, keys, values = (x.to(dtype) for x in (inside(case.q), case.k_cache, case.v_cache))
    expected = attention_reference.Attention(case.rows, window)(q, keys, values, 0.3)
    found = Attention(case.rows, window, splits=splits)(q, keys, values, 0.3)
    # In float16 the weights are rounded too, before they are multiplied: 2^-11 of a sum of numbers up to 4.
    tolerance = {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 4e-3, "rtol": 4e-3}
    torch.testing.assert_close(found, expected, **tolerance)


def test_attention_of_bfloat16_is_close():
    case = make_case([(40, 1), (0, 5)], heads=4, kv_heads=2, size=32)
    q, keys, values = (x.bfloat16() for x in (case.q, case.k_cache, case.v_cache))
    expected = attention_reference.Attention(case.rows, None)(q.float(), keys.float(), values.float(), 0.2)
    found = Attention(case.rows, None)(q, keys, values, 0.2)
    torch.testing.assert_close(found.float(), expected, atol=0.03, rtol=0.03)


def test_keys_that_left_every_window_are_not_read():
    case = make_case([(100, 1), (120, 9)], heads=4, kv_heads=1, size=8, hidden_before=75)
    expected = attention_reference.Attention(case.rows, 20)(case.q, case.k_cache, case.v_cache, 0.3)
    found = Attention(case.rows, 20, splits=2)(case.q, case.k_cache, case.v_cache, 0.3)
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)


@slow
@pytest.mark.parametrize("window", [None, 30])
def test_deterministic_rows_do_not_see_what_is_beside_them(window):
    """The last tokens of a row beside a stranger against all of them alone, and one decode of it.

    On a GPU every row of a product of tiles is added up in the same order. The interpreter's products are numpy's,
    where the order depends on a row's place in the tile: bits are compared of equal cuts.
    """

    def attend(case):
        launches, found = Attention(case.rows, window, deterministic=True).plan(case.q, case.k_cache, case.v_cache, 0.3)
        launches[0].run()
        return launches, found

    whole = make_case([(60, 21)], heads=4, kv_heads=2, size=16)
    launches, expected = attend(whole)
    keys, values = whole.dense[0]
    places = torch.arange(81)
    for new in (21, 1):
        case = make_case([(17, 1), (81 - new, new)], heads=4, kv_heads=2, size=16, seed=1)
        blocks = case.rows.block_table_RB[1, places // 16].long()
        case.k_cache[blocks, places % 16], case.v_cache[blocks, places % 16] = keys, values
        case.q[1:] = whole.q[21 - new :]
        others, found = attend(case)
        assert len(others) == 1
        assert others[0][3:] == launches[0][3:], "the machine code is the same"
        if new == 21:
            assert torch.equal(found[1:], expected)
        torch.testing.assert_close(found[1:], expected[21 - new :], atol=2e-6, rtol=1e-5)


def test_few_tiles_of_long_rows_are_split():
    def splits(spans, window=None):
        case = make_case(spans, heads=4, kv_heads=2, size=16)
        launches, _ = Attention(case.rows, window).plan(case.q, case.k_cache, case.v_cache, 1.0)
        assert len(launches) == (2 if launches[0].grid[2] > 1 else 1)
        return launches[0].grid[2]

    assert splits([(100, 1)]) == 1  # too short
    assert splits([(4000, 1)]) == 4001 // 256
    assert splits([(4000, 1)], 600) == 600 // 256
    assert splits([(4000, 1), *[(3, 1)] * 32]) == 264 // 66  # enough for the multiprocessors that there are
    assert splits([(4000, 1), *[(3, 1)] * 200]) == 1


def test_nothing_to_do_is_nothing_done():
    none = torch.empty(0, 6)
    assert OURS.rms_norm(none, torch.ones(6), 1e-5).shape == (0, 6)
    assert OURS.silu_mul(none).shape == (0, 3)
    assert OURS.largest(none).shape == (0, 2)
