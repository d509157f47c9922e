"""Rows and the flat batch gathered from them, against a plain loop."""

from __future__ import annotations

import random

import torch

from services.worker.states import States
from services.worker.step import SAMPLES, StepInput
from tests.worker.columns import SHAPE, request, step


def put(states: States, given: StepInput) -> None:
    for row in given.freed_rows.tolist():
        states.free(row)
    for new in given.new_rows:
        states.add(new)
    states.grow(given)


def test_a_chunk_a_decode_and_a_shared_block_in_one_batch() -> None:
    states = States(SHAPE)
    put(
        states,
        step(
            1,
            [(0, 0, 3), (2, 5, 1), (1, 7, 1)],
            [request(0, [10, 11, 12, 13, 14]), request(2, [20, 21, 22, 23, 24, 25]), request(1, range(30, 38))],
            blocks={0: [9], 2: [4, 7], 1: [1, 2]},
        ),
    )
    spans, bad = states.spans(step(1, [(0, 0, 3), (2, 5, 1), (1, 7, 1)], first_writable=[0, 0, 8]))
    batch = states.batch(spans, [3, 4])
    assert bad == []
    assert batch.input_ids_T.tolist() == [10, 11, 12, 25, 37]
    assert batch.positions_T.tolist() == [0, 1, 2, 5, 7]
    assert batch.slots_T.tolist() == [36, 37, 38, 7 * 4 + 1, -1]
    assert batch.row_starts == (0, 3, 4, 5)
    assert batch.context_lens == (3, 6, 8)
    assert batch.block_table_RB.tolist() == [[9, 0], [4, 7], [1, 2]]
    assert batch.block_table_RB.dtype == torch.int32
    assert batch.logits_at_S.tolist() == [3, 4]


def test_a_sampled_token_is_the_next_steps_input() -> None:
    states = States(SHAPE)
    put(states, step(1, [(0, 0, 2)], [request(0, [5, 6])], blocks={0: [3]}))
    states.append(0, [42])
    spans, bad = states.spans(step(2, [(0, 2, 1)]))
    assert not bad
    assert states.batch(spans, [0]).input_ids_T.tolist() == [42]
    assert states.tokens(0, 3).tolist() == [5, 6, 42]


def test_rows_that_cannot_be_computed_are_told_apart() -> None:
    """No request, ids not known yet (the row before gave no token), and no block for a position."""
    states = States(SHAPE)
    put(
        states,
        step(
            1,
            [(0, 0, 2), (1, 0, 5), (3, 0, 4)],
            [request(row, range(5)) for row in (0, 1, 3)],
            blocks={0: [1], 1: [2], 3: [3]},
        ),
    )
    put(states, step(2, freed=[3]))
    spans, bad = states.spans(step(2, [(0, 4, 2), (1, 0, 5), (2, 0, 1), (3, 0, 1)]))
    assert spans == []
    assert bad == [0, 1, 2, 3]


def test_a_new_request_takes_nothing_over() -> None:
    states = States(SHAPE)
    put(states, step(1, [(0, 0, 8)], [request(0, range(8))], blocks={0: [1, 2]}))
    put(states, step(2, [(0, 0, 2)], [request(0, [50, 51], epoch=2)], freed=[0], blocks={0: [6]}))
    spans, bad = states.spans(step(2, [(0, 0, 2)]))
    assert not bad
    assert states.batch(spans, []).slots_T.tolist() == [24, 25]
    assert states.length(0) == 2
    assert states.request(0).epoch == 2  # type: ignore[union-attr]


def test_a_token_at_the_end_of_the_context_is_not_kept() -> None:
    states = States(SHAPE)
    states.add(request(0, range(SHAPE.max_model_len)))
    states.append(0, [1, 2])
    assert states.length(0) == SHAPE.max_model_len


def test_random_steps_against_a_plain_loop() -> None:
    rng = random.Random(0)
    states = States(SHAPE)
    tables: dict[int, list[int]] = {}
    ids: dict[int, list[int]] = {}
    for number in range(200):
        rows = rng.sample(range(4), rng.randint(1, 4))
        new, listed, blocks, writable = [], [], {}, []
        for row in rows:
            if row not in ids or rng.random() < 0.2:
                ids[row] = [rng.randrange(1000) for _ in range(rng.randint(1, 60))]
                tables[row] = []
                new.append(request(row, ids[row]))
            start = rng.randrange(len(ids[row]))
            end = rng.randint(start + 1, len(ids[row]))
            missing = max(0, -(-end // 4) - len(tables[row]))
            blocks[row] = [rng.randrange(64) for _ in range(missing)]
            tables[row] += blocks[row]
            listed.append((row, start, end - start))
            writable.append(rng.randrange(60))
        given = step(number, listed, new, blocks=blocks, first_writable=writable)
        put(states, given)
        spans, bad = states.spans(given)
        assert not bad
        batch = states.batch(spans, [])
        expected = [
            (ids[row][p], p, tables[row][p // 4] * 4 + p % 4 if p >= first else -1)
            for (row, start, count), first in zip(listed, writable, strict=True)
            for p in range(start, start + count)
        ]
        assert (
            list(zip(batch.input_ids_T.tolist(), batch.positions_T.tolist(), batch.slots_T.tolist(), strict=True))
            == expected
        )
        for index, (row, start, count) in enumerate(listed):
            used = -(-(start + count) // 4)
            assert batch.block_table_RB[index, :used].tolist() == tables[row][:used]
        assert {span.flags for span in spans} == {SAMPLES}
