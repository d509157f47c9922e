"""GatewayService over gRPC: the same front as REST, with google.rpc details on errors.

    request ──reading──▶ values, prompt or turns ──text──▶ Job ──front──▶ Running ──writing──▶ messages

reading    requests as plain values
receiving  a file in pieces
writing    deltas as messages
blobs      media for workers elsewhere, on a port of its own
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from protos import gateway_pb2, gateway_pb2_grpc
from services.common import tracing
from services.common.errors import InvalidArgument, Unimplemented
from services.common.server import Server
from services.gateway import embeddings, wire
from services.gateway.front import Front
from services.gateway.media.uploads import Uploads
from services.gateway.models import Model
from services.gateway.service import reading, receiving, writing
from services.gateway.text import Envelope
from services.gateway.trace import TRACEPARENT, request_id_of

SERVICE = "triptych.v1.GatewayService"
Context = grpc.aio.ServicerContext[Any, Any]


class GatewayService(gateway_pb2_grpc.GatewayServiceServicer):  # type: ignore[misc]
    """The contract with clients. What is not built is refused by name."""

    def __init__(self, front: Front, uploads: Uploads) -> None:
        self._front = front
        self._uploads = uploads

    def add_to(self, server: Server) -> None:
        """Answers on that server."""
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(self, server.grpc)

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        """Continues a prompt."""
        arrived = time.monotonic()
        model = self._model_of(request)
        prompt = reading.prompt(request)
        values = reading.generate_values(request)
        with self._front.arrival():
            job = await model.text.generate(values, prompt, _envelope(context), prefix=reading.PREFIX)
        async for message in writing.generated(self._front.start(model, job, arrived=arrived), job.response):
            yield message

    async def Chat(self, request: gateway_pb2.ChatRequest, context: Context) -> AsyncIterator[gateway_pb2.ChatResponse]:
        """Answers a conversation."""
        arrived = time.monotonic()
        model = self._model_of(request)
        values = reading.chat_values(request)
        messages = reading.turns(request.messages)
        with self._front.arrival():
            job = await model.text.converse(values, messages, _envelope(context), prefix=reading.PREFIX)
        async for message in writing.answered(self._front.start(model, job, arrived=arrived), job.response):
            yield message

    async def Resume(
        self, request: gateway_pb2.ResumeRequest, context: Context
    ) -> AsyncIterator[gateway_pb2.ResumeResponse]:
        """Not built."""
        raise Unimplemented("Resume is not supported by this server")
        yield  # makes this a stream

    async def Abort(self, request: gateway_pb2.AbortRequest, context: Context) -> gateway_pb2.AbortResponse:
        """Ends a request of this or any other gateway of the same engine."""
        return gateway_pb2.AbortResponse(found=await self._front.router.abort_by_token(reading.token(request.token)))

    async def Explain(self, request: gateway_pb2.ExplainRequest, context: Context) -> gateway_pb2.ExplainResponse:
        """Why a request is where it is."""
        said = await self._front.router.explain(reading.token(request.token))
        return gateway_pb2.ExplainResponse(
            state=said.state, reason=said.reason, position=said.position if said.HasField("position") else None
        )

    async def Tokenize(self, request: gateway_pb2.TokenizeRequest, context: Context) -> gateway_pb2.TokenizeResponse:
        """Text or messages to ids."""
        model = self._model_of(request)
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        with self._front.arrival():
            match request.WhichOneof("input"):
                case "text":
                    ids = await model.text.tokenize(request.text, add_special_tokens=special)
                case "messages":
                    messages = reading.turns(request.messages.messages, "messages.messages")
                    asked = reading.tokenize_asked(request)
                    ids = await model.text.tokenize_messages(messages, asked, reading.TOKENIZE)
                case _:
                    raise InvalidArgument("input: text or messages is needed", field="input")
        pieces = [model.text.vocabulary.piece(token_id) for token_id in ids]
        return gateway_pb2.TokenizeResponse(token_ids=ids, tokens=pieces, max_model_len=model.info.max_model_len)

    async def Detokenize(
        self, request: gateway_pb2.DetokenizeRequest, context: Context
    ) -> gateway_pb2.DetokenizeResponse:
        """Ids to text."""
        model = self._model_of(request)
        with self._front.arrival():
            text = await model.text.detokenize(list(request.token_ids), field="token_ids")
        return gateway_pb2.DetokenizeResponse(text=text)

    async def Embed(self, request: gateway_pb2.EmbedRequest, context: Context) -> gateway_pb2.EmbedResponse:
        """A vector for each input."""
        arrived = time.monotonic()
        model = self._model_of(request)
        with self._front.arrival():
            inputs = await embeddings.read(model, reading.embed_asked(request), _envelope(context), field="inputs")
        writing.check_embeddings(len(inputs.prompts), inputs.size)
        vectors = await embeddings.embed(self._front, model, inputs, writing.embedding, arrived=arrived)
        return gateway_pb2.EmbedResponse(embeddings=vectors, usage=wire.usage(inputs.usage))

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: Context
    ) -> gateway_pb2.ListModelsResponse:
        """The models; none before the engine has been there."""
        return gateway_pb2.ListModelsResponse(models=[wire.model_info(m.info) for m in self._front.models.all()])

    async def GetModel(self, request: gateway_pb2.GetModelRequest, context: Context) -> gateway_pb2.GetModelResponse:
        """One model."""
        return gateway_pb2.GetModelResponse(model=wire.model_info(self._front.models.get(request.model).info))

    async def UploadMedia(
        self, request_iterator: AsyncIterator[gateway_pb2.UploadMediaRequest], context: Context
    ) -> gateway_pb2.UploadMediaResponse:
        """Keeps a file for later requests."""
        with self._front.arrival():
            digest = await receiving.upload(self._uploads, request_iterator)
        return gateway_pb2.UploadMediaResponse(sha256=digest)

    def _model_of(
        self,
        request: gateway_pb2.GenerateRequest
        | gateway_pb2.ChatRequest
        | gateway_pb2.TokenizeRequest
        | gateway_pb2.DetokenizeRequest
        | gateway_pb2.EmbedRequest,
    ) -> Model:
        return self._front.models.get(request.model if request.HasField("model") else None)


def _envelope(context: Context) -> Envelope:
    headers = {str(name): str(value) for name, value in context.invocation_metadata() or ()}
    remaining = context.time_remaining()
    deadline_ms = None if remaining is None or remaining > 2**31 / 1000 else max(1, round(remaining * 1000))
    return Envelope(request_id_of(headers), tracing.child(headers.get(TRACEPARENT)), deadline_ms)
