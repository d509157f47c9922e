"""Drafts and grammars with a worker that computes: the engine in this process, a plain gateway over gRPC.

Random weights suffice: a model without sense breaks every grammar that it is not held to, and its greedy
output soon goes round in circles. The demo model does the same where time allows.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tokenizers import Tokenizer

from protos import common_pb2
from services.engine.__main__ import Engine
from tests.engine.cluster import Gateway, WorkerProcess, attached, running_engine
from tests.worker.tiny_llama import tiny_llama

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z]{1,12}$"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
REFRAIN = "one two three. one two three. one two"
CONTEXT = 1024


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_llama(tmp_path_factory.mktemp("model") / "tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return folder


@pytest.fixture(scope="module", params=["tiny", pytest.param("demo", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Path:
    path: Path = request.getfixturevalue({"tiny": "tiny", "demo": "demo_gguf"}[request.param])
    return path


@pytest.fixture(scope="module")
def real_worker(model: Path, sockets: Path) -> Iterator[str]:
    process = WorkerProcess(
        f"unix:{sockets}/real-{model.stem}.sock",
        *("--model", str(model), "--deterministic", "--kv-cache-bytes", str(64 << 20)),
        simulated=False,
    )
    process.start()
    yield process.address
    process.stop()


@pytest.fixture
async def real_engine(real_worker: str, listen: str) -> AsyncIterator[Engine]:
    async with running_engine(real_worker, listen, speculative="ngram", max_model_len=CONTEXT) as engine:
        yield engine


@pytest.fixture
async def real(real_engine: Engine, listen: str) -> AsyncIterator[Gateway]:
    gateway = await attached(listen)
    yield gateway
    await gateway.close()


def tokenizer_of(engine: Engine) -> Tokenizer:
    assert engine.loop is not None
    files = {file.name: file.content for file in engine.loop.standing.text_files}
    return Tokenizer.from_buffer(files["tokenizer.json"])


def end_of(engine: Engine) -> int:
    assert engine.loop is not None
    files = {file.name: file.content for file in engine.loop.standing.text_files}
    end = json.loads(files["config.json"])["eos_token_id"]
    return int(end[0] if isinstance(end, list) else end)


def accepted(engine: Engine) -> float:
    name = "vllm:spec_decode_num_accepted_tokens_total"
    assert engine.loop is not None
    labels = {"model_name": engine.loop.standing.model.name, "engine": engine.settings.name}
    return engine.registry.get_sample_value(name, labels) or 0


@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.4, "seed": 11, "logprobs": 1}])
async def test_drafts_change_no_token(real: Gateway, real_engine: Engine, sampling: dict[str, Any]) -> None:
    prompt = tokenizer_of(real_engine).encode(REFRAIN).ids
    plain = await real.generate(prompt, 1, max_tokens=60, sampling=sampling | {"num_speculative_tokens": 0})
    before = accepted(real_engine)
    drafted = await real.generate(prompt, 2, max_tokens=60, sampling=sampling)
    assert drafted.tokens == plain.tokens
    assert drafted.finish == plain.finish
    assert len(drafted.logprobs) == len(plain.logprobs)
    for (token, logprob, rank), (other, expected, place) in zip(drafted.logprobs, plain.logprobs, strict=True):
        assert (token, rank) == (other, place)
        assert logprob == pytest.approx(expected, abs=1e-4)
    if sampling["temperature"] == 0:
        assert accepted(real_engine) - before > 0


@pytest.mark.parametrize("drafts", [0, 4])
async def test_a_schema_holds_the_model_to_it_and_nobody_else(real: Gateway, real_engine: Engine, drafts: int) -> None:
    tokenizer, end = tokenizer_of(real_engine), end_of(real_engine)
    prompt = tokenizer.encode("Describe your pet as JSON: ").ids
    common = {"num_speculative_tokens": drafts, "eos_token_ids": [end]}
    alone = await real.generate(prompt, 1, max_tokens=16, sampling=common)
    constraint = common_pb2.Constraint(json_schema=json.dumps(SCHEMA))
    seeded = {"constraint": constraint, "temperature": 0.9, "seed": 3, "n": 2}
    held = await real.submit(2, prompt, max_tokens=600, sampling=seeded | common)
    free = await real.submit(3, prompt, max_tokens=16, sampling=common)
    await real.finished(2, n=2)
    await real.finished(3)
    assert held.failed is None
    assert free.tokens == alone.tokens
    for choice in range(2):
        assert held.tokens[choice][-1] == end
        jsonschema.validate(json.loads(tokenizer.decode(held.tokens[choice][:-1])), SCHEMA)


async def test_a_schema_that_is_none_fails_its_request_with_the_reason(real: Gateway, real_engine: Engine) -> None:
    prompt = tokenizer_of(real_engine).encode("Hello").ids
    constraint = common_pb2.Constraint(json_schema='{"type": "no such type"}')
    answer = await real.generate(prompt, 1, sampling={"constraint": constraint})
    assert answer.failed is not None
    assert answer.failed.code == 3
    assert answer.failed.message.startswith("constraint: ")
    assert (await real.generate(prompt, 2)).finish


@pytest.mark.parametrize("pooling", [common_pb2.POOLING_MEAN, common_pb2.POOLING_LAST])
async def test_vectors_are_the_same_beside_others_and_in_other_pieces(
    real: Gateway, real_engine: Engine, pooling: Any
) -> None:
    """The first of two finds the prompt in the cache, the last token alone may read it."""
    prompt = tokenizer_of(real_engine).encode(REFRAIN * 20).ids
    alone = await real.generate(prompt, 1, pooling=pooling)
    talk = [await real.submit(handle, prompt[:handle], max_tokens=20) for handle in range(2, 6)]
    again = [await real.submit(handle, prompt, pooling=pooling) for handle in (7, 8)]
    await real.finished(*range(2, 6), 7, 8)
    assert alone.vector is not None
    assert sum(value * value for value in alone.vector) == pytest.approx(1, abs=1e-5)
    assert [answer.vector for answer in again] == [alone.vector] * 2
    assert all(len(answer.tokens[0]) == 20 for answer in talk)
    cached = [answer.started.cached_tokens for answer in again if answer.started]
    assert all(cached) if pooling == common_pb2.POOLING_LAST else not any(cached)
