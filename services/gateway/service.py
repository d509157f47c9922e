"""GatewayService over gRPC: the same front as REST, with google.rpc details on errors."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import grpc.aio

from protos import gateway_pb2, gateway_pb2_grpc
from services.common import tracing
from services.common.errors import InvalidArgument, Unimplemented
from services.common.server import Server
from services.gateway import wire
from services.gateway.asked import Asked
from services.gateway.front import Front, Running
from services.gateway.messages import Message, ToolCall, make_message, refuse_part
from services.gateway.request import Delta
from services.gateway.text import Envelope, Job
from services.gateway.trace import TRACEPARENT, request_id_of

SERVICE = "triptych.v1.GatewayService"
Context = grpc.aio.ServicerContext[Any, Any]
_SAMPLING = "sampling."
_SAMPLING_SCALARS = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "n",
    "logprobs",
    "prompt_logprobs",
    "num_speculative_tokens",
)


class GatewayService(gateway_pb2_grpc.GatewayServiceServicer):  # type: ignore[misc]
    """The contract with clients. What is not built is refused by name."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def add_to(self, server: Server) -> None:
        """Answers on that server."""
        gateway_pb2_grpc.add_GatewayServiceServicer_to_server(self, server.grpc)

    async def Generate(
        self, request: gateway_pb2.GenerateRequest, context: Context
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        """Continues a prompt."""
        arrived = time.monotonic()
        model = self._front.models.get(request.model if request.HasField("model") else None)
        prompt: str | list[int]
        if request.WhichOneof("prompt") == "text":
            prompt = request.text
        elif request.WhichOneof("prompt") == "token_ids":
            prompt = list(request.token_ids.ids)
        else:
            raise InvalidArgument("prompt: text or token_ids is needed", field="prompt")
        values = _values(request.sampling, request.options)
        if request.HasField("echo"):
            values["echo"] = request.echo
        with self._front.arrival():
            job = await model.text.generate(values, prompt, _envelope(context), prefix=_SAMPLING)
        running = self._front.start(model, job.spec, arrived=arrived, needs_tokens=_needs_tokens(job), echo=job.echo)
        async for delta, first, last in _deltas(running, stream=job.response.stream):
            message = gateway_pb2.GenerateResponse(
                index=delta.choice,
                first_index=delta.first_index,
                text=delta.text,
                token_ids=delta.token_ids if job.response.return_token_ids else (),
                logprobs=wire.token_logprobs(model.text.vocabulary, delta.logprobs),
            )
            _frame(message, running, delta, first=first, last=last)
            if first and running.prompt_logprobs:
                message.prompt_logprobs.extend(wire.token_logprobs(model.text.vocabulary, running.prompt_logprobs))
            yield message

    async def Chat(self, request: gateway_pb2.ChatRequest, context: Context) -> AsyncIterator[gateway_pb2.ChatResponse]:
        """Answers a conversation."""
        arrived = time.monotonic()
        model = self._front.models.get(request.model if request.HasField("model") else None)
        values = {**_values(request.sampling, request.options), **_chat_values(request)}
        if "prompt_logprobs" in values:
            name = f"{_SAMPLING}prompt_logprobs"
            raise Unimplemented(f"{name}: not supported by Chat, whose answers have no place for them", field=name)
        messages = [_message(message, f"messages[{i}]") for i, message in enumerate(request.messages)]
        with self._front.arrival():
            job = await model.text.converse(values, messages, _envelope(context), prefix=_SAMPLING)
        running = self._front.start(model, job.spec, arrived=arrived, needs_tokens=_needs_tokens(job))
        begun: set[int] = set()
        async for delta, first, last in _deltas(running, stream=job.response.stream):
            message = gateway_pb2.ChatResponse(
                index=delta.choice,
                first_index=delta.first_index,
                content=delta.text,
                token_ids=delta.token_ids if job.response.return_token_ids else (),
                logprobs=wire.token_logprobs(model.text.vocabulary, delta.logprobs),
            )
            if delta.choice not in begun:
                begun.add(delta.choice)
                message.role = "assistant"
            _frame(message, running, delta, first=first, last=last)
            yield message

    async def Resume(
        self, request: gateway_pb2.ResumeRequest, context: Context
    ) -> AsyncIterator[gateway_pb2.ResumeResponse]:
        """Not built."""
        raise Unimplemented("Resume is not supported by this server")
        yield  # makes this a stream

    async def Abort(self, request: gateway_pb2.AbortRequest, context: Context) -> gateway_pb2.AbortResponse:
        """Ends a request of this or any other gateway of the same engine."""
        return gateway_pb2.AbortResponse(found=await self._front.router.abort_by_token(_token(request.token)))

    async def Explain(self, request: gateway_pb2.ExplainRequest, context: Context) -> gateway_pb2.ExplainResponse:
        """Why a request is where it is."""
        said = await self._front.router.explain(_token(request.token))
        return gateway_pb2.ExplainResponse(
            state=said.state, reason=said.reason, position=said.position if said.HasField("position") else None
        )

    async def Tokenize(self, request: gateway_pb2.TokenizeRequest, context: Context) -> gateway_pb2.TokenizeResponse:
        """Text or messages to ids."""
        model = self._front.models.get(request.model if request.HasField("model") else None)
        kind = request.WhichOneof("input")
        special = request.add_special_tokens if request.HasField("add_special_tokens") else None
        with self._front.arrival():
            if kind == "text":
                ids = await model.text.tokenize(request.text, add_special_tokens=special is not False)
            elif kind == "messages":
                turns = request.messages
                messages = [_message(turn, f"messages.messages[{i}]") for i, turn in enumerate(turns.messages)]
                if not messages:
                    raise InvalidArgument("messages: at least one message is needed", field="messages")
                opening = turns.add_generation_prompt if turns.HasField("add_generation_prompt") else None
                asked = Asked(add_generation_prompt=opening, add_special_tokens=special)
                ids = await model.text.tokenize_messages(messages, asked)
            else:
                raise InvalidArgument("input: text or messages is needed", field="input")
        pieces = [model.text.vocabulary.piece(token_id) for token_id in ids]
        return gateway_pb2.TokenizeResponse(token_ids=ids, tokens=pieces, max_model_len=model.info.max_model_len)

    async def Detokenize(
        self, request: gateway_pb2.DetokenizeRequest, context: Context
    ) -> gateway_pb2.DetokenizeResponse:
        """Ids to text."""
        model = self._front.models.get(request.model if request.HasField("model") else None)
        with self._front.arrival():
            text = await model.text.detokenize(list(request.token_ids), field="token_ids")
        return gateway_pb2.DetokenizeResponse(text=text)

    async def Embed(self, request: gateway_pb2.EmbedRequest, context: Context) -> gateway_pb2.EmbedResponse:
        """Not built."""
        raise Unimplemented("Embed is not supported by this server")

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
        """Not built."""
        raise Unimplemented("UploadMedia is not supported by this server")


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
        async with aclosing(running.deltas()) as source:
            async for delta in source:
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
    if last:
        message.usage.CopyFrom(wire.usage(running.usage))


def _needs_tokens(job: Job) -> bool:
    return job.response.return_token_ids or job.response.top_logprobs is not None


def _envelope(context: Context) -> Envelope:
    headers = {str(name): str(value) for name, value in context.invocation_metadata() or ()}
    remaining = context.time_remaining()
    deadline_ms = None if remaining is None or remaining > 2**31 / 1000 else max(1, round(remaining * 1000))
    return Envelope(request_id_of(headers), tracing.child(headers.get(TRACEPARENT)), deadline_ms)


def _token(token: bytes) -> bytes:
    if len(token) != 16:
        raise InvalidArgument("token: 16 bytes, as the first message of the request had them", field="token")
    return token


def _values(sampling: gateway_pb2.SamplingOptions, options: gateway_pb2.RequestOptions) -> dict[str, object]:
    """What the client set, under the names of the field table."""
    set_fields = {field.name: value for field, value in sampling.ListFields()}
    values: dict[str, object] = {name: set_fields[name] for name in _SAMPLING_SCALARS if name in set_fields}
    for name in ("allowed_token_ids", "bad_words", "stop", "stop_token_ids"):
        if name in set_fields:
            values[name] = list(set_fields[name])
    if sampling.logit_bias:
        values["logit_bias"] = [(entry.token_id, entry.bias) for entry in sampling.logit_bias]
    if sampling.HasField("constraint"):
        values["constraint"] = True
    values.update({field.name: value for field, value in options.ListFields()})
    return values


def _chat_values(request: gateway_pb2.ChatRequest) -> Mapping[str, object]:
    values: dict[str, object] = {}
    if request.HasField("add_generation_prompt"):
        values["add_generation_prompt"] = request.add_generation_prompt
    if request.HasField("continue_final_message"):
        values["continue_final_message"] = request.continue_final_message
    if request.HasField("chat_template_kwargs_json"):
        values["chat_template_kwargs"] = _json(request.chat_template_kwargs_json, "chat_template_kwargs_json")
    if request.HasField("tools_json"):
        values["tools"] = _json(request.tools_json, "tools_json")
    if request.HasField("tool_choice"):
        values["tool_choice"] = request.tool_choice
    return values


def _json(text: str, field: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{field}: no JSON: {error}", field=field) from None


def _message(message: gateway_pb2.ChatMessage, where: str) -> Message:
    calls = tuple(ToolCall(call.name, call.arguments, call.id or None) for call in message.tool_calls)
    turn = Message(
        message.role,
        "",
        calls,
        message.tool_call_id if message.HasField("tool_call_id") else None,
        message.name if message.HasField("name") else None,
        message.reasoning_content if message.HasField("reasoning_content") else None,
    )
    return make_message(turn, _texts(message.content, where), where)


def _texts(parts: Sequence[gateway_pb2.ContentPart], where: str) -> list[str]:
    texts = []
    for i, part in enumerate(parts):
        kind = part.WhichOneof("kind")
        if kind != "text":
            raise refuse_part(kind or "nothing", f"{where}.content[{i}]")
        texts.append(part.text)
    return texts
