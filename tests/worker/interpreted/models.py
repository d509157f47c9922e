"""Models through Triton's interpreter, end to end: tests/kernels/test_triton.py runs this in a process of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from services.worker.loading import load_model
from services.worker.runner import TorchRunner
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
