"""Deltas of a running request as messages of GatewayService."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from protos import gateway_pb2
from services.common.channel import MAX_MESSAGE_BYTES
from services.common.errors import InvalidArgument
from services.gateway import wire
from services.gateway.detokenize import ShownBytes
from services.gateway.front import Running
from services.gateway.request import Delta, Position, ResponseOptions, ToolCallDelta

_VECTOR_EXTRA_BYTES = 16  # tags and lengths around a vector
_MOST_CANDIDATES = 32768
"""Log probabilities in one message: about 1 MiB. More of them come in several."""


class _Part(NamedTuple):
    """What goes into one message."""

    delta: Delta
    first: bool
    last: bool
    prompt: Sequence[Position] = ()


async def generated(running: Running, options: ResponseOptions) -> AsyncIterator[gateway_pb2.GenerateResponse]:
    """The answers to a Generate."""
    logprobs = _Logprobs(running)
    async for part in _parts(running, stream=options.stream):
        delta = part.delta
        message = gateway_pb2.GenerateResponse(
            index=delta.choice,
            first_index=delta.first_index,
            text=delta.text,
            token_ids=delta.token_ids if options.return_token_ids else (),
            logprobs=logprobs.of(delta),
        )
        _frame(message, running, part)
        yield message


async def answered(running: Running, options: ResponseOptions) -> AsyncIterator[gateway_pb2.ChatResponse]:
    """The answers to a Chat."""
    logprobs = _Logprobs(running)
    begun: set[int] = set()
    async for part in _parts(running, stream=options.stream):
        delta = part.delta
        message = gateway_pb2.ChatResponse(
            index=delta.choice,
            first_index=delta.first_index,
            role=None if delta.choice in begun else "assistant",
            content=delta.text,
            reasoning_content=delta.reasoning,
            tool_calls=[_call(piece) for piece in delta.tool_calls],
            token_ids=delta.token_ids if options.return_token_ids else (),
            logprobs=logprobs.of(delta),
        )
        begun.add(delta.choice)
        _frame(message, running, part)
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


class _Logprobs:
    """The log probabilities of an answer. The bytes of its tokens, joined, are its text."""

    def __init__(self, running: Running) -> None:
        skip = running.spec.text.skip_special_tokens
        self._vocabulary = running.model.text.vocabulary
        self._silent = self._vocabulary.special_ids if skip else frozenset[int]()
        self._shown = ShownBytes(self._vocabulary, skip_special_tokens=skip)

    def of(self, delta: Delta) -> Sequence[gateway_pb2.TokenLogprobs]:
        """Those of the next delta."""
        if not delta.logprobs:
            return ()
        return wire.token_logprobs(self._vocabulary, delta.logprobs, self._shown.of(delta), self._silent)


def _call(piece: ToolCallDelta) -> gateway_pb2.ToolCall:
    return gateway_pb2.ToolCall(index=piece.index, id=piece.id, name=piece.name, arguments=piece.arguments)


async def _parts(running: Running, *, stream: bool) -> AsyncIterator[_Part]:
    """What goes into each message; without streaming a choice has one, unless its log probabilities are too many."""
    left = running.spec.sampling.n
    first = True
    try:
        while deltas := await (running.read() if stream else running.whole()):
            for delta in deltas:
                left -= delta.finish is not None
                for share, prompt in _shares(delta, running.prompt_logprobs if first else ()):
                    yield _Part(share, first, not left and share.finish is not None, prompt)
                    first = False
            if not stream:
                return
    finally:
        running.close()


def _shares(delta: Delta, prompt: Sequence[Position]) -> Iterator[tuple[Delta, Sequence[Position]]]:
    """A delta with the prompt's log probabilities before it, in as many parts as messages hold."""
    if not delta.logprobs and not prompt:
        yield delta, ()
        return
    *ahead, beside = _cut(prompt)
    for piece in ahead:
        yield Delta(delta.choice, delta.first_index, "", ()), piece
    first, *others = _cut(delta.logprobs)
    if not others:
        yield delta, beside
        return
    at, ids, texts = len(first), delta.token_ids, delta.written or delta.texts
    yield replace(delta, token_ids=ids[:at], logprobs=tuple(first), finish=None, texts=texts[:at], written=()), beside
    for piece in others:
        end = at + len(piece)
        finish = delta.finish if end == len(delta.logprobs) else None
        yield Delta(delta.choice, delta.first_index + at, "", ids[at:end], tuple(piece), finish, texts[at:end]), ()
        at = end


def _cut(positions: Sequence[Position]) -> list[Sequence[Position]]:
    """Pieces of which each has its place in a message; at least one."""
    size = max(1, _MOST_CANDIDATES // max(1, *map(len, positions))) if positions else 1
    return [positions[at : at + size] for at in range(0, len(positions), size)] or [positions]


def _frame(message: gateway_pb2.GenerateResponse | gateway_pb2.ChatResponse, running: Running, part: _Part) -> None:
    """What only the first and the last message of a choice or request carry."""
    if part.delta.finish is not None:
        message.finish.CopyFrom(wire.finish(part.delta.finish))
    if part.first:
        message.started.token = running.token
        message.started.request_id = running.spec.request_id
        message.started.model = running.spec.model
        message.started.created_s = running.created_s
    if part.prompt:
        message.prompt_logprobs.extend(wire.token_logprobs(running.model.text.vocabulary, part.prompt))
    if part.last:
        message.usage.CopyFrom(wire.usage(running.usage))
