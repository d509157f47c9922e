"""Reasoning before an answer. Every text is read whole and cut at every place."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.gateway.request import ReasoningOptions
from tests.gateway.parsers.answers import THINK, THINKING, Answer, parse_any_cut

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("options", "text", "answer"),
    [
        (THINKING, "weighing it</think>Answer.", Answer("Answer.", reasoning="weighing it")),
        (THINKING, "weighing it\n</think>\n\n Answer. ", Answer("Answer. ", reasoning="weighing it\n")),
        (THINKING, "<think>\nagain</think>A", Answer("A", reasoning="\nagain")),
        (THINKING, "never closed </thin", Answer("", reasoning="never closed </thin")),
        (THINKING, "a < b </ </think </think>c", Answer("c", reasoning="a < b </ </think ")),
        (THINKING, "</think>A", Answer("A")),
        (THINKING, " \n", Answer("", reasoning=" \n")),
        (THINKING, "", Answer()),
        (THINK, "<think>one</think>A<think>two</think>B", Answer("A<think>two</think>B", reasoning="one")),
        (THINK, "<think>one</think><think>two</think>B", Answer("<think>two</think>B", reasoning="one")),
        (THINK, "\n<think>one</think>", Answer("", reasoning="one")),
        (THINK, "<think>a<think>b</think>c</think>d", Answer("c</think>d", reasoning="a<think>b")),
        (THINK, "<think>", Answer()),
        (THINK, " <thin", Answer(" <thin")),
        (THINK, "<thinker>", Answer("<thinker>")),
        (THINK, "First. <think>no</think>", Answer("First. <think>no</think>")),
        (THINK, "no</think>A", Answer("no</think>A")),
        (replace(THINK, shown=False), "<think>one</think>\nA", Answer("A")),
        (replace(THINKING, shown=False), "never", Answer("")),
        (ReasoningOptions("[THINK]", "[/THINK]", inside=False), "[THINK]a[b][/THINK]c", Answer("c", reasoning="a[b]")),
    ],
)
def test_reasoning_and_answer(options: ReasoningOptions, text: str, answer: Answer) -> None:
    assert parse_any_cut(text, None, options) == answer
    assert parse_any_cut(text, "hermes", options) == answer, "a parser of calls changes nothing in text without any"


@pytest.mark.parametrize(
    ("options", "text", "answer"),
    [
        (THINK, f"<think>I call {CALL}</think>\n{CALL}", Answer("", (("f", "{}"),), f"I call {CALL}")),
        (THINK, f"<think>I call {CALL}", Answer("", reasoning=f"I call {CALL}")),
        (THINK, f"\n{CALL}", Answer("", (("f", "{}"),))),
        (THINK, f"<think></think>So.\n\n{CALL}", Answer("So.", (("f", "{}"),))),
        (THINKING, CALL, Answer("", reasoning=CALL)),
    ],
)
def test_calls_are_read_after_reasoning_only(options: ReasoningOptions, text: str, answer: Answer) -> None:
    assert parse_any_cut(text, "hermes", options) == answer


def test_bare_calls_after_reasoning() -> None:
    text = '<think>x</think>\n\n{"name": "f", "parameters": {}}'
    assert parse_any_cut(text, "llama3", THINK) == Answer("", (("f", "{}"),), "x")
