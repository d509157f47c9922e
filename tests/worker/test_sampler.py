"""The sampler against the plain reference, its distributions, and the cases that other servers got wrong."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from kernels.native.build import Unavailable
from kernels.native.library import Pool, load
from kernels.native.selection import Selection as NativeSelection
from kernels.ops import Cut, Selection
from services.worker.sampling.counter import key, signed
from services.worker.sampling.draw import Drawing
from services.worker.sampling.feature import Position
from services.worker.sampling.order import largest
from services.worker.sampling.sampler import Sampled, Sampler
from services.worker.step import ROW_NO_TOKEN, ROW_NOT_FINITE, ROW_OK, Int32, SamplingParams
from tests.worker.columns import ints, request
from tests.worker.reference_sampler import reference

CPU = torch.device("cpu")


@functools.cache
def native() -> Selection:
    """Skips a test where there are no native kernels."""
    try:
        library = load("auto")
    except Unavailable as error:
        pytest.skip(str(error))
    return NativeSelection(library, Pool(library, 2, 100))


def chosen_by(name: str, vocab: int) -> Selection:
    return native() if name == "native" else Drawing(vocab, CPU)


def at(rows: Sequence[int], tokens: Sequence[Int32]) -> list[Position]:
    """Positions behind these ids."""
    return [Position(row, before) for row, before in zip(rows, tokens, strict=True)]


def sample_one(logits: Sequence[float], tokens: Sequence[int] = (0,), prompt_len: int = 1, **sampling: Any) -> Sampled:
    sampler = Sampler(len(logits), CPU)
    sampler.add(request(0, tokens, prompt_len, **sampling))
    return sampler.sample(torch.tensor([list(logits)], dtype=torch.float32), at([0], [ints(*tokens)]))[0]


def draw_many(logits: Sequence[float], count: int, **sampling: Any) -> list[int]:
    """Frequencies over `count` positions of one seed."""
    sampler = Sampler(len(logits), CPU)
    sampler.add(request(0, [0], **sampling))
    seen = [0] * len(logits)
    zeros = np.zeros(count, np.int32)
    for first in range(0, count, 1000):
        tokens = [zeros[: first + position + 1] for position in range(1000)]
        for result in sampler.sample(torch.tensor([list(logits)] * 1000), at([0] * 1000, tokens)):
            assert result.token is not None
            seen[result.token] += 1
    return seen


def random_params(rng: random.Random, vocab: int) -> dict[str, Any]:
    """Numbers that floats hold exactly, so that both implementations compute the same."""
    some = lambda: tuple(rng.sample(range(vocab), rng.randint(1, 6)))  # noqa: E731
    params: dict[str, Any] = {"seed": rng.getrandbits(64)}
    choices: dict[str, Any] = {
        "temperature": lambda: rng.choice([0.0, 0.5, 1.0, 2.0, 8.0]),
        "top_p": lambda: rng.choice([0.01, 0.3, 0.9, 0.999]),
        "top_k": lambda: rng.choice([1, 2, 5, vocab - 1, vocab, 2 * vocab]),
        "min_p": lambda: rng.choice([0.001, 0.05, 0.5, 1.0]),
        "repetition_penalty": lambda: rng.choice([0.5, 2.0]),
        "frequency_penalty": lambda: rng.choice([-0.5, 0.25, 2.0]),
        "presence_penalty": lambda: rng.choice([-1.0, 0.5]),
        "logit_bias": lambda: tuple((token, rng.choice([-100.0, -1.5, 4.0])) for token in some()),
        "allowed_ids": some,
        "banned_sequences": lambda: tuple(some()[: rng.randint(1, 2)] for _ in range(3)),
        "min_tokens": lambda: rng.randint(1, 12),
        "eos_ids": some,
        "stop_ids": some,
    }
    for name, choose in choices.items():
        if rng.random() < 0.3:
            params[name] = choose()
    return params


@pytest.mark.parametrize("selection", ["torch", "native"])
@pytest.mark.parametrize(
    ("vocab", "cases", "spread"), [(24, 400, 4.0), (700, 40, 4.0), (700, 20, 0.25), (6000, 12, 0.25)]
)
def test_equals_the_plain_reference(
    vocab: int, cases: int, spread: float, selection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.worker.sampling.draw._AT_ONCE", 3 * vocab)  # several pieces
    rng = random.Random(vocab + cases)
    sampler = Sampler(vocab, CPU, chosen_by(selection, vocab))
    wanted, logits, tokens = [], [], []
    for row in range(cases):
        prompt_len = rng.randint(1, 8)
        ids = [rng.randrange(vocab) for _ in range(prompt_len + rng.randint(0, 10))]
        values = [round(rng.gauss(0, spread) * 8) / 8 for _ in range(vocab)]
        new = request(row, ids, prompt_len, **random_params(rng, vocab))
        sampler.add(new)
        logits.append(values)
        tokens.append(ints(*ids))
        wanted.append(reference(values, new.sampling, ids, prompt_len))
    results = sampler.sample(torch.tensor(logits), at(list(range(cases)), tokens))
    assert [result.token for result in results] == wanted
    assert {result.status for result in results} <= {ROW_OK, ROW_NO_TOKEN}


@pytest.mark.parametrize("selection", ["torch", "native"])
def test_looking_at_survivors_draws_what_looking_at_all_draws(selection: str) -> None:
    """A cutoff that keeps everything changes the path, and not the token."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(64, 5000, generator=generator) * 3
    drawn = []
    for cutoff in ({}, {"top_k": 4999}, {"min_p": 1e-9}, {"top_p": 1 - 1e-9}):
        sampler = Sampler(5000, CPU, chosen_by(selection, 5000))
        for row in range(64):
            sampler.add(request(row, [0] * (row + 1), seed=row, **cutoff))
        drawn.append(sampler.sample(logits.clone(), at(list(range(64)), [ints(*[0] * (row + 1)) for row in range(64)])))
    assert drawn[0] == drawn[1] == drawn[2] == drawn[3]


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({}, range(8)),
        ({"temperature": 0.5}, range(8)),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_p": 0.8}, [0, 1, 2]),
        ({"min_p": 0.2}, [0, 1, 2, 3]),
    ],
)
def test_distribution(sampling: dict[str, float], kept: Sequence[int]) -> None:
    probabilities = [0.4, 0.25, 0.2, 0.085, 0.04, 0.02, 0.004, 0.001]
    seen = draw_many([math.log(p) for p in probabilities], 20_000, seed=99, **sampling)
    sharp = [
        p ** (1 / sampling.get("temperature", 1.0)) if token in kept else 0.0 for token, p in enumerate(probabilities)
    ]
    expected = [20_000 * p / sum(sharp) for p in sharp]
    assert all(count == 0 for token, count in enumerate(seen) if token not in kept)
    chi_square = sum((seen[token] - expected[token]) ** 2 / expected[token] for token in kept)
    assert chi_square < 30  # 7 degrees of freedom: 1e-4


def test_noise_does_not_repeat_from_position_to_position() -> None:
    """Pairs of consecutive draws are as independent as the draws themselves."""
    sampler = Sampler(4, CPU)
    sampler.add(request(0, [0], seed=3))
    zeros = np.zeros(8000, np.int32)
    results = sampler.sample(torch.zeros(8000, 4), at([0] * 8000, [zeros[: n + 1] for n in range(8000)]))
    drawn = [result.token for result in results]
    pairs = [0] * 16
    for first, second in zip(drawn[::2], drawn[1::2], strict=True):
        pairs[first * 4 + second] += 1  # type: ignore[operator]
    assert sum((count - 250) ** 2 / 250 for count in pairs) < 45  # 15 degrees of freedom: 1e-4


def test_ties_go_to_the_lowest_id() -> None:
    assert sample_one([0, 5, 5, 1], temperature=0).token == 1
    assert sample_one([0, 5, 5, 1], temperature=1, top_k=1).token == 1
    values, ids = largest(torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 2.0]]), 4)
    assert values.tolist() == [[3.0, 3.0, 2.0, 2.0]]
    assert ids.tolist() == [[1, 3, 2, 4]]


def test_largest_of_many_equals() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 6, (20, 300), generator=generator).float()
    for count in (1, 2, 50, 299, 300):
        values, ids = largest(x, count)
        expected = [sorted(range(300), key=lambda token, row=row: (-row[token], token))[:count] for row in x.tolist()]
        assert ids.tolist() == expected
        assert torch.equal(values, x.gather(1, ids))


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_native_selection_is_the_one_in_torch(spread: float) -> None:
    """With cutoffs that few, many or all survive: some rows are decided among 4,096, some among all."""
    vocab, rows = 9_000, 5
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(rows, vocab, generator=generator) * spread
    logits[3] = logits[3].round()
    logits[4, 100:] = -torch.inf
    plain = Drawing(vocab, CPU)
    best = plain.largest(logits)
    assert native().largest(logits) == best
    for temperature, top_k, top_p, min_p in (
        (1.0, 0, 1.0, 0.0), (0.7, 50, 0.95, 0.0), (1.3, 0, 0.9, 0.0), (1.0, 0, 0.999999, 0.0), (1.0, 3000, 0.99, 0.0),
        (1.0, 0, 1.0, 0.01), (2.0, 8_999, 0.5, 1e-6), (0.7, 0, 0.999, 1e-4),
    ):  # fmt: skip
        cuts = [
            Cut(row, best[1][row], signed(key(row, 5)), temperature, top_k, top_p, min_p)
            for row in reversed(range(rows))
        ]
        assert native().draw(logits, cuts) == plain.draw(logits, cuts)
    tokens = [row * 1000 for row in range(rows)]
    (totals, ranks), (plain_totals, plain_ranks) = native().weigh(logits, tokens), plain.weigh(logits, tokens)
    assert ranks == plain_ranks
    assert totals == pytest.approx(plain_totals, abs=2e-6)
    for given, wanted in zip(native().top(logits, 20), plain.top(logits, 20), strict=True):
        assert given.tolist() == wanted.tolist()


def test_tiny_temperature_and_top_p_are_greedy() -> None:
    generator = torch.Generator().manual_seed(2)
    for scale in (0.01, 1.0, 1e4):
        logits = (torch.randn(1000, generator=generator) * scale).tolist()
        for temperature in (0.0, 1e-30, 1e-6, 1e-4, 1.1e-4):
            result = sample_one(logits, temperature=temperature, top_p=1e-4, seed=5, logprobs=2)
            assert result.token == max(range(1000), key=logits.__getitem__)
            assert all(math.isfinite(entry.logprob) for entry in result.logprobs)


def test_penalties_of_one_request_leave_its_neighbours_alone() -> None:
    """Prompts of different lengths, one with a frequency penalty, in one batch."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, 50, generator=generator)
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
    outputs = [[1, 1, 2], [9]]

    def run(rows: Sequence[int]) -> list[Sampled]:
        sampler = Sampler(50, CPU)
        for row in rows:
            penalty = 1.0 if row == 0 else 0.0
            sampler.add(
                request(row, prompts[row] + outputs[row], len(prompts[row]), seed=row, frequency_penalty=penalty)
            )
        return sampler.sample(logits[list(rows)], at(rows, [ints(*prompts[row], *outputs[row]) for row in rows]))

    assert run([0, 1]) == run([0]) + run([1])
    params = request(0, [0], seed=0, frequency_penalty=1.0).sampling
    assert run([0])[0].token == reference(logits[0].tolist(), params, prompts[0] + outputs[0], 3)


def test_frequency_penalty_counts_the_whole_output() -> None:
    """A token seen k times drops by 2k, over hundreds of tokens, counted step by step or at once."""
    logits = [0.0] * 10
    logits[3], logits[4] = 600.5, 1.0
    sampler = Sampler(10, CPU)
    sampler.add(request(0, [3, 3, 3], temperature=0, frequency_penalty=2.0))
    tokens = [3, 3, 3]
    for _ in range(400):
        result = sampler.sample(torch.tensor([logits]), at([0], [ints(*tokens)]))[0]
        assert result.token is not None
        tokens.append(result.token)
    assert tokens[3:303] == [3] * 300  # 600.5 - 2 * 300 = 0.5 is below 1.0
    assert tokens[303] == 4
    assert sample_one(logits, tokens[:303], 3, temperature=0, frequency_penalty=2.0).token == 4


def test_a_seeded_request_does_not_depend_on_its_neighbours() -> None:
    """Whatever else is in the batch, and in which order."""
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(5, 400, generator=generator)
    seen = set()
    for rows in ([0], [0, 1], [3, 0, 2], [4, 3, 2, 1, 0]):
        sampler = Sampler(400, CPU)
        for row in rows:
            cutoffs = {"top_p": 0.9} if row % 2 else {}
            sampler.add(request(row, [1, 2], seed=42 if row == 0 else 1000 + row, temperature=0.8, **cutoffs))
        results = sampler.sample(logits[rows], at(rows, [ints(1, 2)] * len(rows)))
        seen.add(results[rows.index(0)].token)
    assert len(seen) == 1


def test_same_seed_and_prompt_give_the_same_tokens_on_any_row() -> None:
    sampler = Sampler(300, CPU)
    for row in range(4):
        sampler.add(request(row, [5, 6], seed=77 if row < 3 else 78))
    tokens = [
        [result.token for result in sampler.sample(torch.zeros(4, 300), at([3, 1, 0, 2], [ints(*[0] * length)] * 4))]
        for length in range(2, 30)
    ]
    assert all(one == two == three for _, one, two, three in tokens)
    assert any(other != one for other, one, _, _ in tokens)


def test_all_end_ids_wait_for_min_tokens() -> None:
    """With two EOS ids and a stop id; the last one is let through exactly then."""
    logits = [9.0, 8.0, 7.0, 1.0]
    sampling: dict[str, Any] = {"temperature": 0, "eos_ids": (0, 1), "stop_ids": (2,), "min_tokens": 5}
    outputs = [sample_one(logits, [3] * (2 + made), 2, **sampling).token for made in range(7)]
    assert outputs == [3, 3, 3, 3, 3, 0, 0]


def test_a_row_whose_logits_are_not_finite_fails_alone() -> None:
    for bad in (math.nan, math.inf):
        logits = torch.zeros(3, 20)
        logits[:, 7] = 1
        logits[1, 3] = bad
        sampler = Sampler(20, CPU)
        for row, temperature in enumerate((0.0, 1.0, 0.0)):
            sampler.add(request(row, [1], temperature=temperature, logprobs=1))
        results = sampler.sample(logits, at([0, 1, 2], [ints(1)] * 3))
        assert [result.status for result in results] == [ROW_OK, ROW_NOT_FINITE, ROW_OK]
        assert [result.token for result in results] == [7, None, 7]


def test_a_row_that_may_sample_nothing_fails_alone() -> None:
    sampler = Sampler(10, CPU)
    sampler.add(request(0, [1], allowed_ids=(4,), eos_ids=(4,), min_tokens=1))
    sampler.add(request(1, [1], allowed_ids=(5,)))
    results = sampler.sample(torch.zeros(2, 10), at([0, 1], [ints(1)] * 2))
    assert [(result.status, result.token) for result in results] == [(ROW_NO_TOKEN, None), (ROW_OK, 5)]


def test_a_freed_row_leaves_nothing_behind() -> None:
    sampler = Sampler(6, CPU)
    everything: dict[str, Any] = {
        "allowed_ids": (0,), "banned_sequences": ((5,),), "logit_bias": ((5, -100.0),), "frequency_penalty": 2.0,
        "min_tokens": 9, "eos_ids": (5,), "logprobs": 3,
    }  # fmt: skip
    sampler.add(request(0, [1], **everything))
    sampler.free(0)
    sampler.add(request(0, [1], temperature=0))
    assert sampler.sample(torch.tensor([[0, 0, 0, 0, 0, 9.0]]), at([0], [ints(1)])) == [Sampled(ROW_OK, 5)]


class TestLogprobs:
    def test_raw_and_ranked(self) -> None:
        generator = torch.Generator().manual_seed(6)
        logits = torch.randn(100, generator=generator) * 4
        expected = torch.log_softmax(logits.double(), 0).tolist()
        order = sorted(range(100), key=lambda token: -expected[token])
        result = sample_one(
            logits.tolist(), temperature=0, logprobs=20, allowed_ids=(order[30],), logit_bias=((order[30], 5.0),)
        )
        sampled, *top = result.logprobs
        assert (sampled.token_id, sampled.rank) == (order[30], 31)
        assert [(entry.token_id, entry.rank) for entry in top] == [(order[n], n + 1) for n in range(20)]
        for entry in result.logprobs:
            assert entry.logprob == pytest.approx(expected[entry.token_id], abs=1e-5)

    def test_equals_share_a_rank(self) -> None:
        result = sample_one([1.0, 2.0, 2.0, 0.0, 1.0], temperature=0, logprobs=5, allowed_ids=(4,))
        assert (result.logprobs[0].token_id, result.logprobs[0].rank) == (4, 3)
        assert [(entry.token_id, entry.rank) for entry in result.logprobs[1:]] == [
            (1, 1),
            (2, 1),
            (0, 3),
            (4, 3),
            (3, 5),
        ]

    def test_zero_reports_the_sampled_token_only(self) -> None:
        assert len(sample_one([1.0, 2.0], temperature=0, logprobs=0).logprobs) == 1
        assert sample_one([1.0, 2.0], temperature=0).logprobs == ()


def test_parameters_have_the_documented_defaults() -> None:
    assert SamplingParams(seed=1) == SamplingParams(seed=1, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
