"""The table of requests in Triton's interpreter, against its reference."""

from __future__ import annotations

import pytest
import torch

from kernels.states import reference, triton
from kernels.states.reference import BLOCKS, TOKENS, Chosen, Gathered, Tables

ROWS, LENGTH, PAGE = 7, 2100, 3
UNTOUCHED = -77


def tables():
    """Ids and blocks, in larger memory."""
    ids = torch.randint(0, 1000, (ROWS, LENGTH + 5), dtype=torch.int32)[:, :LENGTH]
    blocks = torch.randint(0, 5000, (ROWS, LENGTH // PAGE + 3), dtype=torch.int32)[:, : LENGTH // PAGE]
    return ids, blocks


def ints(*rows):
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize("lengths", [(1, 1), (63, 2), (1025, 0, 100)], ids=str)
def test_stage(lengths):
    ids, blocks = tables()
    writes, first = [], 0
    for row, count in enumerate(lengths):
        for table, begin in ((TOKENS, LENGTH - count - row), (BLOCKS, row)):
            writes.append((table, row, begin, min(count, blocks.shape[1] - row), first))
            first += writes[-1][3]
    values = torch.arange(first, dtype=torch.int32)
    expected = ids.clone(), blocks.clone()
    reference.stage(ints(*writes), values, Tables(*expected, PAGE), max(lengths))
    triton.stage(ints(*writes), values, Tables(ids, blocks, PAGE), max(lengths))
    assert torch.equal(ids, expected[0])
    assert torch.equal(blocks, expected[1])


def gathered(tokens, spans, blocks):
    flat = [torch.full((tokens + 3,), UNTOUCHED, dtype=torch.int64) for _ in range(3)]
    starts, contexts, table = ((spans + 3,), (spans + 2,), (spans + 1, blocks + 5))
    rest = [torch.full(size, UNTOUCHED, dtype=torch.int32) for size in (starts, contexts, table)]
    return Gathered(*flat, *rest)


@pytest.mark.parametrize(
    "spans",
    [
        [(4, 0, 1, 0, 0)],
        [(0, 99, 1, 0, 0), (6, 0, 63, 0, 0), (2, 5, 1, 7, 0), (3, LENGTH - 3, 3, LENGTH, 2)],
        [(5, 10, 1100, 600, 0), (1, 41, 1, 0, 9), (0, 7, 4, 9, 0)],
    ],
    ids=["one", "some", "long"],
)
def test_gather(spans):
    """(row, begin, count, first writable, shift): the flat tokens follow."""
    ids, blocks = tables()
    columns, flat = [], 0
    for row, begin, count, writable, shift in spans:
        columns.append((row, begin, count, flat, writable, shift))
        flat += count
    held = max(-(-(begin + count) // PAGE) for _, begin, count, *_ in spans)
    expected, found = gathered(flat, len(spans), held), gathered(flat, len(spans), held)
    longest = max(held, *(count for _, _, count, *_ in spans))
    reference.gather(ints(*columns), Tables(ids, blocks, PAGE), expected, longest)
    triton.gather(ints(*columns), Tables(ids, blocks, PAGE), found, longest)
    for name, one, other in zip(Gathered._fields, found, expected, strict=True):
        assert torch.equal(one, other), name
    assert expected.slots_T[flat] == UNTOUCHED
    assert (expected.ids_T[:flat] >= 0).all()


def by_hand(tokens, drafts, raw, edited):
    """How many count, told another way: the longest beginning in which all but the last are drafts."""
    lost = [not (abs(one) < float("inf")) or not other > -float("inf") for one, other in zip(raw, edited, strict=True)]
    count = 0
    while count <= len(drafts) and not lost[count]:
        count += 1
        if count > len(drafts) or tokens[count - 1] != drafts[count - 1]:
            break
    return count


@pytest.mark.parametrize("most", [0, 1, 4, 40])
def test_append(most):
    numbers = torch.Generator().manual_seed(most)
    ids, _ = tables()
    spans, first, hand = [], 0, []
    tokens, raw, edited = [], [], []
    for row in range(ROWS):
        drafts = int(torch.randint(0, most + 1, (), generator=numbers)) if row else most
        known = LENGTH - drafts - (row == 1) if row % 2 else 17 + row
        proposed = torch.randint(0, 2, (drafts,), generator=numbers, dtype=torch.int32)
        ids[row, known : known + drafts] = proposed
        drawn = torch.randint(0, 2, (drafts + 1,), generator=numbers, dtype=torch.int32)
        if row < 2:
            drawn[:drafts] = proposed  # all are right
        values = torch.randn(2, drafts + 1, generator=numbers)
        if row == 2:
            values[0, -1] = torch.nan
        if row == 3:
            values[1, drafts // 2] = -torch.inf
        if row == 5:
            values[0, 0] = torch.inf
        spans.append((-1 if row == 4 else row, known, drafts, first))
        hand.append(0 if row == 4 else by_hand(drawn.tolist(), proposed.tolist(), *values.tolist()))
        tokens.append(drawn)
        raw.append(values[0])
        edited.append(values[1])
        first += drafts + 1
    places = torch.zeros(first)
    pairs = [torch.stack((places, torch.cat(values)), 1) for values in (raw, edited)]
    expected, counted, found = ids.clone(), torch.full((ROWS,), 99, dtype=torch.int32), torch.empty_like(ids[:, 0])
    chosen = Chosen(torch.cat(tokens), *pairs)
    reference.append(ints(*spans), chosen, expected, counted, most)
    triton.append(ints(*spans), chosen, ids, found, most)
    assert counted.tolist() == hand
    assert found.tolist() == hand
    assert torch.equal(ids, expected)
    assert len(set(hand)) > 1


def test_tokens_may_be_the_places_of_pairs():
    ids, _ = tables()
    pairs = torch.randn(3, 2)
    pairs.view(torch.int32)[:, 0] = torch.tensor([11, 12, 13], dtype=torch.int32)
    spans, counted = ints((4, 9, 0, 0), (2, 9, 0, 2)), torch.zeros(2, dtype=torch.int32)
    triton.append(spans, Chosen(pairs[:, 0].view(torch.int32), pairs, pairs), ids, counted, 0)
    assert (ids[4, 9].item(), ids[2, 9].item(), counted.tolist()) == (11, 13, [1, 1])


def test_a_token_at_the_end_of_the_context_counts_and_has_no_place():
    ids, _ = tables()
    before = ids.clone()
    counted = torch.empty(1, dtype=torch.int32)
    pairs = torch.zeros(1, 2)
    triton.append(ints((3, LENGTH, 0, 0)), Chosen(torch.tensor([5], dtype=torch.int32), pairs, pairs), ids, counted, 0)
    assert counted.tolist() == [1]
    assert torch.equal(ids, before)
