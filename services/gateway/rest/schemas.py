"""JSON schemas (draft 2020-12) of what requests may hold: of each kind of field, and of what the kinds leave open.

A schema holds for every value that is taken. What it can't say (an id beyond the vocabulary, two
fields that contradict each other) is refused all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway.fields import Api
from services.gateway.kinds import Bias, Bool, Flags, Ids, Int, Kind, Labels, Number, Object, OneOf, Text, Texts
from services.gateway.limits import DEFAULT_LIMITS as LIMITS

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
INTEGER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}


def ref(name: str) -> Schema:
    """A component by its name."""
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Schema, **bounds: int) -> Schema:
    """An array; bounds are minItems and maxItems."""
    return {"type": "array", "items": items, **bounds}


def either(*schemas: Schema) -> Schema:
    """Any of them."""
    return {"anyOf": list(schemas)}


def nullable(schema: Schema) -> Schema:
    """The same or null."""
    kind = schema.get("type")
    return (
        {**schema, "type": [kind, "null"]} if isinstance(kind, str) and "enum" not in schema else either(schema, NULL)
    )


def only(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object with these keys and no others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def of_kind(kind: Kind) -> Schema:
    """The schema of a field's kind. Raises TypeError for one that it can't describe."""
    match kind:
        case Bool():
            return BOOLEAN
        case Int(low, high):
            return {"type": "integer", "minimum": low, "maximum": high}
        case Number(low, high, above_low):
            return {"type": "number", "exclusiveMinimum" if above_low else "minimum": low, "maximum": high}
        case Text():
            return _text(kind)
        case Texts(most, _, single):
            return either(NAME, array(NAME, maxItems=most)) if single else array(NAME, maxItems=most)
        case Ids(most):
            return array(INTEGER, maxItems=most)
        case Bias():
            return _bias(kind)
        case Object():
            return OBJECT
        case Labels():
            return _labels(kind)
        case Flags(keys):
            return only({}, dict.fromkeys(keys, nullable(BOOLEAN)))
        case OneOf(values):
            return {"enum": list(values)}
    raise TypeError(f"no schema of {kind!r}")


def _text(kind: Text) -> Schema:
    schema = STRING if kind.empty else NAME
    return schema if kind.longest >= Text().longest else {**schema, "maxLength": kind.longest}


def _bias(kind: Bias) -> Schema:
    bias = of_kind(kind.bias)
    by_id = {
        "type": "object",
        "patternProperties": {"^-?[0-9]{1,19}$": bias},
        "additionalProperties": False,
        "maxProperties": kind.most,
    }
    pair = {"type": "array", "prefixItems": [INTEGER, bias], "minItems": 2, "maxItems": 2}
    return either(by_id, array(pair, maxItems=kind.most))


def _labels(kind: Labels) -> Schema:
    return {
        "type": "object",
        "propertyNames": {"maxLength": kind.longest_key},
        "additionalProperties": {"type": "string", "maxLength": kind.longest_value},
        "maxProperties": kind.most,
    }


_EMPTY: Schema = {"enum": [None, "", [], {}, False, 0]}
_CALL: Schema = {
    "type": "object",
    "properties": {
        "id": nullable(STRING),
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": NAME, "arguments": {"type": ["string", "object", "null"]}},
            "required": ["name"],
        },
    },
    "required": ["function"],
}
_MESSAGE: Schema = only(
    {"role": NAME},
    {
        "content": either(STRING, array(ref("ContentPart")), NULL),
        "tool_calls": either(array(_CALL), NULL),
        "tool_call_id": nullable(STRING),
        "name": nullable(STRING),
        **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), nullable(STRING)),
        **dict.fromkeys(("refusal", "audio", "function_call", "annotations"), _EMPTY),
    },
)
_FUNCTION: Schema = {
    "type": "object",
    "properties": {
        "name": NAME,
        "description": nullable(STRING),
        "parameters": nullable(OBJECT),
        "strict": nullable(BOOLEAN),
    },
    "required": ["name"],
}
_TOKENS: Schema = array(INTEGER, minItems=1)
_FORMAT: Schema = {"type": "object", "properties": {"type": STRING}, "required": ["type"]}

COMPONENTS: dict[str, Schema] = {
    "ContentPart": either(STRING, only({"type": {"const": "text"}, "text": STRING})),
    "Message": _MESSAGE,
    "Messages": array(ref("Message"), minItems=1, maxItems=LIMITS.messages),
    "Prompt": either(STRING, _TOKENS, array(either(STRING, _TOKENS), minItems=1, maxItems=LIMITS.prompts)),
    "Input": either(STRING, array(OBJECT, minItems=1)),
    "Documents": array(OBJECT),
    "Tool": {
        "type": "object",
        "properties": {"type": {"const": "function"}, "function": _FUNCTION},
        "required": ["type", "function"],
    },
    "ResponseTool": {
        "type": "object",
        "properties": {"type": {"const": "function"}, **_FUNCTION["properties"]},
        "required": ["type", "name"],
    },
    "ToolChoice": either({"enum": ["none", "auto", "required"]}, OBJECT),
    "ResponseFormat": _FORMAT,
    "StructuredOutputs": OBJECT,
    "TextFormat": {"type": "object", "properties": {"format": nullable(_FORMAT)}},
    "Reasoning": OBJECT,
}
"""What a kind leaves open."""

OPEN: dict[str, dict[Api, Schema]] = {
    "messages": {Api.ANY: ref("Messages")},
    "prompt": {Api.COMPLETIONS: ref("Prompt"), Api.TOKENIZE: STRING},
    "input": {Api.EMBEDDINGS: ref("Prompt"), Api.RESPONSES: ref("Input")},
    "documents": {Api.ANY: ref("Documents")},
    "tools": {Api.CHAT | Api.TOKENIZE: array(ref("Tool")), Api.RESPONSES: array(ref("ResponseTool"))},
    "tool_choice": {Api.ANY: ref("ToolChoice")},
    "response_format": {Api.ANY: ref("ResponseFormat")},
    "structured_outputs": {Api.ANY: ref("StructuredOutputs")},
    "text": {Api.ANY: ref("TextFormat")},
    "reasoning": {Api.ANY: ref("Reasoning")},
}
"""The fields that take anything, by name and by call."""
