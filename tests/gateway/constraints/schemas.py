"""Schemas of all kinds, made from a seed: what clients send, what they should not, and what goes wrong elsewhere."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("a", "ab", "b", "id", "kind", "name", "a b", "é", "$x", "x-y", "items", "type", '"', "\\", "\n", "")
WORDS = ("", "a", "abc", "red", "é", "A\nB", '"', "\\", "</think>", "0")
PATTERNS = (
    "^a",
    "^[a-z]{2,4}$",
    "b+$",
    "[0-9]",
    "^(?:x|y)\\d*$",
    "\\s",
    "^\\w+@\\w+$",
    "^.{3}$",
    "a|b",
    "^$",
    "[^a-c]",
)
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname", "duration", "uri")
ODD: tuple[dict[str, Any], ...] = (
    {"not": {"type": "string"}},
    {"uniqueItems": True},
    {"contains": {"type": "integer"}},
    {"propertyNames": {"pattern": "^a"}},
    {"if": {"type": "string"}, "then": {"minLength": 2}},
    {"dependentRequired": {"a": ["b"]}},
    {"unevaluatedProperties": False},
    {"minLenght": 3},
    {"type": "strin"},
    {"format": "phone"},
    {"$ref": "#/$defs/nowhere"},
    {"$ref": "http://example.com/x.json"},
    {"pattern": "(?=a)b"},
    {"pattern": "("},
    {"const": 2**60},
    {"minimum": "1"},
    {"nullable": True},
    {"x-guidance": {"lenient": True}},
)
"""What cannot be held, or is wrong."""


class Maker:
    """Makes one schema. Some of its parts are shared by $ref, some of those refer to themselves."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._definitions: dict[str, Any] = {}

    def make(self) -> Any:
        """A whole schema, its keys in any order."""
        draw = self._draw
        self._definitions = {f"d{i}": True for i in range(draw.randint(0, 3))}
        for name in self._definitions:
            self._definitions[name] = self._any(2)
        made = self._any(3)
        if draw.random() < 0.06:
            made = {**(made if isinstance(made, dict) else {}), **draw.choice(ODD)}
        if isinstance(made, dict) and self._definitions:
            made["$defs"] = self._definitions
        return self._shuffled(made)

    def _shuffled(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._shuffled(inner) for inner in value]
        if not isinstance(value, dict):
            return value
        items = list(value.items())
        self._draw.shuffle(items)
        return {key: self._shuffled(inner) for key, inner in items}

    def _any(self, depth: int) -> Any:
        draw = self._draw
        kinds = [self._string, self._number, self._enum, self._const, self._boolean]
        deep = [self._object, self._object, self._object, self._array, self._array]
        deep += [self._any_of, self._one_of, self._all_of, self._union, self._bare]
        if depth > 0 and draw.random() < 0.75:
            made = draw.choice(deep)(depth)
        elif self._definitions and draw.random() < 0.4:
            made = {"$ref": f"#/$defs/{draw.choice(sorted(self._definitions))}"}
        else:
            made = draw.choice(kinds)(depth)
        if isinstance(made, dict) and draw.random() < 0.15:
            made |= draw.choice(
                ({"title": "T"}, {"description": "d"}, {"default": 1}, {"examples": [1]}, {"x-note": 1})
            )
        return made

    def _boolean(self, _: int) -> Any:
        return self._draw.choice((True, {}, {"type": "boolean"}, {"type": "null"}, {"type": "boolean"}))

    def _string(self, _: int) -> Any:
        draw = self._draw
        made: dict[str, Any] = {"type": "string"}
        if draw.random() < 0.3:
            made["minLength"] = draw.randint(0, 4)
        if draw.random() < 0.4:
            made["maxLength"] = draw.randint(0, 8)
        if draw.random() < 0.3:
            made["pattern"] = draw.choice(PATTERNS)
        elif draw.random() < 0.15:
            made = {"type": "string", "format": draw.choice(FORMATS)}
        return made

    def _number(self, _: int) -> Any:
        draw = self._draw
        made: dict[str, Any] = {"type": draw.choice(("integer", "integer", "number"))}
        bound = draw.choice((0, 1, -5, 3, 10, 100, -2.5, 0.1, 12.75, 1000000))
        if draw.random() < 0.4:
            made[draw.choice(("minimum", "exclusiveMinimum"))] = bound
        if draw.random() < 0.4:
            made[draw.choice(("maximum", "exclusiveMaximum"))] = bound + draw.choice((0, 1, 2, 7, 0.5, 90))
        if draw.random() < 0.2:
            made["multipleOf"] = draw.choice((1, 2, 3, 7, 10, 0.5, 0.1, 0.25))
        return made

    def _value(self, depth: int) -> Any:
        draw = self._draw
        simple = (None, True, False, 0, 1, 2, -3, 1.5, 1.0, 0.1, 10**6, *WORDS)
        if depth > 0 and draw.random() < 0.1:
            return draw.choice(([], {}, [1, "a"], {"a": 1}, {"a": [None], "b": {"c": 0}}))
        return draw.choice(simple)

    def _enum(self, depth: int) -> Any:
        draw = self._draw
        made: dict[str, Any] = {"enum": [self._value(depth) for _ in range(draw.randint(1, 5))]}
        if draw.random() < 0.3:
            made["type"] = draw.choice(("string", "integer", "number", ["string", "null"], "boolean"))
        return made

    def _const(self, depth: int) -> Any:
        return {"const": self._value(depth)}

    def _object(self, depth: int) -> Any:
        draw = self._draw
        names = draw.sample(NAMES, draw.randint(0, 4))
        made: dict[str, Any] = {"type": "object"}
        if names or draw.random() < 0.5:
            made["properties"] = {name: self._any(depth - 1) for name in names}
        if draw.random() < 0.6:
            made["required"] = draw.sample(names, draw.randint(0, len(names))) + (["z"] if draw.random() < 0.1 else [])
        roll = draw.random()
        if roll < 0.4:
            made["additionalProperties"] = False
        elif roll < 0.6:
            made["additionalProperties"] = self._any(depth - 1)
        if draw.random() < 0.1:
            made["patternProperties"] = {draw.choice(("^x-", "^a", "^[a-z]+$", "b$")): self._any(depth - 1)}
        if draw.random() < 0.08:
            made[draw.choice(("minProperties", "maxProperties"))] = draw.randint(0, 3)
        if draw.random() < 0.1:
            del made["type"]
        return made

    def _array(self, depth: int) -> Any:
        draw = self._draw
        made: dict[str, Any] = {"type": "array"}
        if draw.random() < 0.8:
            made["items"] = self._any(depth - 1)
        if draw.random() < 0.2:
            made["prefixItems"] = [self._any(depth - 1) for _ in range(draw.randint(1, 3))]
        if draw.random() < 0.3:
            made["minItems"] = draw.randint(0, 3)
        if draw.random() < 0.4:
            made["maxItems"] = draw.randint(0, 4)
        return made

    def _options(self, depth: int) -> list[Any]:
        return [self._any(depth - 1) for _ in range(self._draw.randint(1, 3))]

    def _any_of(self, depth: int) -> Any:
        made: dict[str, Any] = {"anyOf": self._options(depth)}
        if self._draw.random() < 0.2:
            made |= self._object(depth - 1)
        return made

    def _one_of(self, depth: int) -> Any:
        draw = self._draw
        if draw.random() < 0.5:
            return {"oneOf": self._options(depth)}
        options = []
        for kind in ("a", "b", "c")[: draw.randint(1, 3)]:
            option = self._object(depth - 1)
            option.setdefault("properties", {})["kind"] = {"const": kind}
            option["required"] = ["kind"]
            options.append(option)
        return {"oneOf": options}

    def _all_of(self, depth: int) -> Any:
        return {"allOf": self._options(depth)}

    def _union(self, _: int) -> Any:
        draw = self._draw
        kinds = draw.sample(("string", "integer", "number", "null", "boolean", "array", "object"), draw.randint(1, 3))
        made: dict[str, Any] = {"type": kinds}
        if draw.random() < 0.5:
            made |= {"minLength": 1, "minimum": 2, "maxItems": 2}
        return made

    def _bare(self, depth: int) -> Any:
        """Bounds without a type: they say something of some kinds of values only."""
        draw = self._draw
        made = {**self._string(0), **self._number(0), **self._array(depth - 1)}
        del made["type"]
        return {key: value for key, value in made.items() if draw.random() < 0.5}
