"""Tools that a client offers, and which of them the model must call: OpenAI's JSON, checked.

Chat nests a function's fields under "function"; /v1/responses has them beside "type" (`flat`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from services.common.errors import InvalidArgument
from services.common.settings import nearest
from services.gateway.kinds import Bool, Text, wrong
from services.gateway.limits import DEFAULT_LIMITS

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_KEYS = ("name", "description", "parameters", "strict")


@dataclass(slots=True, frozen=True)
class Tool:
    """A function that the model may call.

    parameters  JSON schema of its arguments, always of an object; None where the client gave none
    strict      whether arguments must follow the schema even where the model is free to call or not
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False

    def for_template(self) -> dict[str, Any]:
        """The dict that a chat template sees."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        if self.parameters is not None:
            function["parameters"] = self.parameters
        return {"type": "function", "function": function}


@dataclass(slots=True, frozen=True)
class ToolChoice:
    """Whether the model calls a tool: never, as it likes, at least once, or the one that is named."""

    mode: Literal["none", "auto", "required", "named"]
    name: str | None = None

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.mode in ("required", "named")


NO_TOOLS = ToolChoice("none")


def read_tools(value: object, *, field: str = "tools", flat: bool = False) -> tuple[Tool, ...]:
    """The tools of a request; none where `value` is None or empty."""
    if value is None:
        return ()
    if not isinstance(value, list) or len(value) > DEFAULT_LIMITS.tools:
        raise wrong(field, f"an array of at most {DEFAULT_LIMITS.tools} tools", value)
    tools = tuple(_read_tool(entry, f"{field}[{i}]", flat) for i, entry in enumerate(value))
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.name in seen:
            where = f"{field}[{i}]"
            raise InvalidArgument(f"{where}: a second tool has the name {tool.name!r}", field=where)
        seen.add(tool.name)
    return tools


def _read_tool(entry: object, where: str, flat: bool) -> Tool:
    if not isinstance(entry, dict) or not isinstance(entry.get("type"), str):
        raise wrong(where, "a tool with a type", entry)
    if entry["type"] != "function":
        raise InvalidArgument(f"{where}: tools of type {entry['type']!r} are not supported", field=where)
    if flat:
        return _read_function(entry, where, ("type", *_KEYS))
    _check_keys(entry, where, ("type", "function"))
    if not isinstance(entry.get("function"), dict):
        raise wrong(f"{where}.function", "a function", entry.get("function"))
    return _read_function(entry["function"], f"{where}.function", _KEYS)


def _read_function(function: dict[str, Any], where: str, keys: Sequence[str]) -> Tool:
    _check_keys(function, where, keys)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(f"{where}.name", "1 to 64 letters, digits, _ and -", name)
    description, parameters, strict = (function.get(key) for key in ("description", "parameters", "strict"))
    return Tool(
        name,
        None if description is None else Text().read(description, f"{where}.description"),
        None if parameters is None else _read_parameters(parameters, f"{where}.parameters"),
        strict is not None and Bool().read(strict, f"{where}.strict"),
    )


def _read_parameters(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong(where, "a JSON schema of an object", value)
    if value.get("type", "object") != "object":
        raise InvalidArgument(f'{where}.type: must be "object"; arguments have names', field=f"{where}.type")
    return value


def _check_keys(value: dict[str, Any], where: str, keys: Sequence[str]) -> None:
    for key in value:
        if key not in keys:
            raise InvalidArgument(f"{where}.{key}: unknown field{nearest(key, keys)}", field=f"{where}.{key}")


def read_tool_choice(
    value: object, tools: Sequence[Tool], *, field: str = "tool_choice", flat: bool = False
) -> ToolChoice:
    """Which of the tools is called; auto where there are tools and nothing was said."""
    if value is None:
        return ToolChoice("auto") if tools else NO_TOOLS
    if not tools and value != "none":
        raise InvalidArgument(f"{field}: only allowed together with tools", field=field)
    match value:
        case "none" | "auto" | "required":
            return ToolChoice(value)
        case {"type": "function", "name": str(name), **more} if flat and not more:
            return _named(name, tools, f"{field}.name")
        case {"type": "function", "function": {"name": str(name), **more}, **rest} if not (flat or more or rest):
            return _named(name, tools, f"{field}.function.name")
        case {"type": str(kind)} if kind != "function":
            raise InvalidArgument(f"{field}: a choice of type {kind!r} is not supported", field=field)
    shape = '{"type": "function", "name": …}' if flat else '{"type": "function", "function": {"name": …}}'
    raise wrong(field, f'"none", "auto", "required" or {shape}', value)


def _named(name: str, tools: Sequence[Tool], field: str) -> ToolChoice:
    names = [tool.name for tool in tools]
    if name not in names:
        raise InvalidArgument(f"{field}: no tool has the name {name!r}{nearest(name, names)}", field=field)
    return ToolChoice("named", name)
