"""Attention in Triton's interpreter: rows that lie on the device, tiles of two sizes, caches of another type."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.attention import reference as attention_reference
from kernels.attention.rows import Placed, Rows
from kernels.attention.tiles import Heads, Kind, lay_out, lay_out_alike
from kernels.attention.triton import Attention, product_dtype
from kernels.kv_write.float8 import FLOAT8
from kernels.kv_write.reference import stored
from kernels.launch import Chip
from tests.kernels.interpreted.memory import inside
from tests.kernels.paged import make_case

CLOSE = {"atol": 2e-5, "rtol": 1e-4}


def placed(rows: Rows, bound: int, padding: int = 0) -> Rows:
    """The same rows on the device and some that only fill a place; the tuple says no more than `bound`."""
    starts = (*rows.row_starts, *(rows.row_starts[-1] + 1 + index for index in range(padding)))
    contexts = (*rows.context_lens, *[0] * padding)
    never = rows.block_table_RB.new_full((padding, rows.block_table_RB.shape[1]), 10**6)
    numbers = (torch.tensor(x, dtype=torch.int32) for x in (starts, contexts))
    table = torch.cat((rows.block_table_RB, never))
    return Rows(starts, (bound,) * len(contexts), table, rows.block_size, Placed(*numbers))


@pytest.mark.parametrize(("window", "splits"), [(None, 1), (30, 1), (None, None)])
def test_placed_rows_are_read_from_the_device_and_padding_gives_zeros(window, splits):
    case = make_case([(70, 1), (3, 1), (150, 1)], heads=4, kv_heads=2, size=24)
    expected = attention_reference.Attention(case.rows, window)(case.q, case.k_cache, case.v_cache, 0.3)
    q = inside(torch.cat((case.q, torch.full((2, 4, 24), 9.0))))
    rows = placed(case.rows, 1000, padding=2)
    found = Attention(rows, window, splits=splits)(q, case.k_cache, case.v_cache, 0.3)
    torch.testing.assert_close(found[:3], expected, **CLOSE)
    assert torch.equal(found[3:], torch.zeros(2, 4, 24))


def test_a_second_pass_over_placed_rows_brings_nothing_to_the_device(monkeypatch):
    """As a graph is captured after a first pass; then other numbers are written where the first ones lie."""
    case = make_case([(20, 1), (33, 1)], heads=4, kv_heads=2, size=8)
    rows = placed(case.rows, 64)
    Attention(rows, None)(case.q, case.k_cache, case.v_cache, 0.3)
    monkeypatch.setattr(torch, "tensor", None)
    launches, found = Attention(rows, None).plan(case.q, case.k_cache, case.v_cache, 0.3)
    monkeypatch.undo()
    rows.placed.contexts_R.copy_(torch.tensor([11, 0]))
    for launch in launches:
        launch.run()
    shorter = replace(case.rows, row_starts=(0, 1), context_lens=(11,))
    expected = attention_reference.Attention(shorter, None)(case.q[:1], case.k_cache, case.v_cache, 0.3)
    torch.testing.assert_close(found[:1], expected, **CLOSE)
    assert torch.equal(found[1:], torch.zeros(1, 4, 8))


def test_the_grid_of_placed_rows_does_not_follow_their_contexts():
    grids = []
    for before in (10, 900):
        case = make_case([(before, 1), (before, 1)], heads=4, kv_heads=2, size=8)
        launches, _ = Attention(placed(case.rows, 2048), None).plan(case.q, case.k_cache, case.v_cache, 0.3)
        grids.append([launch.grid for launch in launches])
    assert grids[0] == grids[1]
    assert grids[0][0][2] == 2048 // 256


def plan(case, window=None, **options):
    return Attention(case.rows, window, **options).plan(case.q, case.k_cache, case.v_cache, 0.3)[0]


@pytest.mark.parametrize("splits", [1, 3])
def test_a_decode_beside_a_prefill_has_tiles_of_its_own(splits):
    case = make_case([(40, 1), (4, 23), (0, 5), (90, 2)], heads=2, kv_heads=1, size=16)
    expected = attention_reference.Attention(case.rows, None)(case.q, case.k_cache, case.v_cache, 0.3)
    launches = plan(case, splits=splits)
    assert [launch.constants["BLOCK_Q"] for launch in launches[:: min(splits, 2)]] == [16, 32]
    found = Attention(case.rows, None, splits=splits)(case.q, case.k_cache, case.v_cache, 0.3)
    torch.testing.assert_close(found, expected, **CLOSE)


def test_a_decode_lists_no_tiles_and_a_prefill_begins_with_the_most_keys():
    kind, chip, device = Kind(64, 2, 2, window=False), Chip(90, 132), torch.device("cpu")
    decode = make_case([(500, 1), (7, 2)], heads=8, kv_heads=2, size=8).rows
    (work,) = lay_out(decode, Heads(4, 2), kind, chip, device, window=None, splits=1)
    assert (work.tiles_X2, work.count, work.queries, work.blocks.queries) == (None, 2, 2, 16)
    mixed = make_case([(500, 1), (0, 70), (100, 40)], heads=8, kv_heads=2, size=8).rows
    few, many = lay_out(mixed, Heads(4, 2), kind, chip, device, window=None, splits=1)
    assert few.tiles_X2.tolist() == [[0, 0]]
    assert many.tiles_X2.tolist() == [[2, 32], [2, 0], [1, 64], [1, 32], [1, 0]]  # 128 // 4 queries in each
    (alike,) = lay_out_alike(mixed, Heads(4, 2), kind, chip, device)
    assert alike.count == 1 + 5 + 3, "16 queries in each"


@pytest.mark.parametrize(
    ("window", "shape", "splits"), [(None, (4, 2, 24), 1), (None, (3, 1, 63), 3), (25, (4, 2, 24), 1)]
)
def test_float8_is_widened(window, shape, splits, dtype):
    heads, kv_heads, size = shape
    case = make_case([(70, 1), (10, 9), (3, 1)], heads=heads, kv_heads=kv_heads, size=size)
    q, kept = case.q.to(dtype), [stored(x, FLOAT8) for x in (case.k_cache, case.v_cache)]
    expected = attention_reference.Attention(case.rows, window)(q, *(x.to(dtype) for x in kept), 0.2)
    found = Attention(case.rows, window, splits=splits)(q, *kept, 0.2)
    tolerance = CLOSE if dtype == torch.float32 else {"atol": 4e-3, "rtol": 4e-3}
    torch.testing.assert_close(found, expected, **tolerance)


def test_whole_blocks_are_not_masked_and_give_the_same():
    """Blocks that lie wholly before the first query of a tile."""
    case = make_case([(100, 50), (0, 40)], heads=4, kv_heads=1, size=8)
    q, keys, values = (x.half() for x in (case.q, case.k_cache, case.v_cache))
    launches, found = Attention(case.rows, None).plan(q, keys, values, 0.3)
    assert launches[0].constants["APART"]
    for launch in launches:
        launch.run()
    expected = attention_reference.Attention(case.rows, None)(q, keys, values, 0.3)
    torch.testing.assert_close(found, expected, atol=4e-3, rtol=4e-3)


def test_what_is_multiplied():
    assert product_dtype(torch.float32, FLOAT8) == torch.float32
    assert product_dtype(torch.float16, FLOAT8) == torch.float16
    assert product_dtype(torch.bfloat16, FLOAT8) == torch.float16
    assert product_dtype(torch.bfloat16, torch.float32) == torch.float32
    assert product_dtype(torch.bfloat16, torch.bfloat16) == torch.float32, "in the interpreter"


def test_bad_input_is_refused():
    case = make_case([(3, 1)], heads=2, kv_heads=2, size=8)
    with pytest.raises(ValueError, match=r"scale must be more than 0, not -0\.5"):
        Attention(case.rows, None)(case.q, case.k_cache, case.v_cache, -0.5)
    with pytest.raises(ValueError, match="lie in the cache in different ways"):
        Attention(case.rows, None)(case.q, case.k_cache, case.v_cache.transpose(1, 2), 0.5)
