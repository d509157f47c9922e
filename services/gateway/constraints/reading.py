"""What a client asked for: response_format, structured_outputs, text.format, or the constraint of a gRPC call.

All of them say one of a few things: JSON by a schema, any JSON object, an expression, one of some texts,
a Lark grammar. What has no meaning here, and what is not one of those, is refused by its place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from services.common.errors import InvalidArgument
from services.common.settings import nearest
from services.gateway.asked import Asked
from services.gateway.constraints.lark import ascii_classes, client_grammar
from services.gateway.constraints.parts import LONGEST, Wanted, refuse
from services.gateway.constraints.schemas.normal import Style, normal_text
from services.gateway.fields import Caller
from services.gateway.kinds import Bool, Text, wrong
from services.gateway.limits import check_text

MOST_CHOICES = 10_000
_FIELDS = ("response_format", "structured_outputs", "constraint", "text")
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_SWITCHES = ("disable_any_whitespace", "disable_additional_properties", "disable_fallback")
_NOT_HELD = {"whitespace_pattern", "structural_tag"}
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


def asked_in(asked: Asked) -> tuple[str, ...]:
    """The fields in which a client says something of what the output must be."""
    values = (asked.response_format, asked.structured_outputs, asked.constraint, asked.text)
    return tuple(name for name, value in zip(_FIELDS, values, strict=True) if value is not None)


def read(asked: Asked, caller: Caller) -> Wanted | None:
    """What the output must be; None where it is free. Raises InvalidArgument that names the place."""
    found = [
        wanted
        for wanted in (
            _response_format(asked.response_format, caller.spell("response_format")),
            _structured_outputs(asked.structured_outputs, caller.spell("structured_outputs")),
            _constraint(asked.constraint, caller.spell("constraint")),
            _text(asked.text, caller.spell("text")),
        )
        if wanted is not None
    ]
    if len(found) > 1:
        raise refuse(found[1].field, f"contradicts {found[0].field}; only one of them may be set")
    return found[0] if found else None


def _response_format(value: object, field: str) -> Wanted | None:
    if value is None:
        return None
    kind = _type_of(value, field, ("text", "json_object", "json_schema"))
    if kind != "json_schema":
        _known(value, field, ("type",))
        return Wanted("json_object", "", field) if kind == "json_object" else None
    _known(value, field, ("type", "json_schema"))
    inner = _object(value).get("json_schema")
    if not isinstance(inner, dict):
        raise wrong(f"{field}.json_schema", "an object with name and schema", inner)
    _known(inner, f"{field}.json_schema", ("name", "description", "schema", "strict"))
    return _named_schema(inner, f"{field}.json_schema")


def _text(value: object, field: str) -> Wanted | None:
    """The text of /v1/responses, where the fields of a schema stand beside the type."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong(field, "an object with a format", value)
    _known(value, field, ("format", "verbosity"))
    if value.get("verbosity") not in (None, "medium"):
        raise refuse(f"{field}.verbosity", 'not supported by this server except as "medium"')
    inner = value.get("format")
    if inner is None:
        return None
    where = f"{field}.format"
    kind = _type_of(inner, where, ("text", "json_object", "json_schema"))
    if kind != "json_schema":
        _known(inner, where, ("type",))
        return Wanted("json_object", "", where) if kind == "json_object" else None
    _known(inner, where, ("type", "name", "description", "schema", "strict"))
    return _named_schema(_object(inner), where)


def _named_schema(value: Mapping[str, Any], where: str) -> Wanted:
    """A schema with its name. The name and the description are for models that are told of them."""
    name = value.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise wrong(f"{where}.name", "1 to 64 letters, digits, _ and -", name)
    for key, kind in (("description", Text()), ("strict", Bool())):
        if value.get(key) is not None:
            kind.read(value[key], f"{where}.{key}")
    if value.get("schema") is None:
        raise refuse(f"{where}.schema", "needed: the JSON schema of the answer")
    return Wanted("json_schema", normal_text(value["schema"], f"{where}.schema"), where)


def _structured_outputs(value: object, field: str) -> Wanted | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong(field, f"an object with one of {', '.join(_KINDS)}", value)
    said = {key: inner for key, inner in value.items() if inner is not None}
    for key in said:
        if key in _NOT_HELD:
            raise refuse(f"{field}.{key}", "not supported by this server")
    _known(said, field, (*_KINDS, *_SWITCHES))
    switches = {key: Bool().read(said[key], f"{field}.{key}") for key in _SWITCHES if key in said}
    kinds = [key for key in _KINDS if key in said]
    if len(kinds) != 1:
        raise refuse(field, f"exactly one of {', '.join(_KINDS)} is needed, not {len(kinds)}")
    kind = kinds[0]
    style = Style(
        compact=switches.get("disable_any_whitespace", False),
        closed=switches.get("disable_additional_properties", False),
    )
    if style != Style() and kind not in ("json", "json_object"):
        key = "disable_any_whitespace" if style.compact else "disable_additional_properties"
        raise refuse(f"{field}.{key}", f"has no meaning for {kind}")
    where = f"{field}.{kind}"
    if kind == "json":
        return Wanted("json_schema", normal_text(_schema(said[kind], where), where, style), where)
    if kind == "json_object":
        if not Bool().read(said[kind], where):
            raise refuse(where, "must be true where it is set")
        if style.compact:
            return Wanted("json_schema", normal_text({"type": "object"}, where, style), where)
        return Wanted("json_object", "", where)
    return _words(kind, said[kind], where)


def _constraint(value: object, field: str) -> Wanted | None:
    """The constraint of a gRPC call: one kind with its text."""
    if value is None:
        return None
    if not isinstance(value, Mapping) or len(value) != 1:
        raise wrong(field, "exactly one kind of constraint", value)
    [(kind, said)] = value.items()
    where = f"{field}.{kind}"
    if kind == "json_schema":
        return Wanted("json_schema", normal_text(_schema(said, where), where), where)
    if kind == "json_object":
        return Wanted("json_object", "", where)
    return _words("grammar" if kind == "lark" else kind, said, f"{where}.values" if kind == "choice" else where)


def _words(kind: str, value: object, where: str) -> Wanted:
    if kind == "choice":
        return Wanted("regex", _choices(value, where), where)
    if not isinstance(value, str) or not value:
        raise wrong(where, "a string that is not empty", value)
    _check_length(value, where)
    if kind == "regex":
        return Wanted("regex", ascii_classes(value), where)
    if kind != "grammar":
        raise refuse(where, "is of no kind that this server knows")
    return Wanted("lark", client_grammar(value, where), where)


def _choices(value: object, where: str) -> str:
    """An expression for one of these texts."""
    if not isinstance(value, list | tuple) or not 0 < len(value) <= MOST_CHOICES:
        raise wrong(where, f"an array of 1 to {MOST_CHOICES} strings", value)
    for at, choice in enumerate(value):
        if not isinstance(choice, str) or not choice:
            raise wrong(where, "a string that is not empty", choice, item=at)
        check_text(choice, f"{where}[{at}]")
    expression = "|".join(re.escape(choice) for choice in dict.fromkeys(value))
    _check_length(expression, where)
    return f"({expression})"


def _schema(value: object, where: str) -> object:
    """A schema as JSON, or as its text."""
    if not isinstance(value, str):
        return value
    _check_length(value, where)
    try:
        return json.loads(value, parse_constant=_no_number, object_pairs_hook=_no_twins)
    except RecursionError:
        raise refuse(where, "is nested too deep") from None
    except ValueError as error:
        raise refuse(where, f"is no JSON: {error}") from None


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {twin!r} twice")
    return made


def _check_length(text: str, where: str) -> None:
    if len(text) > LONGEST:
        raise refuse(where, f"has {len(text)} characters, above {LONGEST}")
    check_text(text, where)


def _type_of(value: object, field: str, types: tuple[str, ...]) -> str:
    if not isinstance(value, dict):
        raise wrong(field, "an object with a type", value)
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in types:
        raise wrong(f"{field}.type", " or ".join(f'"{known}"' for known in types), kind)
    return kind


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _known(value: object, field: str, keys: tuple[str, ...]) -> None:
    for key, inner in _object(value).items():
        if key not in keys and inner is not None:
            where = f"{field}.{key}"
            raise InvalidArgument(f"{where}: unknown field{nearest(key, keys)}", field=where)
