"""What is sampled on a device, against the specification in torch: tests/kernels/test_triton.py runs this."""

from __future__ import annotations

import math
import random

import pytest
import torch
import triton
import triton.language as tl

from kernels.largest.triton import pairs
from kernels.launch import rows_of
from kernels.ops import Cut
from kernels.selection import cutoffs, ranks
from kernels.selection.draws import Draws
from kernels.selection.noise import UNIT, bits_of_noise, noise, reach, reached
from kernels.selection.sampling import plan_sample, sample
from kernels.selection.triton import Selection
from services.worker.sampling import noise as noise_of_torch
from services.worker.sampling.counter import GOLDEN, MULTIPLIER_1, MULTIPLIER_2, key, mix, signed
from services.worker.sampling.draw import Drawing
from tests.kernels.interpreted.memory import inside

slow = pytest.mark.slow
ALL = (1.0, 0, 1.0, 0.0)
# Temperature, top_k, top_p, min_p.
CUTOFFS = [
    (1.0, 3, 1.0, 0.0), (0.7, 50, 0.9, 0.0), (1.0, 0, 0.9, 0.0), (1.5, 0, 0.5, 0.0), (1.0, 0, 0.999999, 0.0),
    (1.0, 0, 1.0, 0.05), (2.0, 0, 0.7, 0.01), (0.3, 40, 0.9, 0.001), (1.0, 200, 0.95, 0.0), (1.0, 1, 0.1, 1.0),
    (1.0, 0, 1e-9, 0.0), (9.0, 150, 1.0, 0.0), ALL, (0.5, 0, 1.0, 0.0),
]  # fmt: skip


def cuts_of(x_NV: torch.Tensor, kinds: list[tuple[float, int, float, float]]) -> list[Cut]:
    """One for each row."""
    best = x_NV.amax(1).tolist()
    return [Cut(row, best[row], signed(key(row, 7)), *kinds[row % len(kinds)]) for row in range(len(x_NV))]


def draws_of(cuts: list[Cut], vocab: int) -> Draws:
    lows = [math.log(cut.min_p) if cut.min_p else -math.inf for cut in cuts]
    return Draws(
        torch.tensor([(1, cut.key, cut.top_k or vocab) for cut in cuts]),
        torch.tensor([(cut.temperature, cut.top_p, low) for cut, low in zip(cuts, lows, strict=True)]).double(),
    )


def logits(rows: int, vocab: int, spread: float) -> torch.Tensor:
    """Multiples of 1/8, so that many are equal."""
    numbers = torch.Generator().manual_seed(vocab)
    return (torch.randn(rows, vocab, generator=numbers) * spread * 8).round() / 8


def random_cuts(x_NV: torch.Tensor, rng: random.Random) -> list[Cut]:
    """One for each row but the second."""
    vocab = x_NV.shape[1]
    return [
        Cut(
            row,
            best,
            key=rng.getrandbits(64) - 2**63,
            temperature=rng.choice([0.5, 1.0, 2.0]),
            top_k=rng.choice([0, 0, 1, 5, vocab - 1]),
            top_p=rng.choice([0.3, 0.9, 0.999, 1.0]),
            min_p=rng.choice([0.0, 0.0, 0.05, 0.5]),
        )
        for row, best in enumerate(x_NV.amax(1).tolist())
        if row != 1
    ]


@pytest.mark.parametrize(
    ("rows", "vocab", "spread"),
    [
        (3, 300, 0.25),
        *(pytest.param(*more, marks=slow) for more in ((5, 5000, 4.0), (40, 24, 4.0), (20, 6000, 0.25))),
    ],
)
def test_what_is_chosen_is_what_torch_chooses(rows, vocab, spread):
    x_NV = logits(rows, vocab, spread)
    x_NV[0, ::3] = -torch.inf
    ours, torchs = Selection(), Drawing(vocab, torch.device("cpu"))
    cuts = random_cuts(x_NV, random.Random(vocab))
    assert ours.draw(x_NV.clone(), cuts) == torchs.draw(x_NV.clone(), cuts)
    whole = [cut._replace(top_k=0, top_p=1.0, min_p=0.0) for cut in cuts]
    assert ours.draw(x_NV.clone(), whole) == torchs.draw(x_NV.clone(), whole)
    assert ours.largest(x_NV) == torchs.largest(x_NV)
    for found, expected in zip(ours.top(x_NV, 5), torchs.top(x_NV, 5), strict=True):
        assert torch.equal(found, expected)
    tokens = torch.randint(0, vocab, (rows,)).tolist()
    (totals, ranks_), (expected_totals, expected_ranks) = ours.weigh(x_NV, tokens), torchs.weigh(x_NV, tokens)
    assert ranks_ == expected_ranks
    torch.testing.assert_close(torch.tensor(totals), torch.tensor(expected_totals), atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("vocab", "spread", "most", "step"),
    [
        (900, 3.0, 1024, 1),
        (200, 0.25, 32, 2),
        *(
            pytest.param(*more, 1, marks=slow)
            for more in ((63, 1.0, 16), (5000, 4.0, 1024), (5000, 0.3, 1024), (3000, 1.0, 64))
        ),
    ],
)
def test_every_cutoff_draws_the_tokens_of_the_specification(vocab, spread, most, step, monkeypatch):
    """Peaked rows that their candidates settle, and with few candidates allowed flat ones that are drawn again."""
    monkeypatch.setattr(cutoffs, "CANDIDATES", most)
    kinds = CUTOFFS[::step]
    x_NV = logits(len(kinds), vocab, spread)
    x_NV[2, vocab // 2 :] = -torch.inf
    cuts = cuts_of(x_NV, [(heat, k if k < vocab else 0, p, low) for heat, k, p, low in kinds])
    expected = Drawing(vocab, torch.device("cpu")).draw(x_NV.clone(), cuts)
    x_NV = inside(x_NV)
    launches, tokens = plan_sample(x_NV, pairs(x_NV), draws_of(cuts, vocab), cuts=True)
    for launch in launches[:-1]:
        launch.run()
    left = (tokens < 0).sum()
    assert left == 0 if vocab < most else 0 < left < len(kinds)
    launches[-1].run()
    assert tokens.tolist() == expected


@pytest.mark.parametrize("most", [1024, pytest.param(64, marks=slow)])
def test_of_equals_the_lowest_ids_are_kept(most, monkeypatch):
    """Rows of equal logits, of which a head of ids is kept, however many candidates there are."""
    monkeypatch.setattr(cutoffs, "CANDIDATES", most)
    for vocab in (300, 127):
        x_NV = torch.zeros(4, vocab)
        x_NV[1, ::2] = -1.0
        cuts = cuts_of(x_NV, [(1.0, 7, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 100, 0.25, 0.0), (1.0, 0, 1.0, 1.0)])
        tokens = sample(x_NV, pairs(x_NV), draws_of(cuts, vocab), cuts=True).tolist()
        assert tokens == Drawing(vocab, torch.device("cpu")).draw(x_NV.clone(), cuts)
        assert tokens[0] < 7
        assert tokens[2] < 25


def test_rows_that_are_greedy_or_not_finite_lie_beside_drawn_ones():
    vocab = 200
    x_NV = logits(7, vocab, 2.0)
    x_NV[1, 5], x_NV[3, 9], x_NV[4] = torch.nan, torch.inf, -torch.inf
    kinds = [ALL, ALL, (1.0, 4, 0.9, 0.0)]
    cuts = cuts_of(x_NV, kinds)
    draws = draws_of(cuts, vocab)
    draws.wholes_P3[6], draws.parts_P3[6] = 0, 0  # greedy, and as a row that pads a batch
    drawn = [0, 2, 5]
    expected = Drawing(vocab, torch.device("cpu")).draw(x_NV.clone(), [cuts[row] for row in drawn])
    likeliest = pairs(x_NV).view(torch.int32)[:, 0]
    for given in (x_NV, inside(x_NV)):
        found = sample(given, pairs(given), draws, cuts=True)
        assert found.dtype == torch.int32
        assert found[drawn].tolist() == expected
        assert torch.equal(found[[1, 3, 4, 6]], likeliest[[1, 3, 4, 6]])
        assert torch.equal(sample(given, pairs(given), None, cuts=False), likeliest)
    none = torch.empty(0, vocab)
    assert sample(none, pairs(none), Draws(torch.empty(0, 3).long(), torch.empty(0, 3).double()), True).shape == (0,)


def test_other_logits_are_refused():
    x = torch.zeros(1, 8).half()
    with pytest.raises(ValueError, match=r"float32, and x_PV is torch\.float16"):
        sample(x, pairs(x), None, cuts=False)


@pytest.mark.parametrize(("vocab", "count"), [(1, 1), pytest.param(63, 63, marks=slow), (100, 1), (300, 7)])
def test_the_likeliest_and_weights(vocab, count):
    x_NV = logits(4, vocab, 1.0)
    x_NV[1] = 0.0
    x_NV[1, vocab // 2] = -0.0  # equal to the others
    x_NV[2] = -torch.inf
    x_NV[2, -1] = 3.0
    plain = Drawing(vocab, torch.device("cpu"))
    for given in (x_NV, inside(x_NV)):
        values, ids = ranks.top(given, count)
        expected_values, expected_ids = plain.top(x_NV, count)
        assert torch.equal(values, expected_values)
        assert torch.equal(ids, expected_ids)
        tokens = torch.arange(4, dtype=torch.int32) % vocab
        totals, places = ranks.weigh(rows_of(given), tokens)
        expected_totals, expected_places = plain.weigh(x_NV, tokens.tolist())
        assert places.tolist() == expected_places
        torch.testing.assert_close(totals, torch.tensor(expected_totals), atol=1e-6, rtol=1e-6)


def test_more_likeliest_than_there_are():
    values, ids = ranks.top(torch.tensor([[1.0, 3.0, 2.0]]), 9)
    assert (values.tolist(), ids.tolist()) == ([[3.0, 2.0, 1.0]], [[1, 2, 0]])


def unmixed(number: int) -> int:
    """What counter.mix makes this number of."""
    for factor, shift in ((1, 31), (MULTIPLIER_2, 27), (MULTIPLIER_1, 30)):
        number = number * pow(factor, -1, 1 << 64) % (1 << 64)
        number ^= number >> shift ^ number >> 2 * shift
    return number


def test_noise_is_that_of_the_specification_at_both_ends():
    assert mix(unmixed(12345)) == 12345
    ids = torch.arange(4096)
    keys = ids * 0x1234567890AB
    for place, wanted in ((0, 0), (1, 2**64 - 1)):
        keys[place] = signed((unmixed(wanted) - (place + 1) * GOLDEN) % 2**64)
    bits = torch.empty(4096, dtype=torch.int64)
    exact, rough, most = torch.empty(4096).double(), torch.empty(4096), torch.empty(4096)
    write_noise[(1,)](keys, bits, exact, rough, most, BLOCK=4096)
    assert torch.equal(bits, noise_of_torch.bits(noise_of_torch.counters(ids) + keys))
    assert bits[:2].tolist() == [0, 2**53 - 1]
    expected = noise_of_torch.gumbel(keys, ids)
    torch.testing.assert_close(exact[2:], expected[2:], atol=1e-13, rtol=1e-13)
    torch.testing.assert_close(rough[2:].double(), expected[2:], atol=1e-4, rtol=1e-5)
    # The fewest bits and the most: -log(2^-54), and -log(-log(2^-54)).
    torch.testing.assert_close(exact[:2].tolist(), [54 * math.log(2), -math.log(54 * math.log(2))], rtol=1e-15, atol=0)
    torch.testing.assert_close(rough[:2].double(), exact[:2], atol=1e-5, rtol=0)
    above = most + 2.5 - exact  # beside a scaled logit of -2.5
    assert above.min() > -1e-4
    assert above[(exact > 0) & (bits > 2**40)].max() < 0.2


@triton.jit
def write_noise(keys, bits, exact, rough, most, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    key = tl.load(keys + at)
    drawn = bits_of_noise(key, at)
    tl.store(bits + at, drawn)
    tl.store(exact + at, noise(drawn, tl.float64))
    tl.store(rough + at, noise(drawn, tl.float32))
    tl.store(most + at, reached(reach(tl.zeros_like(at).to(tl.float32) - 2.5 * UNIT, key, at)))
