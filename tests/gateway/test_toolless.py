"""Tools in plain turns: what a template without a place for them is given instead."""

from __future__ import annotations

import json

import pytest

from services.gateway import toolless
from services.gateway.messages import Message, ToolCall
from services.gateway.tools import Tool

TOOLS = (Tool("f", "does f", {"type": "object", "properties": {"é": {"type": "integer"}}}), Tool("g"))
HELLO = Message("user", "hello")
CALLS = Message("assistant", "", (ToolCall("f", '{"é":1}', "c1"), ToolCall("g", "", "c2")))


def test_tools_stand_in_the_system_message() -> None:
    (system, user) = toolless.offer((HELLO,), TOOLS, system=True)
    assert (system.role, user) == ("system", HELLO)
    lines = system.text.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in lines] == [tool.for_template() for tool in TOOLS]
    assert "é" in lines[0]
    for role in ("system", "developer"):
        (told, user) = toolless.offer((Message(role, "Be brief."), HELLO), TOOLS, system=True)
        assert (told.role, told.text, user) == (role, f"Be brief.\n\n{system.text}", HELLO)


def test_or_in_the_first_users_turn_where_no_system_message_may_be() -> None:
    block = toolless.offer((HELLO,), TOOLS, system=True)[0].text
    assert toolless.offer((HELLO, CALLS), TOOLS, system=False) == (Message("user", f"{block}\n\nhello"), CALLS)
    assert toolless.offer((CALLS,), TOOLS, system=False) == (Message("user", block), CALLS)


def test_calls_and_results_become_text() -> None:
    results = [Message("tool", "1", tool_call_id="c1"), Message("tool", "two\nlines", tool_call_id="c2")]
    told = toolless.tell([HELLO, CALLS, *results, Message("assistant", "done"), Message("tool", "late")])
    assert told == (
        HELLO,
        Message(
            "assistant",
            '<tool_call>\n{"name": "f", "arguments": {"é": 1}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        ),
        Message("user", "<tool_response>\n1\n</tool_response>\n<tool_response>\ntwo\nlines\n</tool_response>"),
        Message("assistant", "done"),
        Message("user", "<tool_response>\nlate\n</tool_response>"),
    )


def test_text_before_calls_and_reasoning_stay() -> None:
    (told,) = toolless.tell([Message("assistant", "Let me see.", (ToolCall("g"),), reasoning="hm")])
    assert told.text.startswith("Let me see.\n<tool_call>")
    assert (told.reasoning, told.tool_calls) == ("hm", ())


@pytest.mark.parametrize("turns", [[], [HELLO], [Message("system", "x"), HELLO, Message("assistant", "y")]])
def test_turns_without_tools_are_as_they_were(turns: list[Message]) -> None:
    assert toolless.tell(turns) == tuple(turns)
