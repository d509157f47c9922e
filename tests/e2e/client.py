"""A small gRPC client of the gateway, as a user would write it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from protos import common_pb2, gateway_pb2, gateway_pb2_grpc


@dataclass
class Answer:
    """Everything that one choice of one request gave."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish: int = 0
    prompt_logprobs: list[Any] = field(default_factory=list)
    cached_tokens: int = 0


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Any]:
    """A stub of the gateway."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield gateway_pb2_grpc.GatewayServiceStub(channel)


async def generate(stub: Any, prompt: Sequence[int], *, cache_salt: str | None = None, **sampling: Any) -> Answer:
    """Continues token ids, streaming."""
    request = gateway_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=gateway_pb2.SamplingOptions(**sampling),
        options=gateway_pb2.RequestOptions(stream=True, return_token_ids=True, cache_salt=cache_salt),
    )
    answer = Answer()
    async for message in stub.Generate(request):
        assert message.first_index == len(answer.token_ids) or not message.token_ids
        answer.token_ids += message.token_ids
        answer.text += message.text
        answer.prompt_logprobs += message.prompt_logprobs
        if message.HasField("finish"):
            answer.finish = message.finish.reason
        if message.HasField("usage"):
            answer.cached_tokens = message.usage.cached_tokens
    return answer


async def generate_all(stub: Any, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Answer]:
    """All prompts at once."""
    return list(await asyncio.gather(*(generate(stub, prompt, **sampling) for prompt in prompts)))
