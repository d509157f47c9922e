"""Every choice of tools, streamed and whole, over what a model may do about it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.client_checks import MODEL, TIME, call, obedient, say
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
