"""Calls between tags: whole, wrong and cut off. Every text is read whole and cut at every place."""

from __future__ import annotations

import pytest

from tests.gateway.parsers.answers import Answer, parse, parse_any_cut

F = '{"name": "f", "arguments": {"a": 1}}'
CALL = f"<tool_call>\n{F}\n</tool_call>"
CALLED = ("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("No call at all.\n", Answer("No call at all.\n")),
        ("  \n", Answer("  \n")),
        (CALL, Answer("", (CALLED,))),
        (f"\n\n{CALL}\n", Answer("", (CALLED,))),
        (f"I will look.\n\n{CALL}", Answer("I will look.", (CALLED,))),
        (f"{CALL}\n{CALL}", Answer("", (CALLED, CALLED))),
        (f"{CALL}{CALL}\n\n{CALL}", Answer("", (CALLED, CALLED, CALLED))),
        (f"{CALL}\nDone. \n", Answer("Done. \n", (CALLED,))),
        (f"One.{CALL} Two.\n{CALL}\nThree.", Answer("One.Two.Three.", (CALLED, CALLED))),
        ("a < b, <tool, <tool_call and <<tool_call", Answer("a < b, <tool, <tool_call and <<tool_call")),
        (f"a <tool_cal\n{CALL}", Answer("a <tool_cal", (CALLED,))),
        (f"<<{CALL}", Answer("<<", (CALLED,))),
    ],
)
def test_text_and_calls(text: str, answer: Answer) -> None:
    assert parse_any_cut(text, "hermes") == answer


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        # the tags are wrong
        (f"<tool_call>{F}", Answer("", (CALLED,))),
        (f"<tool_call>{F}\nDone.", Answer("Done.", (CALLED,))),
        (f"<tool_call>{F}\n<tool_call>{F}</tool_call>", Answer("", (CALLED, CALLED))),
        (f"<tool_call>{F}}}\n</tool_call>", Answer("", (CALLED,))),
        (f"<tool_call>{F}}} so", Answer("} so", (CALLED,))),
        (f"<tool_call>{F}</tool_cal>", Answer("</tool_cal>", (CALLED,))),
        # no call at all, so nothing of it is lost
        ("<tool_call></tool_call>", Answer("<tool_call></tool_call>")),
        ("<tool_call>\n\n</tool_call>", Answer("<tool_call>\n\n</tool_call>")),
        ("<tool_call>f(1)</tool_call>", Answer("<tool_call>f(1)</tool_call>")),
        ("<tool_call>{}</tool_call>", Answer("<tool_call>{}</tool_call>")),
        ('<tool_call>{"arguments": {"a": 1}}</tool_call>', Answer('<tool_call>{"arguments": {"a": 1}}</tool_call>')),
        ('<tool_call>{"name": 5}</tool_call>', Answer('<tool_call>{"name": 5}</tool_call>')),
        ('<tool_call>{"name": ""}</tool_call>', Answer('<tool_call>{"name": ""}</tool_call>')),
        ("so <tool_call> is a tag", Answer("so <tool_call> is a tag")),
        (f"<tool_call><tool_call>{F}</tool_call>", Answer("<tool_call>", (CALLED,))),
        (f"{CALL}\n<tool_call>x</tool_call>", Answer("<tool_call>x</tool_call>", (CALLED,))),
        # cut off
        ("<tool_cal", Answer("<tool_cal")),
        ("so\n<tool_call>\n", Answer("so\n<tool_call>\n")),
        ('<tool_call>{"name": "f', Answer('<tool_call>{"name": "f')),
        ('<tool_call>{"name": "f"', Answer("", (("f", ""),))),
        ('<tool_call>{"name": "f", "arguments": {"a": [1, "x', Answer("", (("f", '{"a": [1, "x'),))),
        ('<tool_call>{"arguments": {"a": 1}, "na', Answer('<tool_call>{"arguments": {"a": 1}, "na')),
        (f"<tool_call>{F}\n</tool_", Answer("", (CALLED,))),
        (f"<tool_call>{F}}}", Answer("", (CALLED,))),
    ],
)
def test_what_is_not_quite_a_call(text: str, answer: Answer) -> None:
    assert parse_any_cut(text, "hermes") == answer


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_the_answer_ends_after_one_call(size: int) -> None:
    text = f"So.\n{CALL}\n{CALL}\n{CALL} and more"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert parse(pieces, "hermes", parallel=False) == Answer("So.", (CALLED,))
    pieces = ["<tool_call>x</tool_call>", *pieces]
    assert parse(pieces, "hermes", parallel=False) == Answer("<tool_call>x</tool_call>So.", (CALLED,))
