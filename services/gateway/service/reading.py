"""What gRPC clients ask for, as plain values under the names of the field table.

Errors name a field as its message spells it: "sampling.top_p", "options.priority", "tools_json".
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message as ProtoMessage

from protos import common_pb2, gateway_pb2
from services.common.errors import InvalidArgument
from services.gateway.asked import Asked
from services.gateway.messages import Message, ToolCall, make_message, refuse_part

PREFIX = "sampling."
"""How the messages spell most fields of the table."""
_OF_CHAT = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "echo",
    "include_reasoning",
    "parallel_tool_calls",
    "reasoning_effort",
)
_CHOICES = frozenset({"none", "auto", "required"})
Json = Any


def prompt(request: gateway_pb2.GenerateRequest) -> str | list[int]:
    """The text or the ids to continue."""
    match request.WhichOneof("prompt"):
        case "text":
            return request.text
        case "token_ids":
            return list(request.token_ids.ids)
        case _:
            raise InvalidArgument("prompt: text or token_ids is needed", field="prompt")


def generate_values(request: gateway_pb2.GenerateRequest) -> dict[str, object]:
    """What a Generate sets."""
    values = _options(request)
    if request.HasField("echo"):
        values["echo"] = request.echo
    return values


def chat_values(request: gateway_pb2.ChatRequest) -> dict[str, object]:
    """What a Chat sets beside its messages."""
    values = _options(request)
    said = _said(request)
    values.update({name: said[name] for name in _OF_CHAT if name in said})
    values.update(_documents(said, ""))
    if "tool_choice" in said:
        values["tool_choice"] = _tool_choice(request.tool_choice)
    return values


def turns(messages: Sequence[gateway_pb2.ChatMessage], where: str = "messages") -> list[Message]:
    """The turns of a conversation."""
    if not messages:
        raise InvalidArgument(f"{where}: at least one message is needed", field=where)
    return [_turn(message, f"{where}[{i}]") for i, message in enumerate(messages)]


def tokenize_asked(request: gateway_pb2.TokenizeRequest) -> Asked:
    """What a Tokenize of messages says of its prompt."""
    said = _said(request.messages)
    values = _documents(said, "messages.")
    return Asked(
        add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else None,
        add_generation_prompt=said.get("add_generation_prompt"),
        continue_final_message=said.get("continue_final_message"),
        tools=values.get("tools"),
        chat_template_kwargs=values.get("chat_template_kwargs"),
    )


def token(data: bytes) -> bytes:
    """The name of a request."""
    if len(data) != 16:
        raise InvalidArgument("token: 16 bytes, as the first message of the request had them", field="token")
    return data


def _said(message: ProtoMessage) -> dict[str, Any]:
    """The fields that are set."""
    return {field.name: value for field, value in message.ListFields()}


def _options(request: gateway_pb2.GenerateRequest | gateway_pb2.ChatRequest) -> dict[str, object]:
    """What both calls set: how tokens are chosen, and the rest."""
    said = _said(request.sampling)
    values: dict[str, object] = {**said, **_said(request.options)}
    for name in ("allowed_token_ids", "bad_words", "stop", "stop_token_ids"):
        if name in said:
            values[name] = list(said[name])
    if "logit_bias" in said:
        values["logit_bias"] = [(entry.token_id, entry.bias) for entry in request.sampling.logit_bias]
    if "constraint" in said:
        values["constraint"] = _constraint(request.sampling.constraint)
    return values


def _constraint(message: common_pb2.Constraint) -> Mapping[str, object]:
    """One kind with its text, {"regex": "a+"}; of choices a list."""
    where = f"{PREFIX}constraint"
    if message.HasField("starts_after"):
        raise InvalidArgument(
            f"{where}.starts_after: set by the gateway, where reasoning comes first", field=f"{where}.starts_after"
        )
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidArgument(f"{where}: json_schema, regex, lark, json_object or choice is needed", field=where)
    if kind == "choice":
        return {kind: list(message.choice.values)}
    if kind == "json_object" and not message.json_object:
        raise InvalidArgument(f"{where}.json_object: must be true", field=f"{where}.json_object")
    return {kind: _said(message)[kind]}


def _documents(said: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields that hold JSON text, read."""
    values = {}
    for name in ("chat_template_kwargs", "tools", "documents"):
        spelled = f"{name}_json"
        if spelled in said:
            values[name] = _json(said[spelled], where + spelled)
    kwargs = values.get("chat_template_kwargs", {})
    if not isinstance(kwargs, dict):
        field = f"{where}chat_template_kwargs_json"
        raise InvalidArgument(f"{field}: must be an object", field=field)
    return values


def _tool_choice(text: str) -> Json:
    return text if text in _CHOICES else _json(text, "tool_choice")


def _json(text: str, field: str) -> Json:
    def constant(word: str) -> None:
        raise ValueError(f"{word} is no number")

    try:
        return json.loads(text, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{field}: no JSON: {error}", field=field) from None


def _turn(message: gateway_pb2.ChatMessage, where: str) -> Message:
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
