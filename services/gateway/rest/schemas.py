"""JSON schemas (draft 2020-12): a few words to write them with, and the schema of each kind of field.

A schema holds for every value that is taken. What it can't say (an id beyond the vocabulary, two
fields that contradict each other) is refused all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.gateway.kinds import Bias, Bool, Flags, Ids, Int, Kind, Labels, Number, Object, OneOf, Text, Texts

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
INTEGER: Schema = {"type": "integer"}
TOKEN_ID: Schema = {"$ref": "#/components/schemas/TokenId"}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}
NULL: Schema = {"type": "null"}
ANYTHING: Schema = {}


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
    return {**some(required, optional), "additionalProperties": False}


def some(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    """An object with these keys; others say nothing."""
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


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
        case Ids(most, least):
            return array(TOKEN_ID, **({"minItems": least} if least else {}), maxItems=most)
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
        "patternProperties": {"^[0-9]{1,19}$": bias},
        "additionalProperties": False,
        "maxProperties": kind.most,
    }
    pair = {"type": "array", "prefixItems": [TOKEN_ID, bias], "minItems": 2, "maxItems": 2}
    return either(by_id, array(pair, maxItems=kind.most))


def _labels(kind: Labels) -> Schema:
    return {
        "type": "object",
        "propertyNames": {"maxLength": kind.longest_key},
        "additionalProperties": {"type": "string", "maxLength": kind.longest_value},
        "maxProperties": kind.most,
    }
