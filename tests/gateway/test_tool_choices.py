"""Every choice of tools, streamed and whole, over what a model may do about it."""

from __future__ import annotations

from typing import Any

import pytest

from services.gateway.request import Constraint
from tests.gateway.client_checks import MODEL, TIME, call, obedient, say
from tests.gateway.constraints.walks import accepts
from tests.gateway.stack import Stack, gateway_stack

PROSE = "Only words."
CHOICES: list[Any] = ["auto", "none", "required", {"type": "function", "function": {"name": "get_time"}}]
DONE = call("get_time", zone="UTC")
CUT = DONE.index("UTC")  # a token is a byte


async def answer(s: Stack, *, stream: bool, **fields: Any) -> tuple[str, list[list[str]], str]:
    """(content, name and arguments per call, finish_reason)."""
    asked = {"model": MODEL, "tools": [TIME], **fields}
    if not stream:
        (choice,) = (await s.openai.chat.completions.create(**asked)).choices
        found = [[one.function.name, one.function.arguments] for one in choice.message.tool_calls or []]
        assert found or choice.message.tool_calls is None
        return choice.message.content or "", found, choice.finish_reason
    content, calls, reasons = "", [], []
    async for chunk in await s.openai.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for piece in choice.delta.tool_calls or []:
                if piece.index == len(calls):
                    calls.append([piece.function.name, ""])
                calls[piece.index][1] += piece.function.arguments or ""
    (reason,) = reasons
    return content, calls, reason


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", CHOICES, ids=["auto", "none", "required", "named"])
async def test_calls_are_delivered_or_not_and_the_reason_says_which(choice: Any, stream: bool) -> None:
    called = ["get_time", '{"zone": "UTC"}']
    cut_off = ["get_time", '{"zone": "']
    async with gateway_stack(obedient()) as s:
        ask = {"tool_choice": choice, "stream": stream}
        made = await answer(s, messages=say(DONE), **ask)
        prose = await answer(s, messages=say(PROSE), **ask)
        truncated = await answer(s, messages=say(DONE), max_tokens=CUT, **ask)
        assert prose == (PROSE, [], "stop")
        if choice == "none":  # a call is text, since no tool was offered
            assert (made, truncated) == ((DONE, [], "stop"), (DONE[:CUT], [], "length"))
        else:
            assert (made, truncated) == (("", [called], "tool_calls"), ("", [cut_off], "length"))
        forced = choice not in ("auto", "none")
        assert [submit.sampling.HasField("constraint") for submit in s.engine.submits] == [forced] * 3


CALLED = ["get_time", '{"zone": "UTC"}']


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", [CHOICES[0], *CHOICES[2:]], ids=["auto", "required", "named"])
async def test_a_call_that_a_stop_string_cuts_is_not_told_as_a_whole_one(choice: Any, stream: bool) -> None:
    async with gateway_stack(obedient()) as s:
        ask = {"messages": say(f"{DONE}\n{DONE}"), "tool_choice": choice, "stream": stream}
        assert await answer(s, stop="TC", **ask) == ("", [["get_time", '{"zone": "U']], "stop")
        assert await answer(s, stop=' {"zone', **ask) == ("", [["get_time", ""]], "stop")
        assert await answer(s, stop="<tool", **ask) == ("", [], "stop")
        by_id = {"extra_body": {"stop_token_ids": [ord("U")]}}
        assert await answer(s, **by_id, **ask) == ("", [["get_time", '{"zone": "']], "stop")
        for behind in ("}\n</", "\n</tool_call>\n", "</tool"):  # from the last brace on the arguments are whole
            assert await answer(s, stop=behind, **ask) == ("", [CALLED], "tool_calls")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", CHOICES[2:], ids=["required", "named"])
async def test_what_begins_a_call_that_must_come_is_no_content(choice: Any, stream: bool) -> None:
    async with gateway_stack(obedient()) as s:
        ask = {"messages": say(DONE), "tool_choice": choice, "stream": stream}
        for tokens in (1, DONE.index("call>"), DONE.index("get"), DONE.index('", "arg')):
            assert await answer(s, max_tokens=tokens, **ask) == ("", [], "length")
        for stop in ("tool", '{"na', "get_time"):
            for include in (False, True):
                shown = {"extra_body": {"include_stop_str_in_output": include}}
                assert await answer(s, stop=stop, **shown, **ask) == ("", [], "stop")
        body = {"model": MODEL, "tools": [TIME], "messages": say(DONE), "tool_choice": choice, "max_tokens": 18}
        (cut,) = (await s.http.post("/v1/chat/completions", json=body)).json()["choices"]
        assert cut["message"] == {"role": "assistant", "content": None, "refusal": None}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_that_is_named_is_called_once(stream: bool) -> None:
    two = f"{DONE}\n{DONE}"
    async with gateway_stack(obedient()) as s:
        for parallel in (None, True, False):
            ask = {"messages": say(two), "stream": stream} | (
                {} if parallel is None else {"parallel_tool_calls": parallel}
            )
            assert await answer(s, tool_choice=CHOICES[3], **ask) == ("", [CALLED], "tool_calls")
            calls = [CALLED] if parallel is False else [CALLED, CALLED]
            assert await answer(s, tool_choice="required", **ask) == ("", calls, "tool_calls")
        grammars = [Constraint("lark", submit.sampling.constraint.lark) for submit in s.engine.submits]
    for named, required in zip(grammars[::2], grammars[1::2], strict=True):
        assert accepts(named, DONE)
        assert not accepts(named, two)
        assert accepts(required, DONE)
    assert [accepts(required, two) for required in grammars[1::2]] == [True, True, False]
