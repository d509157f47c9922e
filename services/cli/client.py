"""What the terminal clients share: their options, a stub of the gateway, and errors as one sentence."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import grpc
import grpc.aio

from protos import gateway_pb2, gateway_pb2_grpc
from services.common.channel import connect
from services.common.server import error_of
from services.common.settings import Settings, knob


class ClientSettings(Settings):
    """Options of the terminal clients."""

    section: ClassVar[str] = "client"

    address: str = knob("127.0.0.1:50051", "gRPC address of the gateway: host:port or unix:/path")
    model: str | None = knob(None, "name of the model; the only one there is by default")
    max_tokens: int | None = knob(None, "tokens to produce at most; what the context leaves by default", ge=1)
    temperature: float | None = knob(None, "0 is greedy; the model's own by default", ge=0)
    top_p: float | None = knob(None, "keep the likeliest tokens up to this probability", gt=0, le=1)
    top_k: int | None = knob(None, "keep this many of the likeliest tokens", ge=0)
    seed: int | None = knob(None, "equal seeds give equal answers", ge=0)
    stop: list[str] = knob([], "texts that end the answer")


def sampling(settings: ClientSettings) -> gateway_pb2.SamplingOptions:
    """The options as the contract spells them; what is unset stays unset."""
    return gateway_pb2.SamplingOptions(
        max_tokens=settings.max_tokens,
        temperature=settings.temperature,
        top_p=settings.top_p,
        top_k=settings.top_k,
        seed=settings.seed,
        stop=settings.stop,
    )


@asynccontextmanager
async def gateway(address: str) -> AsyncIterator[gateway_pb2_grpc.GatewayServiceAsyncStub]:
    """A stub of the gateway at `address`."""
    async with connect(address) as channel:
        yield gateway_pb2_grpc.GatewayServiceStub(channel)


def run(work: Coroutine[Any, Any, None]) -> int:
    """Runs a client. A refused or broken call becomes one sentence and status 1."""
    try:
        asyncio.run(work)
    except grpc.aio.AioRpcError as error:
        print(f"triptych: {explain(error)}", file=sys.stderr)
        return 1
    return 0


def explain(error: grpc.aio.AioRpcError) -> str:
    """What went wrong, for a person."""
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        return f"no gateway answers ({error.details()}); `triptych serve` starts one"
    return str(error_of(error))


async def answer(address: str, question: str, give_up: Callable[[], bool] = lambda: False) -> None:
    """Asks one question and prints the answer as it comes."""
    async with gateway(address) as stub:
        turn = gateway_pb2.ChatMessage(role="user", content=[gateway_pb2.ContentPart(text=question)])
        options = gateway_pb2.SamplingOptions(temperature=0, max_tokens=96)
        async for text in stream_chat(stub, [turn], options, None):
            write(text)
            if give_up():
                break
    write("\n")


async def stream_chat(
    stub: gateway_pb2_grpc.GatewayServiceAsyncStub,
    turns: Sequence[gateway_pb2.ChatMessage],
    options: gateway_pb2.SamplingOptions,
    model: str | None,
) -> AsyncIterator[str]:
    """The pieces of one answer."""
    request = gateway_pb2.ChatRequest(
        model=model, messages=turns, sampling=options, options=gateway_pb2.RequestOptions(stream=True)
    )
    async for message in stub.Chat(request):
        if message.content:
            yield message.content


def write(text: str) -> None:
    """To standard output at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
