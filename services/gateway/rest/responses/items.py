"""The input of /v1/responses: a text, or items of a history, as the turns of a conversation.

What a model answered came as several items; here they are one turn of the assistant again:

    reasoning, message, function_call …  ──▶  Message("assistant", text, calls, reasoning)
    function_call_output                 ──▶  Message("tool", output), with the name of the call it answers
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from services.common.errors import InvalidArgument
from services.common.settings import nearest
from services.gateway.kinds import wrong
from services.gateway.limits import DEFAULT_LIMITS, check_text
from services.gateway.messages import Message, ToolCall, check_arguments
from services.gateway.parts import Content, MediaPart, check_role, gathered, read_input_image, refuse_part

_MARKS: Final = ("type", "id", "status")
"""What items carry that says nothing to a model."""
_EMPTY: Final = ("phase", "encrypted_content", "namespace", "caller")
"""What can't be honoured unless it is empty."""
_ROLES: Final = ("user", "assistant", "system", "developer")
_SAID: Final = ("input_text", "input_image")
_ANSWERED: Final = ("output_text", "refusal")
_PARTS: Final = {
    "input_text": ("text", ()),
    "input_image": ("image_url", ()),
    "output_text": ("text", ("annotations", "logprobs")),
    "refusal": ("refusal", ()),
    "reasoning_text": ("text", ()),
    "summary_text": ("text", ()),
}
"""Types of parts: where their text is, and what beside it says nothing to a model."""

Entry = Mapping[str, Any]


def read_input(value: object, instructions: str | None = None) -> tuple[Message, ...]:
    """The conversation, oldest turn first, after a system message with the instructions."""
    history = _History([] if instructions is None else [Message("system", instructions)])
    if isinstance(value, str):
        check_text(value, "input")
        history.turns.append(Message("user", value))
    elif isinstance(value, list) and 0 < len(value) <= DEFAULT_LIMITS.messages:
        for i, item in enumerate(value):
            history.add(item, f"input[{i}]")
    else:
        raise wrong("input", f"a string or an array of 1 to {DEFAULT_LIMITS.messages} items", value)
    history.close()
    return tuple(history.turns)


@dataclass(slots=True)
class _Turn:
    """A turn of the assistant that is still being put together."""

    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)

    def message(self) -> Message:
        reasoning = "\n".join(self.reasoning) if self.reasoning else None
        return Message("assistant", "\n".join(self.texts), tuple(self.calls), reasoning=reasoning)


class _History:
    def __init__(self, turns: list[Message]) -> None:
        self.turns = turns
        self._turn: _Turn | None = None
        self._names: dict[str, str] = {}  # of the functions that were called, by id of the call
        self._kinds: dict[str, Callable[[Entry, str], None]] = {
            "message": self._message,
            "reasoning": self._reasoning,
            "function_call": self._call,
            "function_call_output": self._output,
        }

    def add(self, item: object, where: str) -> None:
        """Takes the next item."""
        if not isinstance(item, dict):
            raise wrong(where, "an item", item)
        kind = item.get("type", "message")
        read = self._kinds.get(kind) if isinstance(kind, str) else None
        if read is None:
            raise InvalidArgument(f"{where}: items of type {kind!r:.80} are not supported", field=where)
        read(item, where)

    def close(self) -> None:
        """Ends the turn of the assistant that is being put together."""
        if self._turn is not None:
            self.turns.append(self._turn.message())
            self._turn = None

    def _open(self) -> _Turn:
        if self._turn is None:
            self._turn = _Turn()
        return self._turn

    def _message(self, item: Entry, where: str) -> None:
        _check_keys(item, where, ("role", "content"))
        role = item.get("role")
        if role not in _ROLES:
            raise wrong(f"{where}.role", f"one of {', '.join(_ROLES)}", role)
        if role != "assistant":
            text, content = _content(item.get("content"), f"{where}.content", _SAID)
            check_role(role, content)
            self.close()
            self.turns.append(Message(role, text, content=content))
            return
        text = _text(item.get("content"), f"{where}.content", _ANSWERED)
        if self._turn is not None and self._turn.texts and not self._turn.calls:
            self.close()  # two messages of its own, as somebody wrote them
        self._open().texts.append(text)

    def _reasoning(self, item: Entry, where: str) -> None:
        _check_keys(item, where, ("summary", "content"))
        content, summary = item.get("content"), item.get("summary")
        whole = "" if content is None else _text(content, f"{where}.content", ("reasoning_text",))
        short = "" if summary is None else _text(summary, f"{where}.summary", ("summary_text",))
        if self._turn is not None and (self._turn.texts or self._turn.calls):
            self.close()
        self._open().reasoning.append(whole or short)

    def _call(self, item: Entry, where: str) -> None:
        _check_keys(item, where, ("call_id", "name", "arguments"))
        name = _string(item, "name", where)
        call_id = _string(item, "call_id", where)
        arguments = item.get("arguments")
        if not isinstance(arguments, str):
            raise wrong(f"{where}.arguments", "a string with JSON", arguments)
        check_arguments(arguments, f"{where}.arguments")
        if call_id in self._names:
            raise InvalidArgument(f"{where}.call_id: a second call has this id", field=f"{where}.call_id")
        self._names[call_id] = name
        self._open().calls.append(ToolCall(name, arguments, call_id))

    def _output(self, item: Entry, where: str) -> None:
        _check_keys(item, where, ("call_id", "output"))
        call_id = _string(item, "call_id", where)
        if call_id not in self._names:
            raise InvalidArgument(f"{where}.call_id: no call before it has this id", field=f"{where}.call_id")
        self.close()
        text, content = _content(item.get("output"), f"{where}.output", _SAID)
        self.turns.append(Message("tool", text, tool_call_id=call_id, name=self._names[call_id], content=content))


def _check_keys(item: Entry, where: str, keys: tuple[str, ...], marks: tuple[str, ...] = _MARKS) -> None:
    for key, value in item.items():
        if key in _EMPTY and value:
            raise InvalidArgument(f"{where}.{key}: not supported by this server", field=f"{where}.{key}")
        if key not in keys and key not in marks and key not in _EMPTY:
            raise InvalidArgument(f"{where}.{key}: unknown field{nearest(key, keys)}", field=f"{where}.{key}")


def _string(item: Entry, key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str) or not value:
        raise wrong(f"{where}.{key}", "a string that is not empty", value)
    check_text(value, f"{where}.{key}")
    return value


def _text(content: object, where: str, types: tuple[str, ...]) -> str:
    return _content(content, where, types)[0]


def _content(content: object, where: str, types: tuple[str, ...]) -> tuple[str, Content]:
    if isinstance(content, str):
        check_text(content, where)
        return content, ()
    if not isinstance(content, list):
        raise wrong(where, "a string or an array of parts", content)
    return gathered([_part(part, f"{where}[{i}]", types) for i, part in enumerate(content)])


def _part(part: object, where: str, types: tuple[str, ...]) -> str | MediaPart:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise wrong(where, "a part with a type", part)
    if part["type"] not in types:
        if part["type"] in _PARTS:
            raise wrong(f"{where}.type", " or ".join(f'"{kind}"' for kind in types), part["type"])
        raise refuse_part(part["type"], where)
    if part["type"] == "input_image":
        return read_input_image(part, where)
    key, marks = _PARTS[part["type"]]
    _check_keys(part, where, (key,), ("type", *marks))
    text = part.get(key)
    if not isinstance(text, str):
        raise wrong(f"{where}.{key}", "a string", text)
    check_text(text, f"{where}.{key}")
    return text
