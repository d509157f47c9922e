from __future__ import annotations

from typing import Any

import pytest

from services.common.errors import InvalidArgument
from services.gateway.answers import AnswerForm, effort_variables, read_effort
from services.gateway.asked import Asked
from services.gateway.chat import ChatTemplate
from services.gateway.fields import Api, Caller
from tests.gateway import toys

LLAMA3 = (
    "{% if tools %}{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' }}{{ m.content }}"
    '{% for c in m.tool_calls %}{{ \'{"name": "\' + c.function.name + \'", "parameters": \' }}'
    "{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
OTHER = "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "tool_parser", "reasoning_parser", "tools", "reasoning"),
    [
        (toys.THINKING, "auto", "auto", "hermes", ("<think>", "</think>")),
        (LLAMA3, "auto", "auto", "llama3", None),
        (OTHER, "auto", "auto", None, None),
        (toys.CHATML, "auto", "auto", "hermes", None),
        (toys.THINKING, "none", "none", None, None),
        (OTHER, "mistral", "bracket_think", "mistral", ("[THINK]", "[/THINK]")),
        (toys.CHATML, "none", "think", None, ("<think>", "</think>")),
        (toys.CHATML, "llama3", "auto", None, None),
        (toys.CHATML, "hermes", "auto", "hermes", None),
    ],
)
def test_by_template_and_settings(
    source: str, tool_parser: str, reasoning_parser: str, tools: str | None, reasoning: tuple[str, str] | None
) -> None:
    form = AnswerForm.of(ChatTemplate(source), tool_parser, reasoning_parser)
    assert (form.tool_format, form.reasoning) == (tools, reasoning)


def test_marks_that_are_special_tokens_are_kept() -> None:
    form = AnswerForm("hermes", ("<think>", "</think>"))
    marked, plain = toys.vocabulary("marked"), toys.vocabulary("byte_level")
    ids = [toys.tokenizer("marked").token_to_id(mark) for mark in toys.MARKS]
    assert form.kept_ids(marked, tools=True) == tuple(ids)
    assert form.kept_ids(marked, tools=False) == tuple(ids[:2])
    assert form.kept_ids(plain, tools=True) == ()
    assert AnswerForm(None, None).kept_ids(marked, tools=True) == ()


@pytest.mark.parametrize(
    ("effort", "names", "reasons", "variables"),
    [
        (None, {"reasoning_effort"}, True, {}),
        ("high", {"reasoning_effort"}, True, {"reasoning_effort": "high"}),
        ("none", {"reasoning_effort"}, True, {"reasoning_effort": "none"}),
        (
            "none",
            {"reasoning_effort", "enable_thinking"},
            True,
            {"reasoning_effort": "none", "enable_thinking": False},
        ),
        ("low", {"reasoning_effort", "enable_thinking"}, True, {"reasoning_effort": "low"}),
        ("none", {"enable_thinking"}, True, {"enable_thinking": False}),
        ("medium", {"enable_thinking"}, True, {"enable_thinking": True}),
        ("none", {"thinking"}, True, {"thinking": False}),
        ("none", set(), False, {}),
    ],
)
def test_efforts_become_variables(
    effort: str | None, names: set[str], reasons: bool, variables: dict[str, Any]
) -> None:
    assert effort_variables(effort, "reasoning_effort", names, reasons=reasons) == variables


@pytest.mark.parametrize(
    ("effort", "names", "reasons"),
    [
        ("high", set(), False),
        ("high", set(), True),
        ("none", set(), True),
        ("medium", set(), False),
        ("high", {"enable_thinking"}, True),
        ("minimal", {"thinking"}, True),
    ],
)
def test_efforts_that_the_template_can_not_be_told_are_refused(effort: str, names: set[str], reasons: bool) -> None:
    with pytest.raises(InvalidArgument, match="effort") as caught:
        effort_variables(effort, "reasoning_effort", names, reasons=reasons)
    assert caught.value.field == "reasoning_effort"


def test_where_an_effort_stands() -> None:
    chat, grpc, responses = Caller(Api.CHAT), Caller(Api.GRPC, "sampling."), Caller(Api.RESPONSES)
    assert read_effort(Asked(reasoning_effort="low"), chat) == ("low", "reasoning_effort")
    assert read_effort(Asked(reasoning_effort="low"), grpc) == ("low", "reasoning_effort")
    for reasoning in (None, {}, {"effort": None, "summary": None}):
        assert read_effort(Asked(reasoning=reasoning), responses)[0] is None
    assert read_effort(Asked(reasoning={"effort": "high"}), responses) == ("high", "reasoning.effort")


@pytest.mark.parametrize(
    ("reasoning", "field"),
    [
        ("high", "reasoning"),
        ({"effort": "much"}, "reasoning.effort"),
        ({"effort": 1}, "reasoning.effort"),
        ({"effort": "low", "summary": "auto"}, "reasoning.summary"),
        ({"efort": "low"}, "reasoning.efort"),
    ],
)
def test_bad_reasoning_of_responses_is_named(reasoning: object, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_effort(Asked(reasoning=reasoning), Caller(Api.RESPONSES))
    assert caught.value.field == field
