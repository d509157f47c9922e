"""What gRPC clients ask for, as plain values under the names of the field table.

Errors name a field as its message spells it: "sampling.top_p", "options.priority", "tools_json".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import Message as ProtoMessage

from protos import common_pb2, gateway_pb2
from services.common.errors import InvalidArgument
from services.gateway.asked import Asked
from services.gateway.fields import Api, Caller, read_fields
from services.gateway.json_text import read_json
from services.gateway.kinds import Object
from services.gateway.limits import DEFAULT_LIMITS
from services.gateway.messages import Message, ToolCall, make_message
from services.gateway.parts import MediaPart, Modality, check_uuid, make_part, refuse_part

PREFIX = "sampling."
"""How the messages spell most fields of the table."""
TOKENIZE = Caller(Api.TOKENIZE, PREFIX, "messages.")
"""Who asks for the ids of a conversation."""
_OF_CHAT = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "echo",
    "include_reasoning",
    "parallel_tool_calls",
    "reasoning_effort",
)
_POOLINGS: Mapping[int, str] = {common_pb2.POOLING_MEAN: "mean", common_pb2.POOLING_LAST: "last"}
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
    values.update(_documents(said))
    if "tool_choice" in said:
        values["tool_choice"] = _tool_choice(request.tool_choice)
    return values


def turns(messages: Sequence[gateway_pb2.ChatMessage], where: str = "messages") -> list[Message]:
    """The turns of a conversation."""
    if not 0 < len(messages) <= DEFAULT_LIMITS.messages:
        most = DEFAULT_LIMITS.messages
        raise InvalidArgument(f"{where}: 1 to {most} messages are needed, not {len(messages)}", field=where)
    return [_turn(message, f"{where}[{i}]") for i, message in enumerate(messages)]


def tokenize_asked(request: gateway_pb2.TokenizeRequest) -> Asked:
    """What a Tokenize of messages says of its prompt."""
    said = _said(request.messages)
    values = _documents(said, TOKENIZE.within)
    variables = values.get("chat_template_kwargs")
    if variables is not None:
        variables = Object().read(variables, TOKENIZE.spell("chat_template_kwargs"))
    return Asked(
        add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else None,
        add_generation_prompt=said.get("add_generation_prompt"),
        continue_final_message=said.get("continue_final_message"),
        tools=values.get("tools"),
        chat_template_kwargs=variables,
        media_io_kwargs=values.get("media_io_kwargs"),
        mm_processor_kwargs=values.get("mm_processor_kwargs"),
    )


def embed_asked(request: gateway_pb2.EmbedRequest) -> Asked:
    """What an Embed asks for; its inputs are texts and arrays of ids."""
    values = _said(request)
    values["input"] = [_input(message, f"inputs[{i}]") for i, message in enumerate(values.pop("inputs", ()))]
    if request.HasField("pooling"):
        values["pooling"] = _POOLINGS.get(request.pooling, request.pooling)
    return read_fields(values, Api.EMBEDDINGS)


def _input(message: gateway_pb2.EmbedInput, where: str) -> str | list[int]:
    match message.WhichOneof("kind"):
        case "text":
            return message.text
        case "token_ids":
            return list(message.token_ids.ids)
        case _:
            raise InvalidArgument(f"{where}: text or token_ids is needed", field=where)


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


def _documents(said: Mapping[str, Any], where: str = "") -> dict[str, Json]:
    """The fields that hold JSON text, read."""
    names = ("chat_template_kwargs", "documents", "tools", "media_io_kwargs", "mm_processor_kwargs")
    spelled = {name: f"{name}_json" for name in names}
    return {name: read_json(said[field].encode(), where + field) for name, field in spelled.items() if field in said}


def _tool_choice(text: str) -> Json:
    """A word as it is, unless it begins as an object does: which words there are is known below."""
    return read_json(text.encode(), "tool_choice") if text.lstrip().startswith("{") else text


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
    return make_message(turn, [_part(part, f"{where}.content[{i}]") for i, part in enumerate(message.content)], where)


_URLS: Mapping[str, Modality] = {"image_url": "image", "video_url": "video"}
_HASHES: Mapping[str, Modality] = {"image_hash": "image", "video_hash": "video"}


def _part(part: gateway_pb2.ContentPart, where: str) -> str | MediaPart:
    kind = part.WhichOneof("kind")
    uuid = check_uuid(part.uuid, where) if part.HasField("uuid") else None
    if kind == "text":
        if uuid is not None:
            raise InvalidArgument(f"{where}.uuid: not for text", field=f"{where}.uuid")
        return part.text
    if kind in _URLS:
        return make_part(_URLS[kind], _said(part)[kind], where, uuid, place=f"{where}.{kind}")
    if kind in _HASHES:
        digest: bytes = _said(part)[kind]
        if len(digest) != 32:
            place = f"{where}.{kind}"
            raise InvalidArgument(f"{place}: 32 bytes, as UploadMedia answered them", field=place)
        return MediaPart(_HASHES[kind], digest, where, uuid)
    raise refuse_part(kind or "nothing", where)
