from __future__ import annotations

from typing import Any

import pytest

from services.common.errors import InvalidArgument
from services.gateway.messages import Message, ToolCall, make_message, read_messages

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}


def one(**message: Any) -> Message:
    return read_messages([message])[0]


def test_content_is_a_string_or_parts() -> None:
    assert one(role="user", content="hi") == Message("user", "hi")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert one(role="user", content=parts).text == "a\nb"
    assert one(role="tool", content=parts, tool_call_id="c1") == Message("tool", "a\nb", tool_call_id="c1")
    assert one(role="user", content=[]).text == ""


def test_calls_need_no_content_and_no_calls_are_none() -> None:
    called = one(role="assistant", content=None, tool_calls=[CALL])
    assert called == Message("assistant", "", (ToolCall("f", '{"x": 1}', "c1"),))
    assert called.for_template(parts=False)["tool_calls"] == [
        {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    ]
    assert "tool_calls" not in one(role="assistant", content="x", tool_calls=[]).for_template(parts=False)
    long = one(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": '{"x": 18446744073709551617}'}}])
    assert long.for_template(parts=False)["tool_calls"][0]["function"]["arguments"] == {"x": 2**64 + 1}
    empty = one(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": ""}}])
    assert empty.for_template(parts=False)["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_passed_on_under_every_name(name: str) -> None:
    shown = one(role="assistant", content="x", **{name: "because"}).for_template(parts=False)
    assert shown["reasoning_content"] == shown["reasoning"] == shown["thinking"] == "because"


def test_what_answers_carry_may_come_back() -> None:
    assert one(role="assistant", content="x", refusal=None, annotations=[], audio=None, function_call=None).text == "x"


def test_a_call_may_have_the_index_that_it_had_in_a_stream() -> None:
    assert one(role="assistant", tool_calls=[{**CALL, "index": 0}]).tool_calls == (ToolCall("f", '{"x": 1}', "c1"),)


@pytest.mark.parametrize("role", ["system", "developer", "user", "function"])
def test_what_belongs_to_other_turns_may_stand_in_one_if_it_is_empty(role: str) -> None:
    turn = one(role=role, content="x", tool_calls=[], tool_call_id="", reasoning_content="", thinking=None)
    assert turn == Message(role, "x")
    assert one(role="tool", content="x", tool_call_id="c1", reasoning="").reasoning is None


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "robot"])
def test_every_turn_may_have_a_name_that_the_template_is_given(role: str) -> None:
    given = {"tool_call_id": "c1"} if role == "tool" else {}
    assert one(role=role, content="x", name="ann", **given).for_template(parts=False)["name"] == "ann"


def test_what_a_role_may_that_only_a_template_knows_is_the_templates_business() -> None:
    turn = one(role="robot", content="x", tool_calls=[CALL], tool_call_id="c9", reasoning="hm")
    assert (len(turn.tool_calls), turn.tool_call_id, turn.reasoning) == (1, "c9", "hm")


def test_reasoning_under_two_names_is_the_same() -> None:
    assert one(role="assistant", content="x", reasoning="hm", reasoning_content="hm").reasoning == "hm"
    with pytest.raises(InvalidArgument, match="contradicts") as caught:
        one(role="assistant", content="x", reasoning="hm", reasoning_content="well")
    assert caught.value.field == "messages[0].reasoning"


def test_text_as_one_part() -> None:
    assert Message("user", "x").for_template(parts=True) == {"role": "user", "content": [{"type": "text", "text": "x"}]}
    named = Message("user", "x", name="ann").for_template(parts=False)
    assert named == {"role": "user", "content": "x", "name": "ann"}


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([5], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 5, "content": "x"}], "messages[0].role"),
        ([{"role": "", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "user", "content": "x", "conten": 1}], "messages[0].conten"),
        ([{"role": "user", "content": "x", "audio": {"id": "a"}}], "messages[0].audio"),
        ([{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}], "messages[0].content[0].more"),
        ([{"role": "user", "content": ["ok", {"type": "input_audio"}]}], "messages[0].content[1]"),
        *(
            ([{"role": role, "content": "x", **misplaced}], f"messages[0].{next(iter(misplaced))}")
            for role in ("system", "developer", "user", "function")
            for misplaced in ({"tool_calls": [CALL]}, {"tool_call_id": "c1"}, {"reasoning": "x"}, {"thinking": "x"})
        ),
        ([{"role": "assistant", "content": "x", "tool_call_id": "c1"}], "messages[0].tool_call_id"),
        ([{"role": "tool", "content": "x", "tool_call_id": "c1", "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([{"role": "tool", "content": "x", "tool_call_id": "c", "thinking": "x"}], "messages[0].thinking"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "tool", "content": "x", "tool_call_id": ""}], "messages[0].tool_call_id"),
        ([{"role": "user", "reasoning": ""}], "messages[0].content"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "extra": 1}]}], "messages[0].tool_calls[0].extra"),
        ([{"role": "assistant", "tool_calls": [{**CALL, "index": "0"}]}], "messages[0].tool_calls[0].index"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "argument": "{}"}}]}],
            "messages[0].tool_calls[0].function.argument",
        ),
        ([{"role": "assistant", "tool_calls": {}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{"type": "custom"}]}], "messages[0].tool_calls[0]"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "messages[0].tool_calls[0].function.name"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": NaN}'}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 10**5}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        *(
            (
                [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}],
                f"messages[0].tool_calls[0].function.arguments.{place}",
            )
            for arguments, place in (
                ('{"a": 1, "a": 2}', "a"),
                ('{"a": [{"b": 1, "b": 1}]}', "a[0].b"),
                ('{"a": 1e999}', "a"),
                ('{"a": "\\ud800"}', "a"),
            )
        ),
    ],
)
def test_bad_messages_are_named(messages: object, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_messages(messages)
    assert caught.value.field == field


def test_messages_that_do_not_come_from_json() -> None:
    assert make_message(Message("user", ""), ["a", "b"], "messages[0]") == Message("user", "a\nb")
    with pytest.raises(InvalidArgument, match=r"messages\[1\].content"):
        make_message(Message("user", ""), [], "messages[1]")
    with pytest.raises(InvalidArgument, match=r"messages\[1\].tool_call_id"):
        make_message(Message("tool", ""), ["x"], "messages[1]")
    with pytest.raises(InvalidArgument, match=r"messages\[1\].tool_calls"):
        make_message(Message("user", "", (ToolCall("f"),)), ["x"], "messages[1]")
    with pytest.raises(InvalidArgument, match=r"messages\[1\].reasoning_content"):
        make_message(Message("user", "", reasoning="hm"), ["x"], "messages[1]")
    with pytest.raises(InvalidArgument, match="role"):
        make_message(Message("", ""), ["x"], "messages[1]")
    with pytest.raises(InvalidArgument, match=r"messages\[1\].tool_calls\[0\].arguments.a: stands there twice"):
        make_message(Message("assistant", "", (ToolCall("f", '{"a": 1, "a": 2}'),)), [], "messages[1]")
    with pytest.raises(InvalidArgument, match="arguments"):
        make_message(Message("assistant", "", (ToolCall("f", "{"),)), [], "messages[1]")
