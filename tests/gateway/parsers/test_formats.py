"""What chat templates tell, and that each format's grammar reads what its shape writes."""

from __future__ import annotations

import json

import pytest

from services.gateway.parsers.answer import AnswerParser
from services.gateway.parsers.formats import (
    TAGS,
    TOOL_FORMATS,
    detect_reasoning,
    detect_tools,
    markers,
    opens_reasoning,
    tool_format,
)
from tests.gateway.parsers.answers import Answer, parse_any_cut, tools

CALLS = (("f", '{"a": 1}'), ("get_weather", '{"city": "}\\"] [", "days": [1, {"x": null}]}'), ("f", "{}"))


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_what_the_shape_writes_is_read(name: str, count: int) -> None:
    written = tool_format(name).shape.write(CALLS[:count])
    assert parse_any_cut(written, name) == Answer("", CALLS[:count])


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_an_answer_with_one_call_ends_with_its_last_brace(name: str) -> None:
    """It does not wait for what the model would write next."""
    written = tool_format(name).shape.write(CALLS[:1])
    parser = AnswerParser(None, tools(name, parallel=False))
    end = written.rindex("}")
    parser.push(written[:end])
    assert not parser.ended
    parser.push(written[end])
    assert parser.ended
    assert parser.settled == parser.fed == end + 1


def test_shapes_are_what_models_are_trained_on() -> None:
    calls = (("f", '{"a": 1}'), ("g", "{}"))
    assert {name: form.shape.write(calls) for name, form in TOOL_FORMATS.items()} == {
        "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        "llama3": '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}',
        "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]',
        "mistral_named": '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}',
    }


def test_a_mark_begins_but_once_within_itself() -> None:
    """So that a search may go on behind a false start."""
    for tag in {*(tag for tags in TAGS.values() for tag in tags), *(m for name in TOOL_FORMATS for m in markers(name))}:
        assert tag.count(tag[0]) == 1


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ('{{ "<tool_call>\\n" ~ {"name": call.name, "arguments": call.arguments} | tojson }}', "hermes"),
        ('{{ "<tool_call>\\n<function=" ~ call.name ~ ">\\n<parameter=" }}', None),
        ('{{ "<tool_call>" ~ call.name ~ "\\n<arg_key>" }}', None),
        ('{{ "Within <tool_call></tool_call>: <tool_calls>[" ~ calls ~ "]</tool_calls>" }}', None),
        ("{{ '<TOOLCALL>[' ~ calls ~ ']</TOOLCALL>' ~ '<|start_header_id|>' }}", None),
        ("{{ '<|start_header_id|>ipython' }}{{ '{\"name\": \"' + call.name + '\", \"parameters\": ' }}", "llama3"),
        ("{% if builtin_tools %}{{ '<|python_tag|>' + call.name + '.call(' }}{% endif %}", "llama3"),
        ("{{ '<|start_header_id|>' + m.role + '<|end_header_id|>' + m.content }}", None),
        ("{{ '[TOOL_CALLS][' ~ calls ~ ']' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' ~ call.name ~ '[ARGS]' ~ call.arguments }}", "mistral_named"),
        ("{{ m.content }}", None),
    ],
)
def test_templates_tell_the_format(template: str, name: str | None) -> None:
    assert detect_tools(template) == name


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        ("{{ '<think>\\n' }}{% set content = content.split('</think>')[-1] %}", ("<think>", "</think>")),
        ("{{ '[THINK]' ~ thinking ~ '[/THINK]' }}", ("[THINK]", "[/THINK]")),
        ("{{ m.content }}", None),
        ("{{ 'think about <thinking>' }}", None),
    ],
)
def test_templates_tell_the_tags_of_reasoning(template: str, tags: tuple[str, str] | None) -> None:
    assert detect_reasoning(template) == tags


@pytest.mark.parametrize(
    ("prompt", "continued", "inside"),
    [
        ("<|im_start|>assistant\n<think>\n", "", True),
        ("<|im_start|>assistant\n<think>", "", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "", False),
        ("user: what does <think> do?\nassistant: ", "", False),
        ("user: hi\nassistant: <think>\nWell, so", "<think>\nWell, so", True),
        ("user: hi\nassistant: <think>a</think>So", "<think>a</think>So", False),
        ("user: hi\nassistant: So", "So", False),
    ],
)
def test_only_the_end_of_a_prompt_opens_reasoning(prompt: str, continued: str, inside: bool) -> None:
    assert opens_reasoning(prompt, ("<think>", "</think>"), continued) is inside


def test_arguments_stay_as_they_are_written() -> None:
    for _, arguments in CALLS:
        json.loads(arguments)
        text = tool_format("hermes").shape.write((("f", arguments),))
        assert parse_any_cut(text, "hermes").calls == (("f", arguments),)
