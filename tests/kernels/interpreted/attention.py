"""Attention in Triton's interpreter: rows that lie on the device, as a captured graph has them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.attention import reference as attention_reference
from kernels.attention.rows import Placed, Rows
from kernels.attention.triton import Attention
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
