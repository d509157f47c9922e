"""The whole split under the official client: a gateway, an engine, a worker that computes a tiny model."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from services.gateway.__main__ import Gateway
from services.gateway.config import GatewaySettings
from services.gateway.rest.http import bind
from tests.engine.cluster import WorkerProcess, running_engine
from tests.gateway.fake_engine import until
from tests.worker.tiny_llama import HIDDEN, tiny_llama

INPUTS = [[at * 7 % 250 + 1 for at in range(length)] for length in (1, 5, 30, 63, 64)]
"""The last one fills the context; the engine computes 24 tokens in a step."""


@asynccontextmanager
async def client_of(model: Path, folder: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a whole cluster that serves the model."""
    listen = f"unix:{folder}/engine.sock"
    options = ("--model", str(model), "--deterministic", "--kv-cache-bytes", str(1 << 20))
    worker = WorkerProcess(f"unix:{folder}/worker.sock", *options, simulated=False)
    worker.start()
    try:
        async with running_engine(worker.address, listen, max_num_batched_tokens=24):
            gateway = Gateway(GatewaySettings.build(engine=listen, http_port=0, grpc_port=0), bind("127.0.0.1", 0), "0")
            await gateway.start()
            try:
                await until(lambda: gateway.front.obstacle() is None, 60)
                url = f"http://127.0.0.1:{gateway.http.port}/v1"
                async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
                    yield client
            finally:
                await gateway.close()
    finally:
        worker.stop()


@torch.inference_mode()
def hidden_states(model: Path) -> list[torch.Tensor]:
    """What transformers computes: the last hidden state of each token of each input."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns of its own deprecations while it is imported
        import transformers

        oracle = transformers.LlamaModel.from_pretrained(model)
    return [oracle(torch.tensor([ids])).last_hidden_state[0].double() for ids in INPUTS]


def normed(vector: torch.Tensor) -> Any:
    return pytest.approx((vector / vector.norm()).tolist(), abs=3e-6)


def vectors(answer: openai.types.CreateEmbeddingResponse) -> Sequence[list[float]]:
    assert [item.index for item in answer.data] == list(range(len(INPUTS)))
    return [item.embedding for item in answer.data]


async def prompts_have_the_same_log_probabilities_again(client: openai.AsyncOpenAI, name: str) -> None:
    """The second time most of the prompt lies in the prefix cache, and is computed all the same."""
    answers = []
    for _ in range(2):
        answer = await client.completions.create(
            model=name, prompt=INPUTS[2], max_tokens=1, temperature=0, extra_body={"prompt_logprobs": 1}
        )
        (choice,) = answer.model_dump()["choices"]
        first, *others = choice["prompt_logprobs"]
        assert first is None
        assert [str(token_id) in entry for token_id, entry in zip(INPUTS[2][1:], others, strict=True)] == [True] * 29
        answers.append((choice["prompt_logprobs"], choice["text"]))
    assert answers[0] == answers[1]


async def chunks_of_a_prompt_count_for_nothing(client: openai.AsyncOpenAI, name: str) -> None:
    """Its 60 tokens take three steps, none of which gives a token."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    stream = await client.completions.create(
        model=name,
        prompt=list(range(60, 0, -1)),
        max_tokens=3,
        stream=True,
        extra_body={"stream_options": usage, "ignore_eos": True, "return_token_ids": True},
    )
    counted, tokens = [], 0
    async for chunk in stream:
        assert chunk.usage is not None
        assert chunk.usage.prompt_tokens == 60
        tokens += sum(len(choice.model_dump()["token_ids"]) for choice in chunk.choices)
        counted.append((chunk.usage.completion_tokens, tokens))
    assert all(completion == so_far for completion, so_far in counted)
    assert counted[-1] == (3, 3)


async def test_the_client_gets_what_transformers_computes() -> None:
    with tempfile.TemporaryDirectory(prefix="tri", dir="/tmp") as folder:
        model = tiny_llama(Path(folder, "tiny"))
        states = hidden_states(model)
        async with client_of(model, folder) as client:
            name = (await client.models.list()).data[0].id
            mean = await client.embeddings.create(model=name, input=INPUTS)
            few = await client.embeddings.create(model=name, input=INPUTS, dimensions=5)
            talk = client.completions.create(model=name, prompt=INPUTS[2], max_tokens=20)
            last = await client.embeddings.create(model=name, input=INPUTS, extra_body={"pooling": "last"})
            assert (await talk).usage is not None
            await prompts_have_the_same_log_probabilities_again(client, name)
            await chunks_of_a_prompt_count_for_nothing(client, name)
            for wrong in ({"dimensions": HIDDEN + 1}, {"input": [*INPUTS, [1] * 65]}):
                with pytest.raises(openai.BadRequestError, match=r"is more than the 32|are more than 64 tokens"):
                    await client.embeddings.create(**{"model": name, "input": INPUTS, **wrong})
    assert mean.usage.prompt_tokens == sum(map(len, INPUTS))
    for index, states_TD in enumerate(states):
        assert vectors(mean)[index] == normed(states_TD.mean(0))
        assert vectors(last)[index] == normed(states_TD[-1])
        assert vectors(few)[index] == normed(states_TD.mean(0)[:5])
