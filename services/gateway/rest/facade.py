"""The OpenAI API over google.api.HttpBody, for a proxy in front that passes bodies through.

The first body of an answer carries the content type. An error before it is a gRPC status whose
details hold the same error as an HttpBody; an error after it is an event, as over HTTP.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from google.api import httpbody_pb2
from google.protobuf import any_pb2
from grpc_status import rpc_status

from protos import openai_rest_pb2, openai_rest_pb2_grpc
from services.common.errors import TriptychError
from services.common.server import Server
from services.common.status import to_rpc_status
from services.gateway.rest.reply import JSON, Api, error_body, error_headers, event
from services.gateway.trace import REQUEST_ID, request_id_of

SERVICE = "triptych.v1.OpenAiRestService"
Context = grpc.aio.ServicerContext[Any, Any]
_PIECE_BYTES = 256 * 1024
"""Of a long document: proxies hold one message at a time, and few hold more than a mebibyte."""


class OpenAiRest(openai_rest_pb2_grpc.OpenAiRestServiceServicer):  # type: ignore[misc]
    """Answers each operation through an Api."""

    def __init__(self, api: Api) -> None:
        self._api = api

    def add_to(self, server: Server) -> None:
        """Answers on that server."""
        openai_rest_pb2_grpc.add_OpenAiRestServiceServicer_to_server(self, server.grpc)

    def ChatCompletions(self, request: httpbody_pb2.HttpBody, context: Context) -> AsyncIterator[Any]:
        """POST /v1/chat/completions."""
        return self._answer("chat_completions", request.data, context)

    def Completions(self, request: httpbody_pb2.HttpBody, context: Context) -> AsyncIterator[Any]:
        """POST /v1/completions."""
        return self._answer("completions", request.data, context)

    def Responses(self, request: httpbody_pb2.HttpBody, context: Context) -> AsyncIterator[Any]:
        """POST /v1/responses."""
        return self._answer("responses", request.data, context)

    def Embeddings(self, request: httpbody_pb2.HttpBody, context: Context) -> AsyncIterator[Any]:
        """POST /v1/embeddings."""
        return self._answer("embeddings", request.data, context)

    def Models(self, request: httpbody_pb2.HttpBody, context: Context) -> AsyncIterator[Any]:
        """GET /v1/models."""
        return self._answer("models", request.data, context)

    def Model(self, request: openai_rest_pb2.ModelRequest, context: Context) -> AsyncIterator[Any]:
        """GET /v1/models/{model}."""
        return self._answer("model", request.model.encode(), context)

    def Tokenize(self, request: httpbody_pb2.HttpBody, context: Context) -> AsyncIterator[Any]:
        """POST /tokenize."""
        return self._answer("tokenize", request.data, context)

    def Detokenize(self, request: httpbody_pb2.HttpBody, context: Context) -> AsyncIterator[Any]:
        """POST /detokenize."""
        return self._answer("detokenize", request.data, context)

    async def _answer(self, operation: str, body: bytes, context: Context) -> AsyncIterator[httpbody_pb2.HttpBody]:
        headers = {str(name): str(value) for name, value in context.invocation_metadata() or ()}
        headers[REQUEST_ID] = request_id_of(headers)
        named = ((REQUEST_ID, headers[REQUEST_ID]),)
        try:
            reply = await self._api.call(operation, body, headers)
        except TriptychError as error:
            await _refuse(context, error, named)
            return
        await context.send_initial_metadata(named)
        content_type = reply.content_type
        if isinstance(reply.body, bytes):
            for start in range(0, len(reply.body), _PIECE_BYTES):
                piece = reply.body[start : start + _PIECE_BYTES]
                yield httpbody_pb2.HttpBody(content_type=content_type, data=piece)
                content_type = ""
            return
        try:
            async with contextlib.aclosing(reply.body):
                async for chunk in reply.body:
                    yield httpbody_pb2.HttpBody(content_type=content_type, data=chunk)
                    content_type = ""
        except Exception:  # a proxy has answered 200 by now, and shows no status that comes after it
            yield httpbody_pb2.HttpBody(
                content_type=content_type, data=event(error_body(TriptychError("internal error")))
            )
            raise


async def _refuse(context: Context, error: TriptychError, named: tuple[tuple[str, str], ...]) -> None:
    """Everything in the trailers: once headers are sent, a proxy has answered 200."""
    status = to_rpc_status(error)
    body = any_pb2.Any()
    body.Pack(httpbody_pb2.HttpBody(content_type=JSON, data=error_body(error)))
    status.details.append(body)
    context.set_trailing_metadata((*named, *error_headers(error).items()))
    await context.abort_with_status(rpc_status.to_status(status))
