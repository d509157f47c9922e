"""Greedy output through the whole stack equals transformers' generate, token for token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kernels.native import build
from services.local.cluster import Cluster
from tests.e2e import oracle
from tests.e2e.client import Answer, connected, generate, generate_all

LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 31, 32, 33, 64, 100, 128, 200, 256, 500, 700, 1000, 2000)
Prompt = tuple[int, ...]
NATIVE = {**oracle.EXACT, "ops": "native"}
"""The exact path, and an error where the native kernels cannot be had."""
WITHOUT_AVX512 = next(level.name for level in build.levels() if "avx512f" not in level.needs)


class Expected:
    """The prompts, and what the oracle says of an answer to each."""

    def __init__(self, path: Path, max_tokens: int, *, generate: bool) -> None:
        self.path, self.max_tokens = path, max_tokens
        ids = oracle.load_tokenizer(path).encode(oracle.english_text()).ids
        self.prompts: list[Prompt] = []
        at = 1000
        for length in LENGTHS:
            self.prompts.append(tuple(ids[at : at + length]))
            at += length
        self._generated = [oracle.generate(path, prompt, max_tokens) for prompt in self.prompts] if generate else []

    def check(self, answers: list[Answer]) -> None:
        """Every answer, in the order of the prompts; to the first of them, where there are fewer."""
        for prompt, answer in zip(self.prompts[: len(answers)], answers, strict=True):
            oracle.assert_greedy(self.path, prompt, tuple(answer.token_ids), self.max_tokens)
        for answer, wanted in zip(answers, self._generated, strict=False):
            oracle.assert_equal(tuple(answer.token_ids), wanted)


@pytest.fixture(
    scope="module",
    params=[pytest.param(16, id="short"), pytest.param(48, id="long", marks=pytest.mark.slow)],
)
def expected(request: pytest.FixtureRequest, demo_gguf: Path) -> Expected:
    return Expected(demo_gguf, request.param, generate=request.param > 16)


@pytest.fixture(scope="module")
def cluster(demo_gguf: Path) -> Iterator[Cluster]:
    """Blocks so small that lengths of the prompts lie on both sides of their borders."""
    with Cluster(model=demo_gguf, worker=NATIVE, engine={"block_size": 16}) as running:
        yield running


def metric(cluster: Cluster, role: str, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = httpx.get(cluster.metrics_url(role)).text.splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name]
    assert values, f"{role} has no metric {name}"
    return sum(values)


async def test_alone(cluster: Cluster, expected: Expected) -> None:
    async with connected(cluster.grpc_address) as stub:
        salt, limit = f"alone-{expected.max_tokens}", expected.max_tokens
        expected.check(
            [await generate(stub, p, cache_salt=salt, max_tokens=limit, temperature=0) for p in expected.prompts]
        )


async def test_all_at_once_and_again_from_the_prefix_cache(cluster: Cluster, expected: Expected) -> None:
    salt, limit = f"together-{expected.max_tokens}", expected.max_tokens
    async with connected(cluster.grpc_address) as stub:
        first = await generate_all(stub, expected.prompts, cache_salt=salt, max_tokens=limit, temperature=0)
        expected.check(first)
        hits = metric(cluster, "engine", "vllm:prefix_cache_hits_total")
        again = await generate_all(stub, expected.prompts, cache_salt=salt, max_tokens=limit, temperature=0)
        expected.check(again)
    assert metric(cluster, "engine", "vllm:prefix_cache_hits_total") - hits >= sum(n // 16 * 16 for n in LENGTHS) - 64
    assert again[LENGTHS.index(2000)].cached_tokens >= 1984


async def test_preempted(demo_gguf: Path, expected: Expected) -> None:
    """A pool that holds the longest request and little more, with nothing kept back for outputs.

    The two that fill most of it come first, and then short ones that take the rest to the last block. AVX-512 is
    masked off, where there is any.
    """
    order = sorted(range(len(LENGTHS)), key=lambda index: LENGTHS[index] not in {700, 1000})
    engine = {
        "num_blocks": -(-(max(LENGTHS) + expected.max_tokens) // 4) + 24,
        "block_size": 4,
        "output_reserve_blocks": 0,
    }
    worker = {**NATIVE, "isa": WITHOUT_AVX512}
    with Cluster(model=demo_gguf, engine=engine, worker=worker) as cluster:
        async with connected(cluster.grpc_address) as stub:
            prompts = [expected.prompts[index] for index in order]
            answers = await generate_all(stub, prompts, max_tokens=expected.max_tokens, temperature=0)
        assert metric(cluster, "engine", "vllm:num_preemptions_total") > 0
    expected.check([answers[order.index(index)] for index in range(len(LENGTHS))])


async def test_step_budget_of_16_tokens(demo_gguf: Path, expected: Expected) -> None:
    """The short form leaves out the longest prompts, each of which takes a step per 16 tokens."""
    prompts = expected.prompts if expected.max_tokens > 16 else expected.prompts[: LENGTHS.index(500) + 1]
    with Cluster(model=demo_gguf, engine={"max_num_batched_tokens": 16, "max_num_seqs": 16}, worker=NATIVE) as cluster:
        async with connected(cluster.grpc_address) as stub:
            answers = await generate_all(stub, prompts, max_tokens=expected.max_tokens, temperature=0)
    expected.check(answers)
