"""One grammar of answers, calls of tools and reasoning: what is an output under it, and what is none."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from services.common.errors import InvalidArgument
from services.gateway.asked import Asked
from services.gateway.constraints.building import build
from services.gateway.constraints.parts import Calls, Surroundings
from services.gateway.fields import Api, Caller
from services.gateway.parsers.formats import markers, tool_format
from services.gateway.request import Constraint, ReasoningOptions
from services.gateway.tools import Tool, ToolChoice
from tests.gateway.constraints.walks import CALLS, SPECIAL, THINK, accepts, begins, matcher, walk

A = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ANSWER = {"type": "object", "properties": {"answer": {"enum": ["yes", "no"]}}, "required": ["answer"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": ANSWER}}
TOOLS = (Tool("first", parameters=A), Tool("firsts", parameters=None))
FORMATS = ("hermes", "llama3", "mistral", "mistral_named")
INSIDE, BEFORE = (ReasoningOptions("<think>", "</think>", inside) for inside in (True, False))


class Vocabulary:
    """Some texts are special tokens."""

    def __init__(self, *special: str) -> None:
        self._special = special

    def special_id(self, text: str) -> int | None:
        return 256 + SPECIAL.index(text) if text in self._special else None

    added_id = special_id


def calls_of(name: str, mode: Any = "required", **fields: Any) -> Calls:
    named = fields.pop("named", None)
    tools = fields.pop("tools", TOOLS)
    return Calls(tools, ToolChoice(mode, named), tool_format(name).shape, markers(name), **fields)


def combined(
    calls: Calls | None, reasoning: ReasoningOptions | None = None, special: tuple[str, ...] = (), **asked: Any
) -> Constraint:
    marks = () if calls is None else calls.marks
    around = Surroundings(reasoning, Vocabulary(*special), marks)
    found = build(Asked(**asked), Caller(Api.CHAT), calls, around)
    assert found is not None
    return found


def written(name: str, *calls: tuple[str, str]) -> str:
    return tool_format(name).shape.write(calls)


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_is_required(name: str) -> None:
    found = combined(calls_of(name))
    for good in (
        [("first", '{"a": 1}')],
        [("firsts", '{"anything": [1, {}]}')],
        [("first", '{"a":-5}'), ("firsts", "{}"), ("first", '{ "a" : 0 }')],
    ):
        assert accepts(found, written(name, *good)), good
    for bad in ([("first", "{}")], [("first", '{"a": "1"}')], [("second", "{}")], [("firsts", "[]")]):
        assert not accepts(found, written(name, *bad)), bad
    for other in ("", "Hello", "{}", written(name, ("first", '{"a": 1}')) + " and more"):
        assert not accepts(found, other)


@pytest.mark.parametrize("name", FORMATS)
def test_one_call_only(name: str) -> None:
    found = combined(calls_of(name, parallel=False))
    assert accepts(found, written(name, ("first", '{"a":1}')))
    assert not accepts(found, written(name, ("first", '{"a":1}'), ("firsts", "{}")))


@pytest.mark.parametrize("name", FORMATS)
def test_the_one_that_is_named(name: str) -> None:
    found = combined(calls_of(name, "named", named="firsts"))
    assert accepts(found, written(name, ("firsts", "{}")))
    assert not accepts(found, written(name, ("first", '{"a":1}')))
    asked_too = combined(calls_of(name, "named", named="firsts"), response_format=FORMAT)
    assert asked_too.text == found.text


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_by_its_schema_or_calls(name: str) -> None:
    found = combined(calls_of(name, "auto"), response_format=FORMAT)
    assert accepts(found, '{"answer": "yes"}')
    assert accepts(found, written(name, ("first", '{"a":1}')))
    assert not accepts(found, '{"answer": "maybe"}')
    assert not accepts(found, "Hello")
    assert begins(found, "Hello") == 0
    assert not accepts(found, written(name, ("second", "{}")))


@pytest.mark.parametrize("name", FORMATS)
def test_strict_tools_are_held_though_the_model_is_free_to_call(name: str) -> None:
    strict = (Tool("first", parameters=A, strict=True), Tool("loose", parameters=A))
    found = combined(calls_of(name, "auto", tools=strict))
    assert accepts(found, "Hello, <b>you</b>.\nHow do you do?")
    assert accepts(found, "")
    assert accepts(found, written(name, ("first", '{"a":1}')))
    assert accepts(found, written(name, ("loose", '{"b":1}')))
    for bad in ([("first", "{}")], [("first", '{"a":1}'), ("first", '{"b":1}')], [("second", "{}")]):
        assert not accepts(found, written(name, *bad))
        assert name == "llama3" or not accepts(found, "I call: " + written(name, *bad))
    if name != "llama3":
        assert accepts(found, "I call: " + written(name, ("first", '{"a":1}')))


def test_nothing_is_held_where_nothing_is_asked() -> None:
    for calls in (None, calls_of("hermes", "auto"), calls_of("hermes", "none")):
        assert build(Asked(), Caller(Api.CHAT), calls, Surroundings(INSIDE)) is None


def test_tools_that_must_not_be_called_leave_the_answer() -> None:
    found = combined(calls_of("hermes", "none"), response_format=FORMAT)
    assert found.kind == "json_schema"


@pytest.mark.parametrize("special", [(), ("</think>",)])
@pytest.mark.parametrize(
    ("asked", "good", "bad"),
    [
        ({"response_format": FORMAT}, '{"answer": "no"}', '{"answer": 1}'),
        ({"response_format": {"type": "json_object"}}, '{"x": []}', "[]"),
        ({"structured_outputs": {"regex": "[ab/]{3}\\n?"}}, "a/b", "abc"),
        ({"structured_outputs": {"choice": ["yes", "no/yes"]}}, "no/yes", "no"),
    ],
)
def test_an_answer_after_reasoning(special: tuple[str, ...], asked: dict[str, Any], good: str, bad: str) -> None:
    close = [THINK] if special else list(b"</think>")
    thoughts = ("", "Let me see: <think> < / think > </thin\n\né", good)
    inside, before = (combined(None, reasoning, special, **asked) for reasoning in (INSIDE, BEFORE))
    for thought in thoughts:
        for gap in ("", "\n\n"):
            for text, fits in ((good, True), (bad, False)):
                rest = [*thought.encode(), *close, *gap.encode(), *text.encode()]
                assert accepts(inside, rest) is fits, (thought, gap, text)
                assert accepts(before, [*b"<think>", *rest]) is fits, (thought, gap, text)
    assert accepts(before, good)
    assert not accepts(before, bad)
    assert not accepts(inside, good), "reasoning must end first"
    spelled = [*b"Hm.</think>", *bad.encode()]
    assert not accepts(inside, spelled), "nor may its end be spelled with other tokens"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("special", [(), ("</think>", "[TOOL_CALLS]")])
def test_calls_after_reasoning(name: str, special: tuple[str, ...]) -> None:
    def ids(text: str) -> list[int]:
        out: list[int] = []
        while text:
            mark = next((mark for mark in special if text.startswith(mark)), None)
            token = {"</think>": THINK, "[TOOL_CALLS]": CALLS}.get(mark or "")
            out += [token] if token is not None else text[:1].encode()
            text = text[len(mark or " ") :]
        return out

    calls = written(name, ("first", '{"a":1}'), ("firsts", '{"x":"[TOOL_CALLS"}'))
    wrong = written(name, ("first", "{}"))
    for mode, asked in (("required", {}), ("auto", {"response_format": FORMAT})):
        found = combined(calls_of(name, mode, parallel=True), INSIDE, special, **asked)
        one = written(name, ("first", '{"a":1}'))
        assert accepts(found, ids("Which? {}[]</think>\n\n" + one))
        assert accepts(found, ids("</think>" + calls)) or (name, mode) == ("llama3", "auto")
        assert not accepts(found, ids("</think>" + wrong))
        assert not accepts(found, ids("Only thoughts."))
        assert accepts(found, ids('</think>{"answer":"yes"}')) is (mode == "auto")


def test_a_grammar_of_the_clients_own_after_reasoning() -> None:
    grammar = {"structured_outputs": {"grammar": 'start: "x"+'}}
    assert combined(None, INSIDE, ("</think>",), **grammar).starts_after == (THINK,)
    assert combined(None, BEFORE, ("</think>",), **grammar).starts_after == ()
    assert combined(None, INSIDE, (), **grammar).starts_after == ()
    found = combined(None, INSIDE, ("</think>",), **grammar)
    assert accepts(found, [*b"any </think>", THINK, *b"xx"])
    assert not accepts(found, [THINK, *b"xy"])


@pytest.mark.parametrize("name", FORMATS)
def test_walks_through_calls_are_calls(name: str) -> None:
    tool = Tool("f", parameters={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    found = combined(calls_of(name, tools=(tool,), parallel=False))
    shape = tool_format(name).shape
    ended = 0
    for seed in range(12):
        output = walk(matcher(found), random.Random(seed))
        if output is not None:
            text = output.decode()
            front = shape.opening + shape.before_name + "f" + shape.before_arguments
            assert text.startswith(front)
            arguments = text.removeprefix(front).removesuffix(shape.closing).removesuffix(shape.after_call)
            assert isinstance(json.loads(arguments)["n"], int)
            ended += 1
    assert ended >= 6


def test_white_space_of_arguments_is_bounded() -> None:
    found = combined(calls_of("hermes"))
    for count, fits in ((32, True), (33, False)):
        assert accepts(found, written("hermes", ("first", "{\n" + " " * count + '"a":1}'))) is fits


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({}, "tools[1].function.parameters.properties.x.not"),
        ({"flat": True}, "tools[1].parameters.properties.x.not"),
        ({"field": "tools_json"}, "tools_json[1].function.parameters.properties.x.not"),
    ],
)
def test_a_tool_that_cannot_be_held_is_refused_by_its_place(fields: dict[str, Any], place: str) -> None:
    bad = Tool("g", parameters={"type": "object", "properties": {"x": {"not": {}}}})
    with pytest.raises(InvalidArgument) as refused:
        combined(calls_of("hermes", tools=(TOOLS[0], bad), **fields))
    assert refused.value.field == place
    with pytest.raises(InvalidArgument) as beside_an_answer:
        combined(calls_of("hermes", "auto", tools=(TOOLS[0], bad), **fields), response_format=FORMAT)
    assert beside_an_answer.value.field == place
    strict = Tool("s", parameters=A, strict=True)
    loose = combined(calls_of("hermes", "auto", tools=(strict, bad), **fields))
    assert accepts(loose, written("hermes", ("g", '{"x": 1}')))
    endless = Tool("f", parameters={"type": "object", "properties": {"f": {"$ref": "#"}}, "required": ["f"]})
    with pytest.raises(InvalidArgument, match="never terminates") as refused:
        combined(calls_of("llama3", tools=(endless,)))
    assert refused.value.field == "tools[0].function.parameters"


def test_what_cannot_be_told_from_calls_is_refused() -> None:
    for asked, place in (
        ({"grammar": 'start: "x"'}, "structured_outputs.grammar"),
        ({"regex": "a+"}, "structured_outputs.regex"),
    ):
        with pytest.raises(InvalidArgument) as refused:
            combined(calls_of("llama3", "auto"), structured_outputs=asked)
        assert refused.value.field == place


def test_definitions_of_answer_and_tools_are_kept_apart() -> None:
    def tree(kind: str) -> dict[str, Any]:
        node = {
            "type": "object",
            "properties": {"leaf": {"type": kind}, "tree": {"$ref": "#/$defs/n"}},
            "additionalProperties": False,
        }
        return {"type": "object", "properties": {"tree": {"$ref": "#/$defs/n"}}, "$defs": {"n": node}} | {
            "required": ["tree"],
            "additionalProperties": False,
        }

    tools = tuple(Tool(kind, parameters=tree(kind), strict=True) for kind in ("integer", "string", "null"))
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": tree("boolean")}}
    for name in FORMATS:
        found = combined(calls_of(name, "auto", tools=tools), response_format=asked)
        values = {"integer": "1", "string": '"1"', "null": "null", "boolean": "true"}
        for kind in ("integer", "string", "null"):
            for other, value in values.items():
                call = written(name, (kind, f'{{"tree":{{"tree":{{"leaf":{value}}}}}}}'))
                assert accepts(found, call) is (kind == other), call
        assert accepts(found, '{"tree":{"tree":{"leaf":true}}}')
        assert not accepts(found, '{"tree":{"tree":{"leaf":1}}}')


def test_multiples_of_several_schemas_count_together() -> None:
    """Side by side they would hold a thread for hours."""
    steps = [Tool(f"by_{step}", parameters={"properties": {"x": {"multipleOf": step}}}) for step in (97, 89, 8.3)]
    with pytest.raises(InvalidArgument, match="remainders") as refused:
        combined(calls_of("hermes", tools=tuple(steps)))
    assert refused.value.field == "tools"
    both = " | ".join(f'%json {{"type": "number", "multipleOf": {step}}}' for step in (97, 89, 83))
    with pytest.raises(InvalidArgument, match="remainders") as refused:
        combined(None, structured_outputs={"grammar": f"start: {both}"})
    assert refused.value.field == "structured_outputs.grammar"
    assert accepts(combined(calls_of("hermes", tools=tuple(steps[:2]))), written("hermes", ("by_89", '{"x": 178}')))
