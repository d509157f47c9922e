"""Deltas of a running request as messages of GatewayService."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator

from protos import gateway_pb2
from services.common.channel import MAX_MESSAGE_BYTES
from services.common.errors import InvalidArgument
from services.gateway import wire
from services.gateway.front import Running
from services.gateway.request import Delta, ResponseOptions, ToolCallDelta

_VECTOR_EXTRA_BYTES = 16  # tags and lengths around a vector


async def generated(running: Running, options: ResponseOptions) -> AsyncIterator[gateway_pb2.GenerateResponse]:
    """The answers to a Generate."""
    vocabulary, silent = running.model.text.vocabulary, _silent(running)
    async for delta, first, last in _deltas(running, stream=options.stream):
        message = gateway_pb2.GenerateResponse(
            index=delta.choice,
            first_index=delta.first_index,
            text=delta.text,
            token_ids=delta.token_ids if options.return_token_ids else (),
            logprobs=wire.token_logprobs(vocabulary, delta.logprobs, silent),
        )
        _frame(message, running, delta, first=first, last=last)
        yield message


async def answered(running: Running, options: ResponseOptions) -> AsyncIterator[gateway_pb2.ChatResponse]:
    """The answers to a Chat."""
    vocabulary, silent = running.model.text.vocabulary, _silent(running)
    begun: set[int] = set()
    async for delta, first, last in _deltas(running, stream=options.stream):
        message = gateway_pb2.ChatResponse(
            index=delta.choice,
            first_index=delta.first_index,
            role=None if delta.choice in begun else "assistant",
            content=delta.text,
            reasoning_content=delta.reasoning,
            tool_calls=[_call(piece) for piece in delta.tool_calls],
            token_ids=delta.token_ids if options.return_token_ids else (),
            logprobs=wire.token_logprobs(vocabulary, delta.logprobs, silent),
        )
        begun.add(delta.choice)
        _frame(message, running, delta, first=first, last=last)
        yield message


def check_embeddings(count: int, size: int | None) -> None:
    """Raises for more vectors than the one message that answers an Embed holds; before any is made."""
    if size is not None and count * (size * 4 + _VECTOR_EXTRA_BYTES) > MAX_MESSAGE_BYTES:
        raise InvalidArgument(
            f"inputs: {count} vectors of {size} numbers are more than a message of {MAX_MESSAGE_BYTES} bytes holds; "
            "send fewer inputs at once, or ask for fewer dimensions",
            field="inputs",
        )


def embedding(vector: array[float]) -> gateway_pb2.Embedding:
    """One of the vectors of an Embed."""
    return gateway_pb2.Embedding(values=vector)


def _silent(running: Running) -> frozenset[int]:
    """Ids that stand for no text: joined, the bytes of all others are the text."""
    return running.model.text.vocabulary.special_ids if running.spec.text.skip_special_tokens else frozenset()


def _call(piece: ToolCallDelta) -> gateway_pb2.ToolCall:
    return gateway_pb2.ToolCall(index=piece.index, id=piece.id, name=piece.name, arguments=piece.arguments)


async def _deltas(running: Running, *, stream: bool) -> AsyncIterator[tuple[Delta, bool, bool]]:
    """(delta, whether it is the first, whether it is the last); without streaming one delta per choice."""
    if not stream:
        deltas = await running.whole()
        for number, delta in enumerate(deltas):
            yield delta, number == 0, number == len(deltas) - 1
        return
    left = running.spec.sampling.n
    first = True
    try:
        while deltas := await running.read():
            for delta in deltas:
                left -= delta.finish is not None
                yield delta, first, not left
                first = False
    finally:
        running.close()


def _frame(
    message: gateway_pb2.GenerateResponse | gateway_pb2.ChatResponse,
    running: Running,
    delta: Delta,
    *,
    first: bool,
    last: bool,
) -> None:
    """What only the first and the last message of a choice or request carry."""
    if delta.finish is not None:
        message.finish.CopyFrom(wire.finish(delta.finish))
    if first:
        message.started.token = running.token
        message.started.request_id = running.spec.request_id
        message.started.model = running.spec.model
        message.started.created_s = running.created_s
        if running.prompt_logprobs:
            vocabulary = running.model.text.vocabulary
            message.prompt_logprobs.extend(wire.token_logprobs(vocabulary, running.prompt_logprobs))
    if last:
        message.usage.CopyFrom(wire.usage(running.usage))
