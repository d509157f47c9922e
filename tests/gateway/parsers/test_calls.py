"""The JSON of a call. The oracle is the json module, on the text as a whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.parsers.answer import AnswerParser
from services.gateway.request import ToolCallDelta
from tests.gateway.parsers.answers import Answer, parse, parse_any_cut, pieces_of, tools


def called(body: str) -> tuple[tuple[str, str], ...]:
    """The calls in a body between tags that has nothing else."""
    answer = parse_any_cut(f"<tool_call>{body}</tool_call>", "hermes")
    assert answer == Answer("", answer.calls)
    return answer.calls


ARGUMENTS = [
    "{}",
    '{"a": 1}',
    '{ "a" : 1.5e-3 ,\n\t"b" : [ ] }',
    '{"a": {"b": {"c": [[], {}, [{"d": null}]]}}}',
    r'{"a": "say \"hi\" \\"}',
    r'{"a": "\\\\\""}',
    '{"a": "}", "b": "]}{[", "c": "</tool_call><tool_call>"}',
    r'{"a": "\u00e9 \ud83d\ude00 \n"}',
    '{"a": "日本 🔥 żółw"}',
    '{"name": "x", "arguments": {"name": "y"}}',
    '{"a": "a\nline"}',  # no JSON, and passed on all the same
    '{"a": True, "b": nan}',
    "[1, 2]",
    "17",
    "true",
]


@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_arguments_are_told_as_they_are_written(arguments: str) -> None:
    assert called(f'{{"name": "f", "arguments": {arguments}}}') == (("f", arguments),)
    assert called(f'{{"arguments":{arguments},"name":"f"}}') == (("f", arguments),)
    assert called(f'\n{{ "id" : "x" , "name" : "f" , "parameters" : {arguments} , "z": [{{}}] }}\n') == (
        ("f", arguments),
    )


@pytest.mark.parametrize("arguments", ARGUMENTS)
@pytest.mark.parametrize("ascii_only", [True, False])
def test_arguments_in_a_string_are_decoded(arguments: str, ascii_only: bool) -> None:
    body = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=ascii_only)
    assert called(body) == (("f", arguments),)


@pytest.mark.parametrize(
    ("body", "call"),
    [
        ('{"name": "f"}', ("f", "{}")),
        ('{"name": "f",}', ("f", "{}")),
        ('{"name": "f", "arguments": null}', ("f", "{}")),
        ('{"arguments": null, "name": "f"}', ("f", "{}")),
        ('{"name": "f", "arguments": ""}', ("f", "{}")),
        ('{"name": "f", "arguments": }', ("f", "{}")),
        ('{"name": "f", "arguments": {"a": 1}, "parameters": {"b": 2}}', ("f", '{"a": 1}')),
        ('{"name": "f", "name": "g"}', ("f", "{}")),
        (r'{"n\u0061me": "\u0066"}', ("f", "{}")),
        ('{"id": {"name": "no"}, "name": "f"}', ("f", "{}")),
        ('{"id": "{\\"name\\": \\"no\\"}", "name": "f"}', ("f", "{}")),
        ('{"x": -1.5e3, "y": [1, {"name": "no"}], "z": "}", "name": "f"}', ("f", "{}")),
        # escapes that are not right, in arguments that are decoded
        (r'{"name": "f", "arguments": "\ud83d"}', ("f", "\ufffd")),
        (r'{"name": "f", "arguments": "\ud83d!"}', ("f", "\ufffd!")),
        (r'{"name": "f", "arguments": "\ud83d\n"}', ("f", "\ufffd\n")),
        (r'{"name": "f", "arguments": "\ud83d\ud83d\ude00"}', ("f", "\ufffd😀")),
        (r'{"name": "f", "arguments": "\ude00\ud83d"}', ("f", "\ufffd\ufffd")),
        (r'{"name": "f", "arguments": "\q\u12x"}', ("f", r"\q\u12x")),
        # brackets that don't match
        ('{"name": "f", "arguments": {"a": [1}}', ("f", '{"a": [1}')),
        ('{"name": "f", "arguments": {"a": [[{"b": 1]}}', ("f", '{"a": [[{"b": 1]}')),
        ('{"name": "f", "arguments": {"a": 1', ("f", '{"a": 1')),
        ('{"name": "f", "arguments": [1}', ("f", "[1")),
        ('{"name": "f", "arguments": {"a": 1, ', ("f", '{"a": 1, ')),
        ('{"name": "f", "arguments": ', ("f", "")),
        ('{"name": "f" "arguments": {"a": 1}}', ("f", '{"a": 1}')),
    ],
)
def test_odd_objects(body: str, call: tuple[str, str]) -> None:
    assert called(body) == (call,)


def test_broken_off_in_an_escape() -> None:
    for tail in ("\\", "\\u", "\\ud83", "\\ud83d", "\\ud83d\\", "\\ud83d\\ude0"):
        text = '<tool_call>{"name": "f", "arguments": "{x' + tail
        assert parse_any_cut(text, "hermes").calls == (("f", "{x"),)


def test_only_an_escape_that_is_not_complete_holds_up_arguments() -> None:
    parser = AnswerParser(None, tools("hermes"))
    for text, held in [
        ('<tool_call>{"name": "f", "arguments": "{x', 0),
        ("y\\", 1),
        ("nz", 0),
        ("\\u00", 4),
        ("e9", 0),
    ]:
        parser.push(text)
        assert parser.fed - parser.settled == held
    told = [event.what.arguments for event in parser.events if isinstance(event.what, ToolCallDelta)]
    assert "".join(told) == "{xy\nzé"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_random_calls_equal_the_json_module(data: st.DataObject) -> None:
    """Any keys in any order, any spelling; cut anywhere."""
    arguments = data.draw(st.dictionaries(st.text(max_size=4), JSON, max_size=3))
    others = data.draw(st.dictionaries(st.text(max_size=4), JSON, max_size=2))
    call = {**others, "name": data.draw(st.text(min_size=1, max_size=6)), "arguments": arguments}
    order = data.draw(st.permutations([key for key in call if key != "parameters"]))
    separators = data.draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", "\t: ")]))

    def write(value: Any) -> str:
        return json.dumps(value, ensure_ascii=data.draw(st.booleans()), separators=separators)

    text = f"<tool_call>{write({key: call[key] for key in order})}</tool_call>"
    if not data.draw(st.booleans()):
        text = f"<tool_call>{write({**call, 'arguments': write(arguments)})}</tool_call>"
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6))
    answer = parse(pieces_of(text, cuts), "hermes")
    assert not answer.content
    ((name, told),) = answer.calls
    assert name == json.loads(json.dumps(call["name"]).encode("utf-8", "replace"))
    assert json.loads(told) == arguments
