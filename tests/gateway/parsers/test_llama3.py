"""Bare objects as calls. Every text is read whole and cut at every place."""

from __future__ import annotations

import pytest

from services.gateway.parsers.answer import AnswerParser
from tests.gateway.parsers.answers import Answer, parse, parse_any_cut, tools

F = '{"name": "f", "parameters": {"a": 1}}'
CALLED = ("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (F, Answer("", (CALLED,))),
        (f"\n {F}\n", Answer("", (CALLED,))),
        ('{"type": "function", "name": "f", "parameters": {"a": 1}}', Answer("", (CALLED,))),
        ('{"name": "f", "arguments": {"a": 1}}', Answer("", (CALLED,))),
        ('{"parameters": {"a": 1}, "name": "f"}', Answer("", (CALLED,))),
        (f"{F}; {F}", Answer("", (CALLED, CALLED))),
        (f"{F};{F}\n{F} ;\n{F}", Answer("", (CALLED,) * 4)),
        (f"{F}; and so", Answer("; and so", (CALLED,))),
        (f"{F}\nDone.", Answer("Done.", (CALLED,))),
        (f"{F}; {{", Answer("; {", (CALLED,))),
        (f"{F}; " + '{"name": "other"} x', Answer('; {"name": "other"} x', (CALLED,))),
        # after the tag, anywhere and whatever the name
        (f"<|python_tag|>{F}", Answer("", (CALLED,))),
        (f"Well.\n<|python_tag|>\n{F}; {F}", Answer("Well.", (CALLED, CALLED))),
        ('<|python_tag|>{"name": "other", "parameters": {}}', Answer("", (("other", "{}"),))),
        (f"{F}<|python_tag|>{F}", Answer("", (CALLED, CALLED))),
        ('<|python_tag|>brave_search.call(query="{}")', Answer('<|python_tag|>brave_search.call(query="{}")')),
        ("<|python_tag|>", Answer("<|python_tag|>")),
        # text
        (f"The call is {F}", Answer(f"The call is {F}")),
        ('{"name": "other", "parameters": {}}', Answer('{"name": "other", "parameters": {}}')),
        ('{"name": "Ada", "age": 36}', Answer('{"name": "Ada", "age": 36}')),
        ('{"title": "f", "name": "f"}', Answer('{"title": "f", "name": "f"}')),
        ("{ braces }", Answer("{ braces }")),
        (" \n", Answer(" \n")),
        ('\n{"name": "f', Answer('\n{"name": "f')),
        ('{"name": "f", "parameters": {"a": "', Answer("", (("f", '{"a": "'),))),
    ],
)
def test_objects_and_text(text: str, answer: Answer) -> None:
    assert parse_any_cut(text, "llama3") == answer


def test_an_object_that_is_no_call_is_told_as_soon_as_that_is_clear() -> None:
    """A JSON answer streams although tools are offered."""
    parser = AnswerParser(None, tools("llama3"))
    parser.push('{"title"')
    assert (list(parser.events), parser.settled) == ([], 0)
    parser.push(': "a long')
    assert "".join(event.text for event in parser.events) == '{"title": "a long'
    assert parser.settled == parser.fed


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
def test_the_answer_ends_after_one_call(size: int) -> None:
    text = f"{F}; {F} and more"
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert parse(pieces, "llama3", parallel=False) == Answer("", (CALLED,))
