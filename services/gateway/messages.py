"""The turns of a conversation: read from JSON, checked, and spelled as chat templates expect them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from services.common.errors import InvalidArgument
from services.common.settings import nearest
from services.gateway.json_text import read_json
from services.gateway.kinds import whole, wrong
from services.gateway.limits import DEFAULT_LIMITS, check_text
from services.gateway.parts import CHAT_MEDIA, Content, MediaPart, check_role, gathered, read_url_part, refuse_part


@dataclass(slots=True, frozen=True)
class ToolCall:
    """A call that an assistant made. `arguments` is JSON text."""

    name: str
    arguments: str = ""
    id: str | None = None


@dataclass(slots=True, frozen=True)
class Message:
    """One turn. `text` is its text, parts of it joined by line breaks.

    `content` has its parts in order where it has media, and is empty where there is text alone.
    """

    role: str
    text: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None
    reasoning: str | None = None
    content: Content = ()

    def for_template(self, *, parts: bool) -> dict[str, Any]:
        """The dict that a template sees; `parts` spells the text as a list of one part. With media it is a list."""
        shown: dict[str, Any] = {"role": self.role}
        if self.content:
            shown["content"] = [_part_for_template(part) for part in self.content]
        else:
            shown["content"] = [_part_for_template(self.text)] if parts else self.text
        if self.tool_calls:
            shown["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        if self.tool_call_id is not None:
            shown["tool_call_id"] = self.tool_call_id
        if self.name is not None:
            shown["name"] = self.name
        if self.reasoning is not None:
            shown.update(dict.fromkeys(_REASONING, self.reasoning))
        return shown

    def told(self, before: str = "", after: str = "") -> Message:
        """The turn with more text around what it says."""
        around = self.content and tuple(part for part in (before, *self.content, after) if part)
        return replace(self, text=before + self.text + after, content=around)


_REASONING = ("reasoning_content", "reasoning", "thinking")
_KNOWN = ("role", "content", "tool_calls", "tool_call_id", "name", *_REASONING)
_EMPTY = ("refusal", "audio", "function_call", "annotations")
"""What answers carry and clients send back; only empty values can be honoured."""
_CALL = ("id", "type", "function", "index")
"""Keys of a call. Its index, which clients have from streams, says where it stands, as its place does."""
_NO_ANSWERS = frozenset({"system", "developer", "user", "tool", "function"})
"""Roles that call nothing and do not reason; what a role may that only a template knows is the template's business."""
_NO_RESULTS = _NO_ANSWERS - {"tool"} | {"assistant"}
"""Roles that answer no call."""


def _part_for_template(part: str | MediaPart) -> dict[str, Any]:
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": part.modality}


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    arguments = json.loads(call.arguments) if call.arguments.strip() else {}
    shown: dict[str, Any] = {"type": "function", "function": {"name": call.name, "arguments": arguments}}
    return shown if call.id is None else {"id": call.id, **shown}


def read_messages(value: object, *, field: str = "messages") -> tuple[Message, ...]:
    """The turns in JSON."""
    if not isinstance(value, list) or not value or len(value) > DEFAULT_LIMITS.messages:
        raise wrong(field, f"an array of 1 to {DEFAULT_LIMITS.messages} messages", value)
    return tuple(_read_message(entry, f"{field}[{i}]") for i, entry in enumerate(value))


def make_message(message: Message, content: Sequence[str | MediaPart], where: str) -> Message:
    """A turn with its content in parts, checked: what does not come from JSON is made by this."""
    text, parts = gathered(content)
    if not message.role:
        raise wrong(f"{where}.role", "a role", message.role)
    for i, call in enumerate(message.tool_calls):
        if not call.name:
            raise wrong(f"{where}.tool_calls[{i}].name", "a name", call.name)
        check_arguments(call.arguments, f"{where}.tool_calls[{i}].arguments")
    turn = replace(message, text=text, content=parts)
    return _in_place(turn, where, reasoning="reasoning_content", said=bool(content))


def _in_place(turn: Message, where: str, *, reasoning: str, said: bool) -> Message:
    """The turn, if it has what its role needs and nothing that belongs to another's; what is empty says nothing.

    `reasoning` is how the client spells it, `said` whether there is content.
    """
    role = turn.role
    for key, value, owner, strangers in (
        ("tool_calls", turn.tool_calls, "the assistant", _NO_ANSWERS),
        (reasoning, turn.reasoning, "the assistant", _NO_ANSWERS),
        ("tool_call_id", turn.tool_call_id, "a tool", _NO_RESULTS),
    ):
        if value and role in strangers:
            place = f"{where}.{key}"
            raise InvalidArgument(f"{place}: belongs to a turn of {owner}, not of {role}", field=place)
    if role == "tool" and not turn.tool_call_id:
        place = f"{where}.tool_call_id"
        raise InvalidArgument(f"{place}: needed, the id of the call that is answered", field=place)
    check_role(role, turn.content)
    if turn.reasoning is not None and role in _NO_ANSWERS:
        turn = replace(turn, reasoning=None)
    if turn.tool_call_id == "":
        turn = replace(turn, tool_call_id=None)
    if not said and not turn.tool_calls and turn.reasoning is None:
        without = "" if role in _NO_ANSWERS else " without tool_calls"
        raise InvalidArgument(f"{where}.content: needed{without}", field=f"{where}.content")
    return turn


def _read_message(entry: object, where: str) -> Message:
    if not isinstance(entry, dict):
        raise wrong(where, "a message", entry)
    for key, value in entry.items():
        if key in _EMPTY and value:
            raise InvalidArgument(f"{where}.{key}: not supported by this server", field=f"{where}.{key}")
        if key not in _KNOWN and key not in _EMPTY:
            raise InvalidArgument(f"{where}.{key}: unknown field{nearest(str(key), _KNOWN)}", field=f"{where}.{key}")
    role = _string(entry, "role", where)
    if not role:
        raise wrong(f"{where}.role", "a role", entry.get("role"))
    calls = _read_calls(entry.get("tool_calls"), f"{where}.tool_calls")
    content = entry.get("content")
    spelled, reasoning = _read_reasoning(entry, where)
    text, parts = ("", ()) if content is None else _read_content(content, f"{where}.content")
    call_id, name = _string(entry, "tool_call_id", where), _string(entry, "name", where)
    turn = Message(role, text, calls, call_id, name, reasoning, parts)
    return _in_place(turn, where, reasoning=spelled, said=content is not None)


def _read_reasoning(entry: dict[str, Any], where: str) -> tuple[str, str | None]:
    """The reasoning of a turn, with the name that it came by; under two names it must be the same."""
    said = {name: text for name in _REASONING if (text := _string(entry, name, where)) is not None}
    if not said:
        return _REASONING[0], None
    (first, reasoning), *others = said.items()
    for name, text in others:
        if text != reasoning:
            raise InvalidArgument(f"{where}.{name}: contradicts {first}", field=f"{where}.{name}")
    return first, reasoning


def _string(entry: dict[str, Any], key: str, where: str) -> str | None:
    value = entry.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        raise wrong(f"{where}.{key}", "a string", value)
    check_text(value, f"{where}.{key}")
    return value


def _read_content(content: object, where: str) -> tuple[str, Content]:
    if isinstance(content, str):
        check_text(content, where)
        return content, ()
    if not isinstance(content, list):
        raise wrong(where, "a string or an array of parts", content)
    return gathered([_read_part(part, f"{where}[{i}]") for i, part in enumerate(content)])


def _read_part(part: object, where: str) -> str | MediaPart:
    if isinstance(part, str):
        check_text(part, where)
        return part
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise wrong(where, "a part with a type", part)
    if part["type"] in CHAT_MEDIA:
        return read_url_part(part, where)
    if part["type"] != "text":
        raise refuse_part(part["type"], where)
    text = _string(part, "text", where)
    if text is None:
        raise wrong(f"{where}.text", "a string", None)
    _check_keys(part, where, ("type", "text"))
    return text


def _read_calls(value: object, where: str) -> tuple[ToolCall, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise wrong(where, "an array", value)
    return tuple(_read_call(call, f"{where}[{i}]") for i, call in enumerate(value))


def _read_call(call: object, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or call.get("type", "function") != "function":
        raise wrong(where, "a call of a function", call)
    _check_keys(call, where, _CALL)
    index = call.get("index")
    if index is not None and whole(index) is None:
        raise wrong(f"{where}.index", "an integer", index)
    _check_keys(function, f"{where}.function", ("name", "arguments"))
    name = _string(function, "name", f"{where}.function")
    if not name:
        raise wrong(f"{where}.function.name", "a name", name)
    arguments = function.get("arguments")
    if isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, str | None):
        raise wrong(f"{where}.function.arguments", "a string with JSON", arguments)
    check_arguments(arguments or "", f"{where}.function.arguments")
    return ToolCall(name, arguments or "", _string(call, "id", where) or None)


def _check_keys(entry: dict[str, Any], where: str, keys: Sequence[str]) -> None:
    for key in entry:
        if key not in keys:
            raise InvalidArgument(f"{where}.{key}: unknown field{nearest(key, keys)}", field=f"{where}.{key}")


def check_arguments(arguments: str, where: str) -> None:
    """Raises where the arguments of a call are no JSON, or an object of which something would be lost.

    None at all are fine.
    """

    def constant(word: str) -> None:
        raise ValueError(f"{word} is no number")

    try:
        value = json.loads(arguments, parse_constant=constant) if arguments.strip() else None
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{where}: no JSON: {error}", field=where) from None
    if isinstance(value, dict):  # integers of any length are read above, every digit
        read_json(arguments.encode(errors="surrogatepass"), where, rounded=True)
