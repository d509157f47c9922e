"""Edits of logits in the interpreter, against the features of the host: tests/kernels/test_triton.py starts them."""

from __future__ import annotations

import random

import pytest
import torch

from kernels.logits import reference, triton
from services.worker.sampling.device import DevicePosition
from tests.worker.edits import Rows, check_sequences_longer_than_the_row

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("vocab", "steps"),
    [(63, 12), (2049, 1), *(pytest.param(*more, marks=slow) for more in ((1, 8), (100, 30), (5000, 8)))],
)
def test_edits_are_those_of_the_host(vocab, steps):
    """To the last bit, with drafts, masks, and rows that go and come."""
    rng = random.Random(vocab)
    rows = Rows(vocab, vocab, 80, triton)
    for row in range(6):
        rows.put(row, rng.randint(1, 40), rng.randint(0, 5))
    for index in range(steps):
        rows.step(rng.sample(range(6), 4), drafts=3)
        rows.put(index % 6, rng.randint(1, 20))


def test_a_banned_sequence_may_be_longer_than_the_row():
    check_sequences_longer_than_the_row(triton)


def test_a_long_row_is_counted_in_many_parts():
    """More new ids than one program counts, and more places than one program edits."""
    rows = Rows(5, 40, 700, triton)
    rows.put(0, 300, 350, repetition_penalty=1.3, frequency_penalty=0.1, presence_penalty=-0.3)
    rows.step([0], drafts=1)
    rows.step([0], drafts=1)


def test_equal_drafts_weigh_once_where_two_programs_see_them():
    rows = Rows(6, 40, 700, triton, rows=1)
    rows.put(0, 100, 410, repetition_penalty=1.3, frequency_penalty=0.1)
    rows.tokens_RL[0, 510:514] = 39  # 512 places are a program's
    rows.compare([DevicePosition(0, 510 + drafts, drafts) for drafts in range(5)])


def test_counts_are_those_of_the_reference():
    rows, others = Rows(5, 20, 200, triton), Rows(5, 20, 200, reference)
    for each in (rows, others):
        each.put(0, 100, 60, repetition_penalty=1.3)
        each.step([0], masks=0)
    pool, other = rows.device._pool.words_N, others.device._pool.words_N
    seen = rows.device._rows[0].seen
    assert torch.equal(pool[seen : seen + 20], other[seen : seen + 20])
    for words in (pool, other):
        bits = words[seen + 20 : seen + 27]
        places = [place for place in range(224) if int(bits[place // 32]) >> place % 32 & 1]
        assert sorted(rows.tokens_RL[0, places].tolist()) == rows.tokens_RL[0, :160].unique().tolist()
