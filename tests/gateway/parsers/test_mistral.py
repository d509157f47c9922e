"""Calls after a marker, as an array and by name. Every text is read whole and cut at every place."""

from __future__ import annotations

import pytest

from tests.gateway.parsers.answers import Answer, parse, parse_any_cut

F = '{"name": "f", "arguments": {"a": 1}}'
CALLED = ("f", '{"a": 1}')


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (f"[TOOL_CALLS][{F}]", Answer("", (CALLED,))),
        (f"[TOOL_CALLS] [ {F} , {F} ]\n", Answer("", (CALLED, CALLED))),
        (f"I look. [TOOL_CALLS][{F}] Done", Answer("I look.Done", (CALLED,))),
        ('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abc123def"}]', Answer("", (CALLED,))),
        ('[TOOL_CALLS][{"id": "x", "arguments": "{\\"a\\": 1}", "name": "f"}]', Answer("", (CALLED,))),
        (f"[TOOL_CALLS][{F}, ", Answer(", ", (CALLED,))),
        (f"[TOOL_CALLS][{F}", Answer("", (CALLED,))),
        (f"[TOOL_CALLS][{F}, 5]", Answer(", 5]", (CALLED,))),
        (f"[TOOL_CALLS]{F}", Answer(f"[TOOL_CALLS]{F}")),
        ("[TOOL_CALLS][]", Answer("[TOOL_CALLS][]")),
        ("[TOOL_CALLS]", Answer("[TOOL_CALLS]")),
        ("[TOOL] and [TOOL_CALL] [[", Answer("[TOOL] and [TOOL_CALL] [[")),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}', Answer("", (CALLED,))),
        ('[TOOL_CALLS]f{"a": 1}', Answer("", (CALLED,))),
        ('[TOOL_CALLS] f [ARGS] {"a": 1}', Answer("", (CALLED,))),
        ('[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}', Answer("", (CALLED,))),
        ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f{"a": 1}\nx', Answer("x", (CALLED, CALLED))),
        ('[TOOL_CALLS]f[ARGS]{"a": "}[TOOL_CALLS]"}', Answer("", (("f", '{"a": "}[TOOL_CALLS]"}'),))),
        ('[TOOL_CALLS]f[ARGS]{"a": [1, {"b', Answer("", (("f", '{"a": [1, {"b'),))),
        ("[TOOL_CALLS]f[ARGS]", Answer("", (("f", ""),))),
        ("[TOOL_CALLS]f[ARGS]none", Answer("none", (("f", "{}"),))),
        ("[TOOL_CALLS]f", Answer("[TOOL_CALLS]f")),
        ("[TOOL_CALLS]f is called", Answer("[TOOL_CALLS]f is called")),
        ("[TOOL_CALLS]f[CALL_ID]x", Answer("[TOOL_CALLS]f[CALL_ID]x")),
    ],
)
def test_arrays_and_names(text: str, answer: Answer) -> None:
    assert parse_any_cut(text, "mistral") == answer
    assert parse_any_cut(text, "mistral_named") == answer, "both are read, whatever the template shows"


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    "text", [f"So.[TOOL_CALLS][{F}, {F}]", 'So.[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[ARGS]{"a": 1}']
)
def test_the_answer_ends_after_one_call(text: str, size: int) -> None:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    assert parse(pieces, "mistral", parallel=False) == Answer("So.", (CALLED,))
