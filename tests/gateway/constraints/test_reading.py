"""What clients ask for, in each of the four ways, and what is refused by which place."""

from __future__ import annotations

import asyncio
import json
import re
import threading
from typing import Any

import pytest

from services.common.errors import InvalidArgument, TriptychError, Unimplemented
from services.gateway.asked import Asked
from services.gateway.constraints.building import Constraints, build
from services.gateway.constraints.parts import LONGEST, Surroundings, spelled
from services.gateway.fields import Api, Caller
from services.gateway.request import Constraint
from tests.gateway.constraints.walks import accepts

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
NAMED = {"name": "x", "schema": SCHEMA, "strict": True, "description": "of what"}
GRPC = Caller(Api.GRPC, "sampling.")


def made(caller: Caller | None = None, **asked: Any) -> Constraint | None:
    return build(Asked(**asked), caller or Caller(Api.CHAT), None, Surroundings())


def constraint(caller: Caller | None = None, **asked: Any) -> Constraint:
    found = made(caller, **asked)
    assert found is not None
    return found


def refusal(caller: Caller | None = None, **asked: Any) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as refused:
        made(caller, **asked)
    return refused.value


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"response_format": {"type": "text"}},
        {"text": {"format": {"type": "text"}}},
        {"text": {}},
        {"text": {"format": None, "verbosity": "medium"}},
    ],
)
def test_text_is_free(asked: dict[str, Any]) -> None:
    assert made(**asked) is None


@pytest.mark.parametrize(
    ("caller", "asked"),
    [
        (None, {"response_format": {"type": "json_schema", "json_schema": NAMED}}),
        (None, {"structured_outputs": {"json": SCHEMA}}),
        (None, {"structured_outputs": {"json": json.dumps(SCHEMA), "regex": None, "disable_fallback": True}}),
        (Caller(Api.RESPONSES), {"text": {"format": {"type": "json_schema", **NAMED}}}),
        (GRPC, {"constraint": {"json_schema": json.dumps(SCHEMA)}}),
    ],
)
def test_a_schema_is_held_however_it_is_sent(caller: Caller | None, asked: dict[str, Any]) -> None:
    found = constraint(caller, **asked)
    assert found.kind == "json_schema"
    assert accepts(found, '{"a": 1, "b": []}')
    assert not accepts(found, '{"a": "1"}')
    assert not accepts(found, "{}")


@pytest.mark.parametrize(
    ("caller", "asked"),
    [
        (None, {"response_format": {"type": "json_object"}}),
        (None, {"structured_outputs": {"json_object": True}}),
        (None, {"structured_outputs": {"json_object": True, "disable_any_whitespace": True}}),
        (Caller(Api.RESPONSES), {"text": {"format": {"type": "json_object"}}}),
        (GRPC, {"constraint": {"json_object": True}}),
    ],
)
def test_any_object(caller: Caller | None, asked: dict[str, Any]) -> None:
    found = constraint(caller, **asked)
    assert accepts(found, '{"a":[1,{"b":null}]}')
    assert not accepts(found, "[1]")
    assert accepts(found, '{"a": 1}') is ("disable_any_whitespace" not in str(asked))


CHOICES = ["yes", "no", "a.b", "x/y", "two\nlines", "é", "\\d", "(", "<a>", "a b", '"', "yes!"]


@pytest.mark.parametrize("caller", [None, GRPC])
def test_one_of_some_texts(caller: Caller | None) -> None:
    asked: dict[str, Any] = {"constraint" if caller else "structured_outputs": {"choice": CHOICES}}
    found = constraint(caller, **asked)
    for choice in CHOICES:
        assert accepts(found, choice), choice
    for text in ("", "ye", "aXb", "yesno", "7", "y"):
        assert not accepts(found, text), text


@pytest.mark.parametrize("caller", [None, GRPC])
def test_an_expression_is_of_the_whole_text(caller: Caller | None) -> None:
    asked: dict[str, Any] = {"constraint" if caller else "structured_outputs": {"regex": r"^[0-9]{2}/(a|b)$"}}
    found = constraint(caller, **asked)
    assert accepts(found, "12/b")
    assert not accepts(found, "12/b ")
    assert not accepts(found, "x12/b")


SHORT = [r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"[\d.]", r"[^\d]", r"[^\D]", r"[\w.-]+", r"\\d", r"[^\w\s]"]


@pytest.mark.parametrize("expression", SHORT)
def test_short_classes_are_ascii(expression: str) -> None:
    made_of = [{"regex": expression}, {"grammar": f"start: /{expression}/"}]
    found = [constraint(structured_outputs=asked) for asked in made_of]
    for text in ("1", "\u0663", "a", "é", "_", " ", "\xa0", "\x0b", "\n", "-", ".", "", "x-", "\\d", "1a", "\u212a"):
        fits = re.fullmatch(expression, text, re.ASCII) is not None
        assert [accepts(each, text) for each in found] == [fits, fits], text


def test_a_grammar_of_the_clients_own() -> None:
    grammar = """
    // a comment with %json and "quotes
    start: "// no comment" A /[x]%json/ %json {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    A: "y"+ # another one, @all
    """
    for found in (constraint(structured_outputs={"grammar": grammar}), constraint(GRPC, constraint={"lark": grammar})):
        assert found.kind == "lark"
        assert accepts(found, '// no commentyyx%json{"a":1}')
        assert not accepts(found, '// no commentyyx%json{"a":2}')
        assert not accepts(found, '// no commentyyx%json{"a":1,"\\u0061":2}')
        assert accepts(found, "// no commentyyx%json{\n" + " " * 32 + '"a":1}')
        assert not accepts(found, '// no commentyyx%json{  "a":1}')


RF = "response_format"
SO = "structured_outputs"
REFUSED: list[tuple[Caller | None, dict[str, Any], str, str]] = [
    (None, {RF: "json"}, RF, "object"),
    (None, {RF: {}}, f"{RF}.type", "json_schema"),
    (None, {RF: {"type": "xml"}}, f"{RF}.type", "json_schema"),
    (None, {RF: {"type": "structural_tag"}}, f"{RF}.type", "json_schema"),
    (None, {RF: {"type": "json_object", "schema": SCHEMA}}, f"{RF}.schema", "unknown"),
    (None, {RF: {"type": "json_schema"}}, f"{RF}.json_schema", "object"),
    (None, {RF: {"type": "json_schema", "json_schema": {"name": "x"}}}, f"{RF}.json_schema.schema", "needed"),
    (None, {RF: {"type": "json_schema", "json_schema": {"schema": SCHEMA}}}, f"{RF}.json_schema.name", "letters"),
    (None, {RF: {"type": "json_schema", "json_schema": {**NAMED, "name": "a b"}}}, f"{RF}.json_schema.name", "letters"),
    (None, {RF: {"type": "json_schema", "json_schema": {**NAMED, "strict": 1}}}, f"{RF}.json_schema.strict", "true"),
    (None, {RF: {"type": "json_schema", "json_schema": {**NAMED, "x": 1}}}, f"{RF}.json_schema.x", "unknown"),
    (
        None,
        {RF: {"type": "json_schema", "json_schema": {**NAMED, "schema": {"properties": {"x": {"not": {}}}}}}},
        f"{RF}.json_schema.schema.properties.x.not",
        "cannot be held",
    ),
    (None, {SO: []}, SO, "object"),
    (None, {SO: {}}, SO, "exactly one"),
    (None, {SO: {"json": SCHEMA, "regex": "a"}}, SO, "exactly one"),
    (None, {SO: {"jsn": SCHEMA}}, f"{SO}.jsn", "json"),
    (None, {SO: {"json": SCHEMA, "whitespace_pattern": " "}}, f"{SO}.whitespace_pattern", "not supported"),
    (None, {SO: {"structural_tag": "x"}}, f"{SO}.structural_tag", "not supported"),
    (None, {SO: {"regex": "a", "disable_any_whitespace": True}}, f"{SO}.disable_any_whitespace", "no meaning"),
    (
        None,
        {SO: {"choice": ["a"], "disable_additional_properties": True}},
        f"{SO}.disable_additional_properties",
        "no meaning",
    ),
    (None, {SO: {"json": SCHEMA, "disable_any_whitespace": 1}}, f"{SO}.disable_any_whitespace", "true or false"),
    (None, {SO: {"json": "{"}}, f"{SO}.json", "no JSON"),
    (None, {SO: {"json": '{"type": NaN}'}}, f"{SO}.json", "NaN"),
    (None, {SO: {"json": '{"type":"null","type":"string"}'}}, f"{SO}.json", "twice"),
    (None, {SO: {"json": "[" * 100_000}}, f"{SO}.json", ""),
    (None, {SO: {"json": " " * (LONGEST + 1)}}, f"{SO}.json", "characters"),
    (None, {SO: {"json": 7}}, f"{SO}.json", "schema"),
    (None, {SO: {"json": {"type": "object", "properties": {"a": 1}}}}, f"{SO}.json.properties.a", "schema"),
    (None, {SO: {"json_object": False}}, f"{SO}.json_object", "true"),
    (None, {SO: {"choice": []}}, f"{SO}.choice", "1 to"),
    (None, {SO: {"choice": "yes"}}, f"{SO}.choice", "array"),
    (None, {SO: {"choice": [""]}}, f"{SO}.choice", "not empty"),
    (None, {SO: {"choice": ["a", 1]}}, f"{SO}.choice", "string"),
    (None, {SO: {"choice": ["\ud800"]}}, f"{SO}.choice[0]", "surrogate"),
    (None, {SO: {"choice": ["a"] * 10_001}}, f"{SO}.choice", "10000"),
    (None, {SO: {"choice": ["a" * LONGEST, "b"]}}, f"{SO}.choice", "characters"),
    (None, {SO: {"regex": ""}}, f"{SO}.regex", "not empty"),
    (None, {SO: {"regex": 5}}, f"{SO}.regex", "string"),
    (None, {SO: {"regex": "("}}, f"{SO}.regex", "unclosed"),
    (None, {SO: {"regex": "a(?=b)"}}, f"{SO}.regex", "look-ahead"),
    (None, {SO: {"regex": "[a&&b]"}}, f"{SO}.regex", "no output"),
    (None, {SO: {"regex": "a" * (LONGEST + 1)}}, f"{SO}.regex", "characters"),
    (None, {SO: {"grammar": ""}}, f"{SO}.grammar", "not empty"),
    (None, {SO: {"grammar": "start: start"}}, f"{SO}.grammar", "no output"),
    (None, {SO: {"grammar": "nonsense"}}, f"{SO}.grammar", "xpected"),
    (None, {SO: {"grammar": 'root ::= "a"'}}, f"{SO}.grammar", "Lark"),
    (None, {SO: {"grammar": '{"grammars": [{"json_schema": {}}]}'}}, f"{SO}.grammar", "not JSON"),
    (None, {SO: {"grammar": '%llguidance {}\nstart: "a"'}}, f"{SO}.grammar", "%llguidance"),
    (None, {SO: {"grammar": "start: @other"}}, f"{SO}.grammar", "@"),
    (None, {SO: {"grammar": 'start: a\na[temperature=0.5]: "a"'}}, f"{SO}.grammar", "temperature"),
    (None, {SO: {"grammar": 'start: a\na[stop="x"]: /.*/'}}, f"{SO}.grammar", "stop"),
    (None, {SO: {"grammar": "start: %json {"}}, f"{SO}.grammar", "no JSON"),
    (None, {SO: {"grammar": 'start: %json {"$ref": "#"}'}}, f"{SO}.grammar: %json", "never terminates"),
    (None, {RF: {"type": "json_object"}, SO: {"regex": "a"}}, f"{SO}.regex", "contradicts"),
    (GRPC, {"constraint": {"json_schema": "{"}}, "sampling.constraint.json_schema", "no JSON"),
    (GRPC, {"constraint": {"choice": []}}, "sampling.constraint.choice.values", "1 to"),
    (GRPC, {"constraint": {"regex": ""}}, "sampling.constraint.regex", "not empty"),
    (GRPC, {"constraint": {"lark": ""}}, "sampling.constraint.lark", "not empty"),
    (GRPC, {"constraint": {}}, "sampling.constraint", "exactly one"),
    (Caller(Api.RESPONSES), {"text": "plain"}, "text", "format"),
    (Caller(Api.RESPONSES), {"text": {"verbosity": "low"}}, "text.verbosity", "medium"),
    (Caller(Api.RESPONSES), {"text": {"form": {}}}, "text.form", "format"),
    (Caller(Api.RESPONSES), {"text": {"format": {"type": "grammar"}}}, "text.format.type", "json_schema"),
    (
        Caller(Api.RESPONSES),
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "objct"}}}},
        "text.format.schema.type",
        "object",
    ),
]


@pytest.mark.parametrize(("caller", "asked", "place", "words"), REFUSED)
def test_refusals_name_the_place(caller: Caller | None, asked: dict[str, Any], place: str, words: str) -> None:
    refused = refusal(caller, **asked)
    assert refused.field == place
    assert refused.message.startswith(place)
    assert words in refused.message
    assert "\n" not in refused.message


HOSTILE = {
    "regex": ["(((a{1000}){1000}){900}){1000}", "(a*)*" * 2000, "(" * 5000 + "a" + ")" * 5000, ".{1,100000}" * 50],
    "grammar": [
        "start: " + "(" * 3000 + '"a"' + ")" * 3000,
        "\n".join(["start: r0", *(f"r{at}: r{at + 1} r{at + 1}" for at in range(5000)), 'r5000: "a"']),
        'start: "' + "a" * 200_000,
        "start: " + "%json" * 20_000,
    ],
    "choice": [[f"{at} {'x' * 20}" for at in range(9_000)]],
}


@pytest.mark.parametrize(("kind", "value"), [(kind, value) for kind, values in HOSTILE.items() for value in values])
def test_hostile_texts_are_held_or_refused(kind: str, value: Any) -> None:
    outcomes: list[object] = []

    def attempt() -> None:
        try:
            outcomes.append(made(structured_outputs={kind: value}))
        except InvalidArgument as refused:
            outcomes.append(refused.field)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    assert outcomes
    assert isinstance(outcomes[0], Constraint) or outcomes[0] == f"structured_outputs.{kind}"


async def test_it_is_made_off_the_event_loop() -> None:
    constraints = Constraints()
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    large = {"enum": [f"word {at}" for at in range(4000)]}
    built = await constraints.build(Asked(structured_outputs={"json": large}), Caller(Api.CHAT))
    counting.cancel()
    constraints.close()
    assert built is not None
    assert turns > 10


async def test_what_takes_too_long_is_refused_by_its_place() -> None:
    """The thread is busy with something else until the end of the test."""
    constraints = Constraints(threads=1, limit_s=0.05)
    gate = threading.Event()
    constraints._pool.submit(gate.wait)
    try:
        with pytest.raises(InvalidArgument, match="took longer") as refused:
            await constraints.build(Asked(response_format={"type": "json_object"}), Caller(Api.CHAT))
    finally:
        gate.set()
        constraints.close()
    assert refused.value.field == "response_format"


def test_errors_of_the_engine_are_spelled_as_the_client_spells() -> None:
    mine = Constraint("regex", "a", place="structured_outputs.regex")
    renamed = spelled(InvalidArgument("constraint: too complex"), mine)
    assert (renamed.field, renamed.message) == ("structured_outputs.regex", "structured_outputs.regex: too complex")
    assert isinstance(spelled(Unimplemented("no grammars", field="constraint"), mine), Unimplemented)
    other: TriptychError = InvalidArgument("n is 9", field="n")
    assert spelled(other, mine) is other
    assert spelled(other, None) is other


def test_only_one_place_of_a_text_is_shown_at_fault() -> None:
    refused = refusal(structured_outputs={"grammar": 'start: a\na: b\nb: "x'})
    assert not re.search(r"\d \|", refused.message)
