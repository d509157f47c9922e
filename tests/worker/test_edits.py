"""Edits of logits on the device, with their reference in torch, against the features of the host."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from kernels.logits import reference
from kernels.logits.record import Asked, pack
from services.worker.sampling.device import DeviceFeatures, DevicePosition
from services.worker.sampling.pool import Pool
from tests.worker.columns import packed, request
from tests.worker.edits import CPU, Rows, check_sequences_longer_than_the_row

INF = float("inf")


@pytest.mark.parametrize(("seed", "vocab"), [(seed, vocab) for seed in range(6) for vocab in (1, 31, 100)])
def test_what_is_edited_is_what_the_host_edits(seed: int, vocab: int) -> None:
    rows = Rows(seed, vocab, 64, reference)
    rng = random.Random(seed)
    for row in range(6):
        rows.put(row, rng.randint(1, 20), rng.randint(0, 5))
    for index in range(12):
        rows.step(rng.sample(range(6), rng.randint(1, 6)), drafts=3)
        if index % 3 == 2:
            rows.put(index % 6, rng.randint(1, 20))


def test_a_banned_sequence_may_be_longer_than_the_row() -> None:
    check_sequences_longer_than_the_row(reference)


def features(vocab: int = 10) -> DeviceFeatures:
    return DeviceFeatures(vocab, CPU, reference)


def edited(device: DeviceFeatures, ids: list[int], mask: np.ndarray | None = None, drafts: int = 0) -> list[float]:
    """Logits of 0 at one position behind these ids, on row 0."""
    x = torch.zeros(1, 10)
    device.apply(x, [DevicePosition(0, len(ids), drafts, mask)], torch.tensor([ids], dtype=torch.int32))
    values: list[float] = x[0].tolist()
    return values


def test_a_grammar_that_allows_nothing_but_an_end_is_not_held_up() -> None:
    device = features()
    device.add(request(0, [1], min_tokens=5, eos_ids=(2, 7), banned_sequences=((3,),)))
    only_end, also_banned, other = packed([2], [2, 3], [2, 4], vocab_size=10)
    assert [place for place, value in enumerate(edited(device, [1], only_end)) if value == 0] == [2]
    assert [place for place, value in enumerate(edited(device, [1], also_banned)) if value == 0] == [2]
    assert [place for place, value in enumerate(edited(device, [1], other)) if value == 0] == [4]
    assert [place for place, value in enumerate(edited(device, [1] * 6, other)) if value == 0] == [2, 4]


def test_drafts_weigh_and_are_not_kept() -> None:
    device = features()
    device.add(request(0, [1, 5], frequency_penalty=1.0, presence_penalty=0.5))
    assert edited(device, [1, 5, 3, 4, 4, 3], drafts=3) == [0, 0, 0, -2.5, -2.5, 0, 0, 0, 0, 0]
    assert edited(device, [1, 5, 3, 6]) == [0, 0, 0, -1.5, 0, 0, -1.5, 0, 0, 0]


def test_ids_that_were_replaced_are_counted_anew() -> None:
    device = features()
    device.add(request(0, [1], frequency_penalty=1.0))
    assert edited(device, [1, 3, 4])[3:5] == [-1, -1]
    assert edited(device, [1, 3])[3:5] == [-1, 0]
    assert edited(device, [1, 3, 5])[3:6] == [-1, 0, -1]
    device.recount(0)
    assert edited(device, [1, 6, 6])[3:7] == [0, 0, 0, -2]


def test_a_row_that_asks_for_nothing_takes_nothing() -> None:
    device = features()
    held = device.nbytes
    device.add(request(0, [1], eos_ids=(2,), temperature=0.5, top_p=0.3, logprobs=4))
    assert not device.edits(0)
    assert edited(device, [1, 2]) == [0] * 10
    device.add(request(0, [1], logit_bias=((4, 2.5), (4, -1.0))))
    assert device.edits(0)
    assert edited(device, [1, 2])[4] == -1
    device.free(0)
    assert not device.edits(0)
    assert edited(device, [1, 2]) == [0] * 10
    assert device.nbytes == held


def test_rows_that_come_and_go_leave_no_memory_behind() -> None:
    device = DeviceFeatures(5000, CPU, reference)
    ids = torch.zeros(40, 8, dtype=torch.int32)
    for _ in range(3):
        for row in range(40):
            device.add(request(row, [0], presence_penalty=1.0, allowed_ids=tuple(range(row + 1))))
        x = torch.zeros(40, 5000)
        device.apply(x, [DevicePosition(row, 1 + row % 8) for row in range(40)], ids)
        assert torch.equal((x > -INF).sum(1), torch.arange(1, 41))
        assert x[:, 0].tolist() == [0.0 if row % 8 == 0 else -1.0 for row in range(40)]
        held = device.nbytes
        for row in range(40):
            device.free(row)
    assert device.nbytes == held <= 2 * 40 * 4 * 5200 + 2**18


def test_what_is_reserved_suffices_for_rows_with_penalties() -> None:
    device = DeviceFeatures(5000, CPU, reference)
    device.reserve(40, 8)
    held = device.nbytes
    assert 40 * 4 * 5000 < held < 1.1 * 40 * 4 * 5000
    for row in range(40):
        device.add(request(row, [0], presence_penalty=1.0, allowed_ids=(1, 4999)))
    positions = [DevicePosition(row, 2) for row in range(40)]
    device.apply(torch.zeros(40, 5000), positions, torch.zeros(40, 8, dtype=torch.int32))
    assert device.nbytes == held


def test_pieces_of_the_pool_never_overlap() -> None:
    rng = random.Random(3)
    pool = Pool(CPU, 64)
    held: dict[int, tuple[int, int]] = {}
    for turn in range(400):
        if held and rng.random() < 0.45:
            begin = rng.choice(list(held))
            words, value = held.pop(begin)
            assert (pool.words_N[begin : begin + words] == value).all()
            pool.give(begin)
        else:
            words = rng.randint(1, 100)
            begin = pool.take(words)
            pool.words_N[begin : begin + words] = turn
            held[begin] = (words, turn)
    for begin, (words, value) in held.items():
        assert (pool.words_N[begin : begin + words] == value).all()
        pool.give(begin)
    assert pool.used == 0
    assert pool.take(len(pool.words_N)) == 0, "what was given back is one piece"
    with pytest.raises(KeyError):
        pool.give(16)


@pytest.mark.parametrize("name", ["allowed_ids", "banned_sequences", "bias", "end_ids"])
def test_ids_outside_the_vocabulary_are_refused_by_name(name: str) -> None:
    values = {"banned_sequences": [[3, 10]], "bias": [(10, 1.0)]}
    with pytest.raises(ValueError, match=rf"{'logit_bias' if name == 'bias' else name} has an id outside \[0, 10\)"):
        pack(Asked(prompt_len=1, until=2, **{name: values.get(name, [-1])}), 10)


def test_what_does_not_fit_is_refused_before_anything_is_edited() -> None:
    device = features()
    device.add(request(0, [1], presence_penalty=1.0))
    tokens = torch.ones(2, 4, dtype=torch.int32)
    good = DevicePosition(0, 2)
    for position, message in (
        (DevicePosition(0, 5), "outside the table of 2 rows of 4 ids"),
        (DevicePosition(0, 2, drafts=3), "outside the table"),
        (DevicePosition(2, 1, mask=np.zeros(4, np.uint8)), "outside the table"),
        (DevicePosition(1, 1, mask=np.zeros(2, np.uint8)), r"positions\[1\].mask has 2 bytes, not 4"),
    ):
        x = torch.zeros(2, 10)
        with pytest.raises(ValueError, match=message):
            device.apply(x, [good, position], tokens)
        assert torch.equal(x, torch.zeros(2, 10))
    with pytest.raises(ValueError, match=r"x_PV is torch.float32 of \(1, 9\), not float32 of \(1, 10\)"):
        device.apply(torch.zeros(1, 9), [good], tokens)
    x = torch.zeros(1, 10)
    device.apply(x, [good], tokens)
    assert x[0].tolist() == [0, -1] + [0] * 8, "nothing was counted before"
