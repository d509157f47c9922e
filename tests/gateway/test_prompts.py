from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidArgument
from services.gateway.asked import Asked
from services.gateway.fields import Api, Caller
from services.gateway.limits import DEFAULT_LIMITS
from services.gateway.messages import Message, ToolCall
from services.gateway.prompts import Prompts, TextSettings, cut
from services.gateway.text_files import read_files
from services.gateway.tokenize import TokenizerPool
from services.gateway.tools import Tool
from services.gateway.validate import ModelFacts
from tests.gateway import toys

FACTS = ModelFacts("toy", vocab_size=400, max_model_len=128, max_n=4)
HELLO = (Message("user", "the fox"),)
TOOL = Tool("f", None, {"type": "object"})
CHAT = Caller(Api.CHAT)
GRPC = Caller(Api.GRPC, "sampling.")


@pytest.fixture(scope="module")
def pool() -> TokenizerPool:
    return TokenizerPool(toys.tokenizer("byte_level").to_str().encode())


def prompts(pool: TokenizerPool, template: str = toys.CHATML, **settings: Any) -> Prompts:
    return Prompts(FACTS, pool, read_files(toys.files(template=template)), TextSettings(**settings))


@pytest.fixture
def thinking(pool: TokenizerPool) -> Prompts:
    return prompts(pool, toys.THINKING)


@given(ids=st.lists(st.integers(0, 9), max_size=8).map(tuple), limit=st.none() | st.integers(1, 10))
def test_cut(ids: tuple[int, ...], limit: int | None) -> None:
    left, right = cut(ids, limit, None), cut(ids, limit, "right")
    assert left == cut(ids, limit, "left")
    assert len(left) == len(right) == (len(ids) if limit is None else min(limit, len(ids)))
    assert ids[len(ids) - len(left) :] == left
    assert ids[: len(right)] == right


@pytest.mark.parametrize(
    ("asked", "api", "kept"),
    [
        (Asked(truncate_prompt_tokens=5), Api.COMPLETIONS, slice(-5, None)),
        (Asked(truncate_prompt_tokens=5, truncation_side="left"), Api.GRPC, slice(-5, None)),
        (Asked(truncate_prompt_tokens=5, truncation_side="right"), Api.COMPLETIONS, slice(5)),
        (Asked(truncate_prompt_tokens=-1), Api.GRPC, slice(-127, None)),
        (Asked(truncate_prompt_tokens=-1), Api.COMPLETIONS, slice(-112, None)),
        (Asked(truncate_prompt_tokens=-1, max_tokens=100), Api.COMPLETIONS, slice(-28, None)),
        (Asked(truncate_prompt_tokens=-1, max_tokens=10_000), Api.GRPC, slice(-1, None)),
        (Asked(truncate_prompt_tokens=-1, min_tokens=20), Api.GRPC, slice(-108, None)),
        (Asked(truncate_prompt_tokens=-1), Api.EMBEDDINGS, slice(-128, None)),
    ],
)
async def test_long_prompts_are_cut_where_asked(pool: TokenizerPool, asked: Asked, api: Api, kept: slice) -> None:
    text = "the quick brown fox " * 5000
    ids = await prompts(pool).ids(text, asked, Caller(api), "prompt")
    assert ids == toys.ids("byte_level", text)[kept]
    assert await prompts(pool).ids(list(range(300)), asked, Caller(api), "prompt") == tuple(range(300))[kept]


async def test_a_conversation_is_cut_as_well(pool: TokenizerPool) -> None:
    rendered = await prompts(pool).conversation(Asked(truncate_prompt_tokens=3), CHAT, HELLO)
    assert rendered.ids == toys.ids("byte_level", rendered.text)[-3:]


@pytest.mark.parametrize(
    ("asked", "caller", "field"),
    [
        (Asked(truncate_prompt_tokens=0), CHAT, "truncate_prompt_tokens"),
        (Asked(truncate_prompt_tokens=0), GRPC, "options.truncate_prompt_tokens"),
        (Asked(truncation_side="left"), CHAT, "truncation_side"),
        (Asked(documents="x"), CHAT, "documents"),
        (Asked(documents=["x"]), GRPC, "documents_json"),
        (Asked(documents=[{"a": 1}]), CHAT, "documents"),
        (
            Asked(chat_template_kwargs={"add_generation_prompt": True}),
            CHAT,
            "chat_template_kwargs.add_generation_prompt",
        ),
        (Asked(chat_template_kwargs={"enable_thinkin": 1}), GRPC, "chat_template_kwargs_json.enable_thinkin"),
        (Asked(chat_template_kwargs={"range": 1}), CHAT, "chat_template_kwargs.range"),
        (Asked(chat_template="x"), GRPC, "chat_template"),
        (Asked(reasoning_effort="low"), CHAT, "reasoning_effort"),
    ],
)
async def test_what_can_not_be_honoured_is_refused_by_name(
    pool: TokenizerPool, asked: Asked, caller: Caller, field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await prompts(pool).conversation(asked, caller, HELLO)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}:")


async def test_variables_documents_and_efforts_reach_the_template(thinking: Prompts) -> None:
    async def text(**asked: Any) -> str:
        return (await thinking.conversation(Asked(**asked), CHAT, HELLO)).text

    assert (await text()).endswith("assistant\n<think>\n")
    silent = await text(chat_template_kwargs={"enable_thinking": False})
    assert silent.endswith("</think>\n\n")
    assert await text(reasoning_effort="none") == silent
    assert await text(reasoning_effort="medium") == await text()
    assert '[{"a": 1}]' in await text(documents=[{"a": 1}])
    assert await text(documents=[]) == await text()
    for kwargs, effort in (({"enable_thinking": True}, "none"), ({"enable_thinking": False}, "medium")):
        with pytest.raises(InvalidArgument, match="contradicts") as caught:
            await text(chat_template_kwargs=kwargs, reasoning_effort=effort)
        assert caught.value.field == "reasoning_effort"


async def test_tools_are_shown_by_the_template_or_else_in_the_system_message(
    pool: TokenizerPool, thinking: Prompts
) -> None:
    shown = (await thinking.conversation(Asked(), CHAT, HELLO, [TOOL])).text
    assert '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}' in shown
    assert "<tools>" not in shown
    told = (await prompts(pool).conversation(Asked(truncate_prompt_tokens=9), CHAT, HELLO, [TOOL])).text
    assert told.startswith("<|im_start|>system\n# Tools")
    assert "<tools>\n" in told
    without = "{% for m in messages if m.role != 'system' %}{{ m.content }};{% endfor %}"
    told = (await prompts(pool, without).conversation(Asked(truncate_prompt_tokens=9), CHAT, HELLO, [TOOL])).text
    assert told.startswith("# Tools")
    assert told.endswith("the fox;")


async def test_calls_and_results_of_earlier_turns_are_always_shown(pool: TokenizerPool, thinking: Prompts) -> None:
    turns = (*HELLO, Message("assistant", "", (ToolCall("f", '{"a":1}'),)), Message("tool", "a result"))
    for made, role in ((thinking, "tool"), (prompts(pool), "user")):
        text = (await made.conversation(Asked(truncate_prompt_tokens=9), CHAT, turns)).text
        assert "<tool_call>\n{" in text
        assert '"arguments": {"a": 1}' in text
        assert text[: text.index("a result")].rsplit("<|im_start|>")[-1].startswith(role)


async def test_a_template_for_tools_is_used_where_there_are_some(pool: TokenizerPool) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools | length }}"}]
    config = {"chat_template": named}
    files = read_files({**toys.files(), "tokenizer_config.json": json.dumps(config).encode()})
    made = Prompts(FACTS, pool, files, TextSettings())
    assert (await made.conversation(Asked(), CHAT, HELLO)).text == "D"
    assert (await made.conversation(Asked(), CHAT, HELLO, [TOOL])).text == "T1"


async def test_a_clients_template(pool: TokenizerPool) -> None:
    made = prompts(pool, allow_chat_template=True)
    source = "{% for m in messages %}{{ m.content }}{% endfor %}</think>"
    first = await made.conversation(Asked(chat_template=source), CHAT, HELLO)
    assert first.text == "the fox</think>"
    assert first.talk.form.reasoning == ("<think>", "</think>"), "what answers look like follows the template"
    again = await made.conversation(Asked(chat_template=source), CHAT, HELLO)
    assert again.talk is first.talk, "compiled once"
    for number in range(40):
        await made.conversation(Asked(chat_template=f"{number}"), CHAT, HELLO)
    late = await made.conversation(Asked(chat_template=source), CHAT, HELLO)
    assert late.talk is not first.talk, "not kept for ever"


@pytest.mark.parametrize(
    "source",
    [
        "{% for %}",
        "{{ x",
        "{% for i in range(9) %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
        "x" * (DEFAULT_LIMITS.template_chars + 1),
        "{{ 'a' * 10000000000 }}",
        "{{ messages[0].content.nothing.more }}",
    ],
)
@pytest.mark.parametrize("caller", [CHAT, GRPC])
async def test_a_clients_broken_template_is_the_clients_fault(pool: TokenizerPool, source: str, caller: Caller) -> None:
    made = prompts(pool, allow_chat_template=True)
    with pytest.raises(InvalidArgument) as caught:
        await made.conversation(Asked(chat_template=source), caller, HELLO)
    assert caught.value.field in ("chat_template", "messages")
    assert len(caught.value.message) < 500
    assert (await made.conversation(Asked(), caller, HELLO)).ids
