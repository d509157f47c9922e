"""Models through Triton's interpreter, end to end: tests/kernels/test_triton.py runs this in a process of its own."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from kernels.ops import Cut
from kernels.selection.noise import bits_of_noise, noise
from kernels.selection.triton import Selection
from services.worker.loading import load_model
from services.worker.runner import TorchRunner
from services.worker.sampling import noise as noise_of_torch
from services.worker.sampling.draw import Drawing
from tests.worker import tiny
from tests.worker.columns import request, run, step
from tests.worker.flat import Sequences
from tests.worker.tiny_llama import PROMPT, runner_of, tiny_llama

slow = pytest.mark.slow

SAMPLED = {"temperature": 0.9, "seed": 4, "top_p": 0.9, "frequency_penalty": 0.7, "logprobs": 3}


def tokens_of(runner: TorchRunner, **sampling: Any) -> dict[int, list[int]]:
    """Tokens of two requests: one prompt in two pieces, the other beside its second piece, then both decode."""
    made: dict[int, list[int]] = {0: [], 1: []}

    def take(given):
        for result in run(runner, given).results:
            made[result.row] += result.token_ids

    first, second = request(0, PROMPT, **sampling), request(1, PROMPT[4:9], **sampling)
    take(step(0, [(0, 0, 7)], [first], blocks={0: range(20, 26)}, flags=[0]))
    take(step(1, [(0, 7, 4), (1, 0, 5)], [second], blocks={1: range(4, 10)}))
    for index in range(4):
        take(step(2 + index, [(0, 11 + index, 1), (1, 5 + index, 1)]))
    return made


@pytest.mark.parametrize(
    ("sampling", "deterministic"),
    [
        ({"temperature": 0}, False),
        *(pytest.param(*given, marks=slow) for given in (({"temperature": 0}, True), (SAMPLED, False))),
    ],
)
def test_a_tiny_model_gives_the_tokens_of_the_reference(tmp_path, sampling, deterministic):
    path = str(tiny_llama(tmp_path / "tiny"))
    expected = tokens_of(runner_of(path, ops="reference"), **sampling)
    assert [len(tokens) for tokens in expected.values()] == [5, 5]
    assert len({*expected[0], *expected[1]}) > 2
    assert tokens_of(runner_of(path, ops="triton", deterministic=deterministic), **sampling) == expected


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
    [(6, 700, 0.25), (5, 5000, 4.0), *(pytest.param(*more, marks=slow) for more in ((60, 24, 4.0), (20, 6000, 0.25)))],
)
def test_what_is_chosen_is_what_torch_chooses(rows, vocab, spread):
    """Multiples of 1/8, so that many are equal, and a flat distribution that the first candidates do not settle."""
    numbers = torch.Generator().manual_seed(vocab)
    x_NV = (torch.randn(rows, vocab, generator=numbers) * spread * 8).round() / 8
    x_NV[0, ::3] = -torch.inf
    ours, torchs = Selection(), Drawing(vocab, torch.device("cpu"))
    cuts = random_cuts(x_NV, random.Random(vocab))
    assert ours.draw(x_NV.clone(), cuts) == torchs.draw(x_NV.clone(), cuts)
    whole = [cut._replace(top_k=0, top_p=1.0, min_p=0.0) for cut in cuts]
    assert ours.draw(x_NV.clone(), whole) == torchs.draw(x_NV.clone(), whole)
    assert ours.largest(x_NV) == torchs.largest(x_NV)
    for found, expected in zip(ours.top(x_NV, 17), torchs.top(x_NV, 17), strict=True):
        assert torch.equal(found, expected)
    tokens = torch.randint(0, vocab, (rows,), generator=numbers).tolist()
    (totals, ranks), (expected_totals, expected_ranks) = ours.weigh(x_NV, tokens), torchs.weigh(x_NV, tokens)
    assert ranks == expected_ranks
    torch.testing.assert_close(torch.tensor(totals), torch.tensor(expected_totals), atol=2e-6, rtol=1e-6)


def test_noise_is_that_of_the_specification_at_both_ends():
    keys = torch.arange(4096) * 0x1234567890AB
    bits, exact, rough = torch.empty(4096, dtype=torch.int64), torch.empty(4096).double(), torch.empty(4096)
    write_noise[(1,)](keys, bits, exact, rough, BLOCK=4096)
    ids = torch.arange(4096)
    assert torch.equal(bits[2:], noise_of_torch.bits(noise_of_torch.counters(ids) + keys)[2:])
    expected = noise_of_torch.gumbel(keys, ids)
    torch.testing.assert_close(exact[2:], expected[2:], atol=1e-13, rtol=1e-13)
    torch.testing.assert_close(rough[2:].double(), expected[2:], atol=1e-4, rtol=1e-5)
    # The fewest bits and the most: -log(2^-54), and -log(-log(2^-54)).
    torch.testing.assert_close(exact[:2].tolist(), [54 * math.log(2), -math.log(54 * math.log(2))], rtol=1e-15, atol=0)
    torch.testing.assert_close(rough[:2].double(), exact[:2], atol=1e-5, rtol=0)


@triton.jit
def write_noise(keys, bits, exact, rough, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    drawn = bits_of_noise(tl.load(keys + at), at)
    drawn = tl.where(at == 0, 0, tl.where(at == 1, 0x1FFFFFFFFFFFFF, drawn))
    tl.store(bits + at, drawn)
    tl.store(exact + at, noise(drawn, tl.float64))
    tl.store(rough + at, noise(drawn, tl.float32))


@slow
@pytest.mark.parametrize("kind", ["llama-yarn", "mistral-window", "qwen2-some-windows", "qwen3", "qwen3-one-kv-head"])
def test_logits_of_every_family(kind, tmp_path):
    oracle = tiny.make(kind)
    model, _ = load_model(str(tiny.save(oracle, tmp_path)), ops="triton", dtype="float32")
    assert model.ops.name == "triton"
    numbers = torch.Generator().manual_seed(4)
    sequences = [torch.randint(0, 99, (count,), generator=numbers).tolist() for count in (50, 1, 33)]
    runs = Sequences(model, sequences)
    runs.step([(0, 30), (1, 1), (2, 20)])
    runs.step([(2, 12), (0, 19)])
    runs.step([(0, 1), (2, 1)])
    for index, ids in enumerate(sequences):
        torch.testing.assert_close(runs.all_logits(index), tiny.oracle_logits(oracle, ids), atol=1e-4, rtol=0)
