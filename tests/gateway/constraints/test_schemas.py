"""Schemas one by one: what is held, what is refused, and by which place."""

from __future__ import annotations

import itertools
import json
import random
import threading
from decimal import Decimal
from typing import Any

import pytest

from services.common.errors import InvalidArgument
from services.gateway.constraints.schemas.normal import Style, normal_text
from services.gateway.request import Constraint
from tests.gateway.constraints.walks import accepts, begins, hints_of, matcher, read, validator, walk


def held(schema: Any, style: Style | None = None) -> Constraint:
    return Constraint("json_schema", normal_text(schema, "s", style or Style()))


def refusal(schema: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as refused:
        normal_text(schema, "s")
    assert refused.value.field is not None
    assert refused.value.message.startswith(f"{refused.value.field}: "[:200])
    return refused.value


NODE = {
    "type": "object",
    "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
    "required": ["value", "children"],
    "additionalProperties": False,
}
ENDLESS: dict[str, Any] = {
    "itself": {"$ref": "#/$defs/n", "$defs": {"n": {"$ref": "#/$defs/n"}}},
    "the whole": {"$ref": "#"},
    "each other": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    "a property that it needs": {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
    "a property that it needs of any name": {
        "type": "object",
        "additionalProperties": {"$ref": "#"},
        "required": ["x"],
    },
    "two objects that need each other": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "required": ["b"]},
            "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "required": ["a"]},
        },
    },
    "an item that it needs": {"type": "array", "items": {"$ref": "#"}, "minItems": 1},
    "a first item that it needs": {"type": "array", "prefixItems": [{"type": "null"}, {"$ref": "#"}], "minItems": 2},
    "all of": {"allOf": [{"type": "object"}, {"$ref": "#"}]},
    "any of itself": {"anyOf": [{"$ref": "#"}, {"$ref": "#"}]},
    "an option": {"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}], "$defs": {"n": {"$ref": "#/$defs/n"}}},
    "one of": {"oneOf": [{"$ref": "#"}]},
    "what is needed by another part": {
        "$ref": "#/$defs/n",
        "$defs": {
            "n": {
                "type": "object",
                "allOf": [{"properties": {"next": {"$ref": "#/$defs/n"}}}, {"required": ["next"]}],
            }
        },
    },
    "behind something that ends": {
        "type": "object",
        "properties": {"ok": {"type": "string"}, "x": {"$ref": "#/$defs/n"}},
        "$defs": {"n": {"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1}},
    },
}


@pytest.mark.parametrize("schema", ENDLESS.values(), ids=ENDLESS)
def test_what_never_ends_is_refused(schema: Any) -> None:
    assert "never terminates" in refusal(schema).message


ENDING: dict[str, tuple[Any, list[str], list[str]]] = {
    "a tree": (
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}},
        ['{"value":1,"children":[]}', '{"value":1,"children":[{"value":2,"children":[{"value":3,"children":[]}]}]}'],
        ['{"value":1}', '{"value":1,"children":[1]}', '{"value":1,"children":[{"value":"2","children":[]}]}'],
    ),
    "a list": (
        {"type": "object", "properties": {"next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}}, "required": ["next"]},
        ['{"next":null}', '{"next":{"next":{"next":null}}}'],
        ["{}", '{"next":1}', '{"next":{}}'],
    ),
    "an optional one": (
        {"type": "object", "properties": {"up": {"$ref": "#"}}, "additionalProperties": False},
        ["{}", '{"up":{"up":{}}}'],
        ['{"up":1}', '{"down":{}}'],
    ),
    "one that is needed once": (
        {
            "allOf": [{"$ref": "#/$defs/n"}, {"required": ["up"]}],
            "$defs": {
                "n": {"type": "object", "properties": {"up": {"$ref": "#/$defs/n"}}, "additionalProperties": False}
            },
        },
        ['{"up":{}}', '{"up":{"up":{}}}'],
        ["{}"],
    ),
    "two that meet": (
        {
            "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {
                "a": {"type": "object", "properties": {"in": {"$ref": "#/$defs/a"}, "x": {"type": "integer"}}},
                "b": {"type": "object", "properties": {"in": {"$ref": "#/$defs/b"}, "x": {"minimum": 5}}},
            },
        },
        ['{"in":{"in":{"x":5}},"x":7}'],
        ['{"in":{"x":4}}', '{"x":"a"}'],
    ),
}


@pytest.mark.parametrize(("schema", "good", "bad"), ENDING.values(), ids=ENDING)
def test_what_can_end_is_held(schema: Any, good: list[str], bad: list[str]) -> None:
    constraint, judge = held(schema), validator(schema)
    for text in good:
        judge.validate(json.loads(text))
        assert accepts(constraint, text), text
    for text in bad:
        assert not judge.is_valid(json.loads(text))
        assert not accepts(constraint, text), text


def test_the_order_of_keys_does_not_matter() -> None:
    keys: dict[str, Any] = {
        "additionalProperties": {"type": "integer"},
        "properties": {"a": {"type": "string"}, "b": {"enum": [1, 2]}},
        "required": ["a"],
        "type": "object",
        "allOf": [{"properties": {"b": {"minimum": 2}}}],
    }
    for order in itertools.permutations(keys):
        constraint = held({key: keys[key] for key in order})
        assert accepts(constraint, '{"a":"x","b":2,"c":3}')
        for bad in ('{"a":1}', '{"b":2}', '{"a":"x","b":1}', '{"a":"x","c":"y"}', "[]"):
            assert not accepts(constraint, bad), (order, bad)


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"enum": [1, 2, 3]}, ["1", "3"], ["4", '"1"', "12", "", "null"]),
        ({"enum": [True, False]}, ["true", "false"], ["1", "0", "null", '"true"']),
        ({"enum": [None]}, ["null"], ["0", '""', "{}"]),
        ({"enum": [1, True, "1", None, 1.5]}, ["1", "true", '"1"', "null", "1.5"], ["false", '"true"', "2", "1.55"]),
        ({"$ref": "#/$defs/e", "$defs": {"e": {"enum": ["a", "b"]}}}, ['"a"', '"b"'], ['"c"', '{"a":1}', "a"]),
        (
            {"$ref": "#/$defs/e", "$defs": {"e": {"$ref": "#/definitions/f"}}, "definitions": {"f": {"enum": ["a"]}}},
            ['"a"'],
            ['"b"', "{}"],
        ),
        ({"const": {"a": [1, {"b": None}]}}, ['{"a":[1,{"b":null}]}'], ['{"a":[1]}', "{}"]),
        ({"enum": ["a", "bb", "ccc"], "minLength": 2, "pattern": "^b"}, ['"bb"'], ['"a"', '"ccc"']),
        ({"enum": [1, 2, 3, "x"], "type": "integer", "minimum": 2}, ["2", "3"], ["1", '"x"']),
        (True, ["1", '{"a":[]}', '"x"'], ["", "x"]),
        ({}, ["1", '{"a":[]}', '"x"'], ["", "x"]),
        ({"type": "object", "properties": {"a": False}}, ["{}", '{"b":1}'], ['{"a":1}', '{"\\u0061":1}']),
        ({"type": "array", "items": False}, ["[]"], ["[1]"]),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, ["[]", "[1]"], ["[1,1]", '["a"]']),
        ({"type": "object"}, ["{}", '{"a":{"b":[1,"x"]}}'], ["[]", "1", "null"]),
    ],
)
def test_values_and_schemas_of_all_kinds(schema: Any, good: list[str], bad: list[str]) -> None:
    constraint = held(schema)
    assert [text for text in good if not accepts(constraint, text)] == []
    assert [text for text in bad if accepts(constraint, text)] == []


@pytest.mark.parametrize("name", ["a", 'q"', "\\", "é", "a\nb", "", "😀", "a b", "\x7f", "$"])
def test_a_name_in_another_spelling_is_the_same_name(name: str) -> None:
    """JSON may spell a name with escapes; what a property must be holds all the same."""
    schema = {"type": "object", "properties": {name: {"type": "integer"}}, "additionalProperties": {"type": "string"}}
    constraint = held(schema)
    plain = json.dumps(name, ensure_ascii=False)
    assert accepts(constraint, f"{{{plain}:1}}")
    assert accepts(constraint, '{"other":"x","more":"y"}')
    spellings = {
        plain,
        json.dumps(name),
        '"' + "".join(f"\\u{ord(char):04x}" for char in name if ord(char) < 65536) + '"',
    }
    for spelling in spellings:
        if json.loads(spelling) == name:
            assert not accepts(constraint, f'{{{spelling}:"x"}}')
            assert not accepts(constraint, f'{{{plain}:1,{spelling}:"x"}}')


@pytest.mark.parametrize(
    ("schema", "place", "words"),
    [
        *(({"properties": {"x": {"format": said}}}, "s.properties.x.format", "cannot be held") for said in ({}, [], 1)),
        ({"properties": {"x": {"not": {}}}}, "s.properties.x.not", "cannot be held"),
        ({"anyOf": [{}, {"uniqueItems": True}]}, "s.anyOf[1].uniqueItems", "cannot be held"),
        ({"items": {"minLenght": 1}}, "s.items.minLenght", "minLength"),
        ({"x-guidance": {"lenient": True}}, "s.x-guidance", "cannot be held"),
        ({"nullable": True, "type": "string"}, "s.nullable", "cannot be held"),
        ({"type": "strin"}, "s.type", "string"),
        ({"type": []}, "s.type", "must name"),
        ({"type": ["string", 3]}, "s.type", "no type"),
        ({"properties": []}, "s.properties", "object"),
        ({"properties": {"x": 3}}, "s.properties.x", "schema"),
        ({"properties": {"x": None}}, "s.properties.x", "schema"),
        ({"required": "x"}, "s.required", "array"),
        ({"enum": []}, "s.enum", "at least one"),
        ({"enum": [1], "const": 2}, "s.const", "no value"),
        ({"const": 2**60}, "s.const", "not exact"),
        ({"minimum": "3"}, "s.minimum", "number"),
        ({"minimum": True}, "s.minimum", "number"),
        ({"multipleOf": 0}, "s.multipleOf", "above 0"),
        ({"properties": {"x": {"multipleOf": 123456789}}}, "s.properties.x.multipleOf", "remainders"),
        ({"items": {"multipleOf": 10007}}, "s.items.multipleOf", "remainders"),
        ({"anyOf": [{"multipleOf": 101}, {"multipleOf": 0.0103}]}, "s.anyOf[1].multipleOf", "remainders"),
        ({"allOf": [{"minimum": 2}, {"multipleOf": 9007199254740991}]}, "s.allOf[1].multipleOf", "remainders"),
        (
            {"properties": {"x": {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}}},
            "s.properties.x.exclusiveMinimum",
            "less than 1 away",
        ),
        (
            {"allOf": [{"minimum": -0.5}, {"type": "number", "exclusiveMaximum": 0}]},
            "s.allOf[1].exclusiveMaximum",
            "less than 1 away",
        ),
        ({"minLength": -1}, "s.minLength", "whole number"),
        ({"maxItems": 1.5}, "s.maxItems", "whole number"),
        ({"maxLength": 2**40}, "s.maxLength", "at most"),
        ({"pattern": "("}, "s.pattern", "not closed"),
        ({"pattern": "a(?=b)"}, "s.pattern", "ahead"),
        ({"pattern": "\\bword"}, "s.pattern", "boundaries"),
        ({"pattern": 5}, "s.pattern", "string"),
        ({"format": "emial"}, "s.format", "email"),
        ({"$ref": "#/$defs/x"}, "s.$ref", "not there"),
        ({"$ref": "other.json"}, "s.$ref", "within this schema"),
        ({"$ref": "#name"}, "s.$ref", "anchors"),
        ({"$ref": 5}, "s.$ref", "pointer"),
        ({"$schema": "http://example.com/mine"}, "s.$schema", "dialect"),
        ({"items": [{}]}, "s.items", "prefixItems"),
        ({"oneOf": [{"type": "integer"}, {"minimum": 4}]}, "s.oneOf", "anyOf"),
        ({"oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, "s.oneOf", "anyOf"),
        ({"anyOf": []}, "s.anyOf", "at least one"),
        ({"patternProperties": {"b$": {}}}, "s.patternProperties.b$", "additionalProperties"),
        ({"minProperties": 2}, "s.minProperties", "named"),
        ({"type": "string", "$id": "x", "properties": {"a": {"$id": "y"}}}, "s.properties.a.$id", "whole"),
        (False, "s", "no value"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "s", "no value"),
        ({"type": "integer", "exclusiveMinimum": 1, "exclusiveMaximum": 2}, "s", "no value"),
        ({"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5}, "s", "no value"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "s", "no value"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "s", "no value"),
        ({"allOf": [{"const": 1}, {"const": True}]}, "s", "no value"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "s", "no value"),
        ({"type": "object", "additionalProperties": False, "required": ["a"]}, "s", "no value"),
        ({"type": "array", "items": False, "minItems": 1}, "s", "no value"),
        ([], "s", "schema"),
        ("x", "s", "schema"),
        (None, "s", "schema"),
    ],
)
def test_what_cannot_be_held_is_refused_by_its_place(schema: Any, place: str, words: str) -> None:
    refused = refusal(schema)
    assert refused.field == place
    assert words in refused.message


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def chain(count: int) -> Any:
    definitions: dict[str, Any] = {
        f"d{at}": {"type": "object", "properties": {"next": {"$ref": f"#/$defs/d{at + 1}"}}} for at in range(count)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"type": "string"}}}


HOSTILE: dict[str, Any] = {
    "10 MB of text": {"description": "x" * 10_000_000},
    "10 MB of parts": {"enum": ["word"] * 1_500_000},
    "10,000 deep": nested(10_000),
    "120 deep": nested(120),
    "a chain of 10,000 definitions": chain(10_000),
    "a chain of 1,000 definitions": chain(1_000),
    "references that refer on": {
        "$ref": "#/$defs/0",
        "$defs": {**{str(at): {"$ref": f"#/$defs/{at + 1}"} for at in range(3000)}, "3000": {"type": "string"}},
    },
    "choices of choices": {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": i}]} for i in range(40)]},
    "not a number": {"minimum": float("nan")},
    "endless": {"maximum": float("inf")},
    "a huge number": {"const": 10**5000},
    "half a pair": {"const": "\ud800"},
    "half a pair in a name": {"properties": {"\udc00": {}}},
    "a name of 10,000": {"properties": {"x" * 10_000: {}}},
    "groups of groups": {"pattern": "(" * 5000 + ")" * 5000},
}


@pytest.mark.parametrize("schema", HOSTILE.values(), ids=HOSTILE)
def test_hostile_schemas_are_refused(schema: Any) -> None:
    refusals = []
    thread = threading.Thread(target=lambda: refusals.append(refusal(schema)))  # a stack as small as in service
    thread.start()
    thread.join()
    assert refusals


LARGE: dict[str, Any] = {
    "10,000 definitions": {
        "type": "object",
        "properties": {"x": {"$ref": "#/$defs/d77"}},
        "$defs": {f"d{at}": {"type": "integer"} for at in range(10_000)},
    },
    "5,000 values": {"enum": [f"word {at}" for at in range(5_000)]},
    "300 properties": {"type": "object", "properties": {f"property_{at}": {"type": "integer"} for at in range(300)}},
    "many items": {"type": "array", "items": {"type": "integer"}, "minItems": 100_000},
    "a long string": {"type": "string", "maxLength": 1_000_000},
    "deep": nested(45),
    "a chain": chain(100),
}


@pytest.mark.parametrize("schema", LARGE.values(), ids=LARGE)
def test_large_schemas_are_held(schema: Any) -> None:
    assert begins(held(schema), "{" if "properties" in schema or "$ref" in schema else '["'[: 1 + ("a" in schema)]) >= 0
    assert matcher(held(schema)).mask()


def test_without_white_space() -> None:
    constraint = held(NODE | {"$defs": {"node": NODE}}, Style(compact=True))
    assert accepts(constraint, '{"value":1,"children":[]}')
    assert not accepts(constraint, '{"value": 1,"children":[]}')


@pytest.mark.parametrize(
    ("most", "too_much"),
    [
        (" ", "  "),
        ("\n" + " " * 32, "\n" + " " * 33),
        ("\n" + "\t" * 32, "\n" + "\t" * 33),
        ("\r\n", "\r"),
        ("\n", "\n\n"),
        ("", "\t"),
    ],
)
def test_white_space_is_a_blank_or_an_indented_line(most: str, too_much: str) -> None:
    constraint = held({"type": "object"})
    assert accepts(constraint, "{" + most + "}")
    assert not accepts(constraint, "{" + too_much + "}")


def test_closed_by_a_switch() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "object", "properties": {"b": {}}}, "c": {"type": "object"}},
    }
    constraint = held(schema, Style(closed=True))
    assert accepts(constraint, '{"a":{"b":1},"c":{"x":1}}')
    assert not accepts(constraint, '{"z":1}')
    assert not accepts(constraint, '{"a":{"z":1}}')
    open_all_the_same = held(schema | {"additionalProperties": True}, Style(closed=True))
    assert accepts(open_all_the_same, '{"z":1}')


def test_older_dialects() -> None:
    old = {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "array",
        "items": [{"type": "integer", "minimum": 3, "exclusiveMinimum": True}],
        "additionalItems": {"type": "string"},
    }
    constraint = held(old)
    for text, good in (("[4]", True), ('[4,"a"]', True), ("[3]", False), ("[4,5]", False), ("[]", True)):
        assert validator(old).is_valid(json.loads(text)) is good
        assert accepts(constraint, text) is good


def test_options_of_one_of_are_told_apart() -> None:
    schema = {
        "type": "object",
        "oneOf": [
            {"properties": {"kind": {"const": "a"}, "x": {"type": "integer"}}, "required": ["kind"]},
            {"properties": {"kind": {"enum": ["b", "c"]}, "x": {"type": "string"}}, "required": ["kind"]},
        ],
    }
    constraint, judge = held(schema), validator(schema)
    for text in ('{"kind":"a","x":1}', '{"kind":"c","x":"1"}', '{"kind":"a","x":"1"}', '{"kind":"d"}', "{}"):
        assert accepts(constraint, text) == judge.is_valid(json.loads(text))


@pytest.mark.parametrize("step", [0.001, 1000000, 86400, 4096, 9973, 0.25])
def test_multiples_that_can_be_held(step: float) -> None:
    """Powers of 10 are free: what counts is how many remainders there are."""
    constraint = held({"type": "number", "multipleOf": step})
    exact = Decimal(repr(step))
    for factor in (0, 1, -7, 123456):
        assert accepts(constraint, f"{exact * factor:f}"), factor
    assert not accepts(constraint, f"{exact * Decimal('3.5'):f}")


def test_numbers_are_as_exact_as_they_are_written() -> None:
    schema = {"type": "number", "multipleOf": 0.1, "minimum": 0.1, "maximum": 0.7}
    constraint, judge = held(schema), validator(schema)
    for text in ("0.1", "0.3", "0.7", "0.35", "0.05", "0.8", "0.31"):
        assert accepts(constraint, text) == judge.is_valid(Decimal(text)), text


@pytest.mark.parametrize("seed", range(6))
def test_maps_with_beginnings_of_names(seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"x-a": {"type": "boolean"}, "plain": {"type": "null"}},
        "patternProperties": {"^x-": {"type": ["boolean", "integer"]}, "^y": {"type": "string"}},
        "additionalProperties": {"type": "array", "maxItems": 1},
    }
    constraint, judge = held(schema), validator(schema)
    hints = hints_of(schema)
    for number in range(10):
        output = walk(matcher(constraint), random.Random(f"{seed} {number}"), hints)
        if output is not None:
            judge.validate(read(output))
