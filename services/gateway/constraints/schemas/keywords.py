"""One object of a schema, its keywords checked: what it says as a Node. Knows no other node but by pointer.

A keyword that says something of values and is not held is refused by name, as is one that nobody knows:
it may be one that is held, misspelled.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

from services.common.settings import nearest
from services.gateway.constraints.schemas.node import TYPES, Arrays, Node, Numbers, Objects, Pointer, Spelling, Strings
from services.gateway.constraints.schemas.patterns import translate

ANNOTATIONS = frozenset(
    [
        "title",
        "description",
        "default",
        "examples",
        "example",
        "deprecated",
        "readOnly",
        "writeOnly",
        "contentEncoding",
        "contentMediaType",
        "$comment",
        "$schema",
        "$id",
        "id",
        "$anchor",
        "$defs",
        "definitions",
        "discriminator",
    ]
)
"""What says nothing of values."""
FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
NOT_HELD = frozenset(
    [
        "not",
        "if",
        "then",
        "else",
        "contains",
        "minContains",
        "maxContains",
        "uniqueItems",
        "propertyNames",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedItems",
        "unevaluatedProperties",
        "$dynamicRef",
        "$dynamicAnchor",
        "$recursiveRef",
        "$recursiveAnchor",
        "$vocabulary",
        "contentSchema",
        "nullable",
        "x-guidance",
    ]
)
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "uniqueItems": (False,),
    "nullable": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
}
"""Values that ask for nothing."""
EXACT = 2**53
"""Numbers beyond it are not exact where JSON's numbers are read as floats."""
LONGEST_NAME = 128
MOST = 2**31 - 1


class Reader:
    """Reads the nodes of one schema. In an `old` dialect, before 2020-12, a list of items meant the first ones."""

    def __init__(self, spelling: Spelling, *, old: bool, closed: bool) -> None:
        self._spelling = spelling
        self._old = old
        self._closed = closed

    def read(self, value: object, at: Pointer, target: Callable[[object, Pointer], Pointer]) -> Node:
        """A node of its own words; `target` finds what a $ref points to."""
        if value is True:
            return Node(at)
        if value is False:
            return Node(at, never=True)
        if not isinstance(value, Mapping):
            raise self._spelling.refuse(at, "must be a schema: an object, true or false")
        said = self._known(value, at)
        refs = (target(said["$ref"], (*at, "$ref")),) if "$ref" in said else ()
        return Node(
            at,
            types=self._types(said, at),
            values=self._values(said, at),
            numbers=self._numbers(said, at),
            strings=self._strings(said, at),
            arrays=self._arrays(said, at),
            objects=self._objects(said, at),
            all_of=(*self._group(said, at, "allOf"), *refs),
            any_of=(self._group(said, at, "anyOf"),) if "anyOf" in said else (),
            one_of=(self._group(said, at, "oneOf"),) if "oneOf" in said else (),
        )

    def _known(self, value: Mapping[str, Any], at: Pointer) -> dict[str, Any]:
        said = {}
        for key, inner in value.items():
            if key in _HELD:
                said[key] = inner
            elif key in NOT_HELD:
                if not any(inner == neutral and type(inner) is type(neutral) for neutral in _NEUTRAL.get(key, ())):
                    raise self._spelling.refuse((*at, key), "this keyword cannot be held")
            elif key not in ANNOTATIONS and not key.startswith("x-"):
                raise self._spelling.refuse((*at, key), f"unknown keyword{nearest(key, [*_HELD, *ANNOTATIONS])}")
            elif key == "$id" and at:
                raise self._spelling.refuse((*at, key), "only the whole schema may have one")
        return said

    def _types(self, said: Mapping[str, Any], at: Pointer) -> frozenset[str]:
        if "type" not in said:
            return frozenset(TYPES)
        named = said["type"] if isinstance(said["type"], list) else [said["type"]]
        for name in named:
            if name not in (*TYPES, "integer"):
                known = nearest(name, [*TYPES, "integer"]) if isinstance(name, str) else ""
                raise self._spelling.refuse((*at, "type"), f"is no type of JSON{known}")
        if not named:
            raise self._spelling.refuse((*at, "type"), "must name a type")
        return frozenset("number" if name == "integer" else name for name in named)

    def _values(self, said: Mapping[str, Any], at: Pointer) -> tuple[Any, ...] | None:
        values: tuple[Any, ...] | None = None
        if "enum" in said:
            if not isinstance(said["enum"], list) or not said["enum"]:
                raise self._spelling.refuse((*at, "enum"), "must be an array of at least one value")
            values = tuple(self._plain(value, (*at, "enum", i)) for i, value in enumerate(said["enum"]))
        if "const" in said:
            const = self._plain(said["const"], (*at, "const"))
            if values is not None and canonical(const) not in map(canonical, values):
                raise self._spelling.refuse((*at, "const"), "is not in enum, so no value fits")
            values = (const,)
        return values

    def _plain(self, value: Any, at: Pointer) -> Any:
        """A value that can be written so that it is read back as itself."""
        match value:
            case None | bool() | str():
                return value
            case int() | float():
                exact = self._number(value, at)
                return int(exact) if exact.denominator == 1 else value
            case list():
                return [self._plain(inner, (*at, i)) for i, inner in enumerate(value)]
            case dict():
                return {key: self._plain(inner, (*at, key)) for key, inner in value.items()}
        raise self._spelling.refuse(at, "must be a JSON value")

    def _number(self, value: object, at: Pointer) -> Fraction:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._spelling.refuse(at, "must be a number")
        if abs(value) > EXACT:
            raise self._spelling.refuse(at, f"numbers beyond {EXACT} are not exact")
        number = Fraction(Decimal(repr(value)))
        if number and abs(number) < Fraction(1, 10**9):
            raise self._spelling.refuse(at, "numbers that close to 0 cannot be held")
        return number

    def _count(self, said: Mapping[str, Any], key: str, at: Pointer) -> int | None:
        value = said.get(key)
        if key not in said:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise self._spelling.refuse((*at, key), "must be a whole number from 0 on")
        if value > MOST:
            raise self._spelling.refuse((*at, key), f"must be at most {MOST}")
        return value

    def _numbers(self, said: Mapping[str, Any], at: Pointer) -> Numbers:
        low, high = (self._bound(said, key, at) for key in ("minimum", "maximum"))
        above, below = (self._bound(said, key, at) for key in ("exclusiveMinimum", "exclusiveMaximum"))
        above_low, below_high = said.get("exclusiveMinimum") is True, said.get("exclusiveMaximum") is True
        if above is not None and (low is None or above >= low):
            low, above_low = above, True
        if below is not None and (high is None or below <= high):
            high, below_high = below, True
        multiple = None
        if "multipleOf" in said:
            multiple = self._number(said["multipleOf"], (*at, "multipleOf"))
            if multiple <= 0:
                raise self._spelling.refuse((*at, "multipleOf"), "must be above 0")
        kinds = said.get("type")
        named = kinds if isinstance(kinds, list) else [kinds]
        return Numbers(low, high, above_low, below_high, multiple, "integer" in named and "number" not in named)

    def _bound(self, said: Mapping[str, Any], key: str, at: Pointer) -> Fraction | None:
        if key not in said or (self._old and isinstance(said[key], bool) and key.startswith("exclusive")):
            return None
        return self._number(said[key], (*at, key))

    def _strings(self, said: Mapping[str, Any], at: Pointer) -> Strings:
        patterns: tuple[str, ...] = ()
        if "pattern" in said:
            patterns = (self.pattern(said["pattern"], (*at, "pattern")),)
        formats: tuple[str, ...] = ()
        if "format" in said:
            known = isinstance(said["format"], str)
            if not known or said["format"] not in FORMATS:
                where = nearest(said["format"], sorted(FORMATS)) if known else ""
                raise self._spelling.refuse((*at, "format"), f"this format cannot be held{where}")
            formats = (said["format"],)
        return Strings(self._count(said, "minLength", at) or 0, self._count(said, "maxLength", at), patterns, formats)

    def pattern(self, value: object, at: Pointer) -> str:
        """An expression, translated."""
        if not isinstance(value, str):
            raise self._spelling.refuse(at, "must be a string")
        try:
            return translate(value)
        except ValueError as error:
            raise self._spelling.refuse(at, str(error)) from None

    def _arrays(self, said: Mapping[str, Any], at: Pointer) -> Arrays:
        first: tuple[Pointer, ...] = self._group(said, at, "prefixItems")
        items: Pointer | None = (*at, "items") if "items" in said else None
        if isinstance(said.get("items"), list):
            if not self._old:
                raise self._spelling.refuse((*at, "items"), "must be a schema; the first items stand in prefixItems")
            first = tuple((*at, "items", i) for i in range(len(said["items"])))
            items = (*at, "additionalItems") if "additionalItems" in said else None
        elif "additionalItems" in said and not self._old:
            raise self._spelling.refuse((*at, "additionalItems"), "this keyword cannot be held; say items")
        return Arrays(self._count(said, "minItems", at) or 0, self._count(said, "maxItems", at), first, items)

    def _objects(self, said: Mapping[str, Any], at: Pointer) -> Objects:
        properties = self._named(said, at, "properties")
        patterns = tuple(self._named(said, at, "patternProperties").items())
        required = said.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            raise self._spelling.refuse((*at, "required"), "must be an array of names")
        additional: Pointer | None = None
        if "additionalProperties" in said:
            additional = (*at, "additionalProperties")
        elif self._closed and (properties or patterns or "properties" in said):
            additional = CLOSED
        for name in (*properties, *required):
            if len(name) > LONGEST_NAME:
                raise self._spelling.refuse((*at, "properties"), f"names are at most {LONGEST_NAME} characters long")
        return Objects(
            properties,
            patterns,
            additional,
            tuple(dict.fromkeys(required)),
            self._count(said, "minProperties", at) or 0,
            self._count(said, "maxProperties", at),
        )

    def _named(self, said: Mapping[str, Any], at: Pointer, key: str) -> dict[str, Pointer]:
        if key not in said:
            return {}
        if not isinstance(said[key], Mapping):
            raise self._spelling.refuse((*at, key), "must be an object of schemas")
        return {name: (*at, key, name) for name in said[key]}

    def _group(self, said: Mapping[str, Any], at: Pointer, key: str) -> tuple[Pointer, ...]:
        if key not in said:
            return ()
        if not isinstance(said[key], list) or not said[key]:
            raise self._spelling.refuse((*at, key), "must be an array of at least one schema")
        return tuple((*at, key, i) for i in range(len(said[key])))


CLOSED: Pointer = ("",)
"""Where the schema false stands that a client's switch put there."""
_HELD = frozenset(
    [
        "type",
        "enum",
        "const",
        "$ref",
        "allOf",
        "anyOf",
        "oneOf",
        "minimum",
        "maximum",
        "exclusiveMinimum",
        "exclusiveMaximum",
        "multipleOf",
        "minLength",
        "maxLength",
        "pattern",
        "format",
        "items",
        "prefixItems",
        "additionalItems",
        "minItems",
        "maxItems",
        "properties",
        "patternProperties",
        "additionalProperties",
        "required",
        "minProperties",
        "maxProperties",
    ]
)


def canonical(value: object) -> str:
    """Equal for equal JSON values, once numbers are written shortest: true is not 1."""
    return json.dumps(value, sort_keys=True)


def kind_of(value: object) -> str:
    """The kind of a JSON value, one of TYPES."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
