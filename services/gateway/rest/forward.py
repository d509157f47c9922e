"""An Api that passes bodies to a gateway over HttpBody: the REST container's side of the facade."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Final

import grpc.aio
from google.api import httpbody_pb2
from grpc_health.v1 import health_pb2

from protos import openai_rest_pb2, openai_rest_pb2_grpc
from services.common.channel import connect
from services.common.errors import TriptychError
from services.common.server import error_of
from services.gateway.rest.reply import JSON, Reply, error_body, event
from services.gateway.trace import REQUEST_ID, TRACEPARENT

_CARRIED: Final = (REQUEST_ID, TRACEPARENT)
Call = grpc.aio.UnaryStreamCall[httpbody_pb2.HttpBody, httpbody_pb2.HttpBody]


def _request(operation: str, body: bytes) -> httpbody_pb2.HttpBody | openai_rest_pb2.ModelRequest:
    if operation == "model":
        return openai_rest_pb2.ModelRequest(model=body.decode())
    return httpbody_pb2.HttpBody(content_type=JSON, data=body)


async def _next(call: Call) -> httpbody_pb2.HttpBody | None:
    try:
        body = await call.read()
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from None
    return body if isinstance(body, httpbody_pb2.HttpBody) else None


async def _whole(first: bytes, call: Call) -> bytes:
    """A document, which comes in pieces where it is long."""
    pieces = [first]
    while (body := await _next(call)) is not None:
        pieces.append(body.data)
    return b"".join(pieces)


class _Events:
    """The rest of a stream whose first body is here already."""

    def __init__(self, first: bytes, call: Call) -> None:
        self._first = first
        self._call = call

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield self._first
        try:
            while (body := await _next(self._call)) is not None:
                yield body.data
        except TriptychError as error:
            yield event(error_body(error))

    async def aclose(self) -> None:
        """Cancels the call where it runs."""
        self._call.cancel()


class Forward:
    """Passes every operation through."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = connect(address)
        stub = openai_rest_pb2_grpc.OpenAiRestServiceStub(self._channel)
        self._check = self._channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        self._methods = {
            "chat_completions": stub.ChatCompletions,
            "completions": stub.Completions,
            "responses": stub.Responses,
            "embeddings": stub.Embeddings,
            "models": stub.Models,
            "model": stub.Model,
            "tokenize": stub.Tokenize,
            "detokenize": stub.Detokenize,
        }

    async def call(self, operation: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Answers one request. Raises the error that the gateway's status carries."""
        metadata = tuple((name, headers[name]) for name in _CARRIED if name in headers)
        call: Call = self._methods[operation](_request(operation, body), metadata=metadata)
        try:
            first = await _next(call)
            if first is None:
                raise TriptychError("the gateway closed the answer before it began")
            if first.content_type.startswith("text/event-stream"):
                return Reply(_Events(first.data, call), first.content_type)
            return Reply(await _whole(first.data, call), first.content_type)
        except asyncio.CancelledError:
            call.cancel()
            raise

    async def obstacle(self) -> str | None:
        """What keeps the gateway from serving, or None."""
        try:
            answer = await self._check(health_pb2.HealthCheckRequest(), timeout=2.0)
        except grpc.aio.AioRpcError as error:
            return f"gateway at {self._address}: {error.details() or error.code().name}"
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            return f"gateway at {self._address} is not ready"
        return None

    async def close(self) -> None:
        """Closes the channel."""
        await self._channel.close()
