"""The oracle is transformers' own rendering of the same templates."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import FailedPrecondition, InvalidArgument
from services.gateway.chat import ChatTemplate, Conversation
from services.gateway.limits import TextLimits
from services.gateway.messages import Message, read_messages
from services.gateway.tools import Tool
from tests.gateway.toys import CHATML, THINKING

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA2 = """{{ bos_token }}{% for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- '[INST] ' + message['content'].strip() + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] + eos_token }}
    {%- endif %}
{%- endfor %}"""
QWEN = """{%- if documents %}
    {{- 'docs: ' + documents | tojson }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" %}{%- set ns.last = index %}{%- break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>assistant\\n' + message.content }}
        {%- for call in message.tool_calls %}
            {{- '<tool_call>' + (call.function | tojson(indent=2)) + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<tool_response>\\n' + (message.content if message.content is string else '') + '\\n</tool_response>\\n' }}
    {%- else %}
        {%- if message.reasoning_content is defined and loop.index0 > ns.last %}
            {{- '<think>' + message.reasoning_content + '</think>' }}
        {%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""
PARTS = """{% for message in messages %}{{ message['role'] }}:{% for line in message['content'] %}
{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %};{% endfor %}"""
TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "  hello <world> & co  "},
    {"role": "assistant", "content": "hi", "reasoning_content": "they greet"},
    {"role": "user", "content": "naïve 🔥?"},
]
CALLS: list[dict[str, Any]] = [
    *TALK,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"é": [1]}}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "result"},
    {"role": "assistant", "content": "so: ", "reasoning_content": "it worked"},
]


def ours(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    variables = options.pop("variables", {})
    return ChatTemplate(template, SPECIAL).render(Conversation(read_messages(messages), variables=variables, **options))


def reference(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template

    variables = options.pop("variables", {})
    if "add_generation_prompt" not in options:
        options["add_generation_prompt"] = not options.get("continue_final_message")
    tools = [tool.for_template() for tool in options.pop("tools", ())] or None
    others: dict[str, Any] = {**SPECIAL, **variables, **options}
    rendered, _ = render_jinja_template([messages], chat_template=template, tools=tools, **others)
    text: str = rendered[0]
    return text


@pytest.mark.parametrize("template", [CHATML, QWEN])
@pytest.mark.parametrize("messages", [TALK, CALLS])
@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}, {"variables": {"enable_thinking": False}}])
def test_equals_transformers(template: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> None:
    assert ours(template, messages, **options) == reference(template, messages, **options)


MISTRAL = """{{- bos_token }}
{%- if tools is not none %}{{- '[AVAILABLE_TOOLS]' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{{- '[INST]' + message.content + '[/INST]' }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}{{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{{- ', ' if not loop.last else ']' + eos_token }}
        {%- endfor %}
    {%- elif message.role == 'tool' %}
        {%- if not message.tool_call_id is defined or message.tool_call_id | length != 9 %}
            {{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}
        {%- endif %}
        {{- '[TOOL_RESULTS]' + message.content + message.tool_call_id + '[/TOOL_RESULTS]' }}
    {%- else %}{{- ' ' + message.content + eos_token }}
    {%- endif %}
{%- endfor %}"""


def called(first: str, second: str) -> list[dict[str, Any]]:
    """A turn with two calls of these ids, and their results."""
    functions = [{"name": "f", "arguments": {"x": number}} for number in range(2)]
    calls = [{"id": i, "type": "function", "function": f} for i, f in zip((first, second), functions, strict=True)]
    results = [{"role": "tool", "content": "r", "tool_call_id": call_id} for call_id in (second, first)]
    return [TALK[0], {"role": "assistant", "content": "", "tool_calls": calls}, *results]


@pytest.mark.parametrize("template", [MISTRAL, THINKING])
def test_tools_calls_and_results_equal_transformers(template: str) -> None:
    tools = (Tool("f", "does ü", {"type": "object", "properties": {"x": {"type": "integer"}}}), Tool("g"))
    talk = called("abcdef123", "abcdef124")
    assert ours(template, talk, tools=tools) == reference(template, talk, tools=tools)
    assert ours(template, talk) == reference(template, talk)


def test_ids_of_calls_are_short_where_the_template_wants_that() -> None:
    text = ours(MISTRAL, called("call_0123456789abcdef01234567", "call_0123456789abcdef01234568"))
    first, second = (part.split('"')[0] for part in text.split('"id": "')[1:])
    assert len(first) == len(second) == 9
    assert first != second
    assert text.endswith(f"[TOOL_RESULTS]r{second}[/TOOL_RESULTS][TOOL_RESULTS]r{first}[/TOOL_RESULTS]")
    with pytest.raises(InvalidArgument, match="length 9"):
        ours(MISTRAL, [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}])


def test_what_a_template_says_of_itself() -> None:
    template = ChatTemplate(THINKING)
    assert {"enable_thinking", "tools", "documents", "messages", "add_generation_prompt"} == template.names
    assert (template.takes_tools, template.shows_calls, template.takes_system) == (True, True, True)
    inner = "{% macro f(a) %}{{ a }}{{ deep }}{% endmacro %}{% set seen = seen or 1 %}{{ f(seen) }}{{ range(2) }}"
    assert ChatTemplate(inner).names == {"deep", "seen"}


def test_equals_transformers_with_documents_and_special_tokens() -> None:
    documents = [{"title": "<t>", "text": "x"}]
    assert ours(QWEN, TALK, documents=documents) == reference(QWEN, TALK, documents=documents)
    assert (
        ours(LLAMA2, TALK)
        == reference(LLAMA2, TALK)
        == "<s>[INST] hello <world> & co [/INST] hi</s>[INST] naïve 🔥? [/INST]"
    )


@pytest.mark.parametrize("template", [CHATML, QWEN])
@pytest.mark.parametrize("words", ["so: ", "so", "a {{ b }} c\n"])
def test_continues_inside_the_last_message(template: str, words: str) -> None:
    messages = [*TALK, {"role": "assistant", "content": words}]
    got = ours(template, messages, continue_final_message=True)
    assert got.endswith(words), "nothing of it is trimmed, whatever the template does"
    assert got.rstrip() == reference(template, messages, continue_final_message=True).rstrip()


def test_both_ways_to_end_a_prompt_are_refused() -> None:
    with pytest.raises(InvalidArgument) as caught:
        ours(CHATML, TALK, continue_final_message=True, add_generation_prompt=True)
    assert caught.value.field == "continue_final_message"


def test_a_message_that_is_not_shown_cant_be_continued() -> None:
    with pytest.raises(InvalidArgument, match="can't be continued"):
        ours("{% for m in messages %}{{ m.role }}{% endfor %}", TALK, continue_final_message=True)
    with pytest.raises(InvalidArgument, match="needs a last message"):
        ours(CHATML, [*TALK, {"role": "assistant", "content": ""}], continue_final_message=True)


def test_tool_results_in_parts_are_shown() -> None:
    result = {
        "role": "tool",
        "tool_call_id": "c1",
        "content": [{"type": "text", "text": "part one"}, {"type": "text", "text": "part two"}],
    }
    for template in (CHATML, QWEN):
        assert "part one\npart two" in ours(template, [*TALK, result])


@pytest.mark.parametrize("last", [CALLS[3], {**CALLS[3], "content": "so"}, {"role": "assistant", "content": ""}])
def test_a_message_with_calls_or_without_text_can_not_be_continued(last: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ours(QWEN, [*TALK, last], continue_final_message=True)
    assert caught.value.field == "continue_final_message"


def test_a_template_that_wants_parts_gets_them() -> None:
    assert ours(PARTS, TALK[2:]) == "user:naïve 🔥?;"


def test_empty_tool_calls_are_none() -> None:
    with_none = [*TALK, {"role": "assistant", "content": "x", "tool_calls": []}]
    assert ours(QWEN, with_none) == ours(QWEN, [*TALK, {"role": "assistant", "content": "x"}])


def test_reasoning_reaches_the_template() -> None:
    assert "<think>it worked</think>" in ours(QWEN, CALLS)


def test_roles_that_the_template_does_not_know() -> None:
    assert ours(CHATML, [{"role": "developer", "content": "x"}]).startswith("<|im_start|>system")
    with pytest.raises(InvalidArgument, match="knows no role") as caught:
        ours(CHATML, [{"role": "user", "content": "x"}, {"role": "robot", "content": "x"}])
    assert caught.value.field == "messages[1].role"
    assert ours("{{ 'robot' }}{{ messages[0].content }}", [{"role": "robot", "content": "x"}]) == "robotx"


def test_a_turn_of_the_old_role_function_is_shown_or_refused() -> None:
    turn = {"role": "function", "name": "f", "content": "x"}
    assert "function\nx" in ours(CHATML, [turn])
    users_only = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(InvalidArgument, match="knows no role 'function'"):
        ours(users_only, [*TALK, turn])


def test_a_name_reaches_the_template() -> None:
    source = "{% for m in messages %}{{ m.name }}: {{ m.content }};{% endfor %}"
    assert ours(source, [{"role": "user", "name": "ann", "content": "hi"}]) == "ann: hi;"


STRICT = """{%- if messages[0]['role'] == 'system' %}
    {{- messages[0]['content'] }}{%- set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {{- message['content'] }}
{%- endfor %}"""
SYSTEM = {"role": "system", "content": "a"}


@pytest.mark.parametrize(
    ("template", "messages"), [(STRICT, [SYSTEM, SYSTEM, TALK[0]]), (STRICT, [TALK[0]] * 2), (LLAMA2, [TALK[0]] * 2)]
)
def test_what_a_template_raises_is_the_requests_fault(template: str, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(InvalidArgument, match="must alternate") as caught:
        ours(template, messages)
    assert caught.value.field == "messages"


@pytest.mark.parametrize(
    "template",
    [
        LLAMA2,
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}",
        "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
    ],
)
@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_that_the_template_would_drop_or_refuse_is_refused_by_its_place(
    template: str, role: str
) -> None:
    with pytest.raises(InvalidArgument, match="takes no system message") as caught:
        ours(template, [{"role": role, "content": "x"}, TALK[0]])
    assert caught.value.field == "messages[0].role"
    assert ours(template, [TALK[0]])
    assert ours(STRICT, [SYSTEM, TALK[0]]).startswith("a")


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[0].content.nothing.more }}",
        "{{ messages[7].content + 1 }}",
        "{{ 1 / 0 }}",
        "{{ messages | tojson(indent='x', bad=1) }}",
        "{{ ''.__class__.__mro__ }}{{ messages.append(1) }}",
        "{{ 'a' * 10000000000 }}",
        "{{ 10 ** 10000000 }}",
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{{ strftime_now(5) }}",
    ],
)
def test_faults_inside_a_template_are_never_the_servers(source: str) -> None:
    template = ChatTemplate(source, SPECIAL)
    with pytest.raises(InvalidArgument, match="chat template"):
        template.render(Conversation((Message("user", "x"),)))


def test_steps_time_and_output_are_limited() -> None:
    talk = Conversation((Message("user", "x"),))
    loops = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidArgument, match="too long"):
        ChatTemplate(loops, limits=TextLimits(render_steps=10_000)).render(talk)
    with pytest.raises(InvalidArgument, match="too long"):
        ChatTemplate(loops, limits=TextLimits(render_s=0.0)).render(talk)
    text = "{% for i in range(999) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(InvalidArgument, match="too long"):
        ChatTemplate(text, limits=TextLimits(render_chars=500)).render(talk)
    assert ChatTemplate(text).render(talk) == "x" * 999


def test_a_broken_template_is_told_when_the_model_loads() -> None:
    with pytest.raises(FailedPrecondition, match="can't be read"):
        ChatTemplate("{% for %}")


def test_generation_marks_are_just_content() -> None:
    source = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    assert ours(source, TALK) == reference(source, TALK)


JSON = ["", " ", "{}", '{"a": [1]}', "5", "[1]", "null", '"x"']
CALL = st.fixed_dictionaries(
    {"function": st.fixed_dictionaries({"name": st.sampled_from(["f", "g"]), "arguments": st.sampled_from(JSON)})},
    optional={"id": st.sampled_from(["abcdef123", "call_1", ""]), "type": st.just("function")},
)
CONTENT = st.none() | st.sampled_from(["", "hi", "</think>so", "<think>"]) | st.just([{"type": "text", "text": "a"}])
NAME = {"name": st.just("ann")}
TURN = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user", "function"]), "content": CONTENT}, optional=NAME
    ),
    st.fixed_dictionaries(
        {"role": st.sampled_from(["assistant", "assistant", "robot"]), "content": CONTENT},
        optional={"tool_calls": st.lists(CALL, max_size=2), "reasoning_content": st.sampled_from(["", "hm"]), **NAME},
    ),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "content": CONTENT, "tool_call_id": st.sampled_from(["abcdef123", "x"])},
        optional=NAME,
    ),
)
TEMPLATES = [ChatTemplate(source, SPECIAL) for source in (CHATML, QWEN, THINKING, MISTRAL, STRICT, LLAMA2, PARTS)]


@settings(max_examples=100, deadline=None)
@given(
    turns=st.lists(TURN, min_size=1, max_size=5),
    tools=st.sampled_from([(), (Tool("f", None, {"type": "object"}),)]),
    going_on=st.booleans(),
    opening=st.none() | st.booleans(),
)
def test_any_conversation_is_rendered_or_refused(
    turns: list[dict[str, Any]], tools: tuple[Tool, ...], going_on: bool, opening: bool | None
) -> None:
    for template in TEMPLATES:
        text, field = "", "messages"
        try:
            text = template.render(Conversation(read_messages(turns), opening, going_on, tools=tools))
        except InvalidArgument as error:
            field = error.field or ""
        assert "\ue000" not in text
        assert field.startswith(("messages", "continue_final_message"))
