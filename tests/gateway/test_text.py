"""Bodies in, jobs out, over a toy model; and the demo model's tokenizer and template against transformers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.common.errors import InvalidArgument
from services.gateway.fields import Api, read_fields
from services.gateway.messages import Message
from services.gateway.prompts import TextSettings
from services.gateway.request import GenerateSpec, ReasoningOptions, ResponseOptions, TextOptions, ToolOptions
from services.gateway.text import Envelope, Job, ModelText
from tests.gateway import toys

HELLO = [{"role": "user", "content": "the fox 🔥"}]
ENVELOPE = Envelope("made-here", traceparent="00-aa-bb-01", deadline_ms=500)


@pytest.fixture
async def text() -> AsyncIterator[ModelText]:
    files = toys.files(temperature=0.5, eos_token_id=[1, 0, 9999])
    model = await ModelText.load("toy", files, vocab_size=400, max_model_len=64, max_n=4)
    yield model
    model.close()


async def test_facts_come_from_the_files(text: ModelText) -> None:
    assert text.facts.eos_token_ids == (1, 0), "ids past the embedding table can't be sampled"
    assert text.facts.sampling_defaults == {"temperature": 0.5}


async def test_a_chat(text: ModelText) -> None:
    body = {"messages": HELLO, "stop": "x", "seed": 5, "n": 2, "stream": True, "logprobs": True, "user": "u"}
    job = await text.chat(body, ENVELOPE)
    rendered = "<|im_start|>user\nthe fox 🔥<|im_end|>\n<|im_start|>assistant\n"
    ids = toys.ids("byte_level", rendered)
    assert job.spec == GenerateSpec(
        "made-here",
        "toy",
        ids,
        job.spec.sampling,
        TextOptions(("x",)),
        traceparent="00-aa-bb-01",
        deadline_ms=500,
        labels={"user": "u"},
    )
    sampling = job.spec.sampling
    assert (sampling.seed, sampling.n, sampling.temperature, sampling.logprobs) == (5, 2, 0.5, 0)
    assert sampling.max_tokens == 64 - len(ids)
    assert job.response == ResponseOptions(stream=True, top_logprobs=0)
    assert await text.detokenize(ids) == rendered


async def test_what_goes_with_a_request(text: ModelText) -> None:
    body = {"messages": HELLO, "request_id": "mine", "priority": -3, "cache_salt": "s", "ignore_eos": True}
    spec = (await text.chat(body, ENVELOPE)).spec
    assert (spec.request_id, spec.priority, spec.cache_salt, spec.sampling.eos_token_ids) == ("mine", -3, "s", ())


async def test_completions_have_a_job_per_prompt(text: ModelText) -> None:
    jobs = await text.completions({"prompt": ["a fox", [5, 1, 6]], "echo": True, "logprobs": 1}, ENVELOPE)
    assert [job.spec.prompt_ids for job in jobs] == [toys.ids("byte_level", "a fox"), (5, 1, 6)]
    assert [job.echo for job in jobs] == ["a fox", toys.tokenizer("byte_level").decode([5, 6])]
    assert [job.spec.sampling.prompt_logprobs for job in jobs] == [1, 1]
    assert all(job.spec.sampling.max_tokens == 16 for job in jobs)


async def test_bad_words_are_banned_at_the_start_and_after_a_space(text: ModelText) -> None:
    job = await text.generate({"bad_words": ["fox", "jumps"]}, "a", ENVELOPE)
    banned = set(job.spec.sampling.banned_sequences)
    assert {toys.ids("byte_level", "jumps")} <= banned
    for ids in banned:
        assert toys.tokenizer("byte_level").decode(list(ids)).strip() in {"fox", "jumps"}


async def test_grpc_prompts_and_conversations(text: ModelText) -> None:
    job = await text.generate({"max_tokens": 3, "echo": True}, [5, 6], ENVELOPE)
    assert (job.spec.prompt_ids, job.spec.sampling.max_tokens) == ((5, 6), 3)
    chat = await text.converse({"max_tokens": 3}, [Message("user", "the fox 🔥")], ENVELOPE)
    assert chat.spec.prompt_ids == (await text.chat({"messages": HELLO}, ENVELOPE)).spec.prompt_ids
    with pytest.raises(InvalidArgument, match=r"sampling\.top_p"):
        await text.generate({"top_p": 0.0}, [5], ENVELOPE, prefix="sampling.")


async def test_tokenize_and_detokenize(text: ModelText) -> None:
    assert await text.tokenize("a fox") == toys.ids("byte_level", "a fox")
    asked = read_fields({"add_generation_prompt": False}, Api.TOKENIZE)
    ids = await text.tokenize_messages([Message("user", "hi")], asked)
    assert await text.detokenize(ids) == "<|im_start|>user\nhi<|im_end|>\n"
    with pytest.raises(InvalidArgument, match="400") as caught:
        await text.detokenize([400])
    assert caught.value.field == "tokens"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "messages"),
        ({"messages": [{"role": "user", "content": "the " * 100}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 100_000}]}, "messages"),
        ({"messages": HELLO, "temprature": 1}, "temprature"),
        ({"messages": HELLO, "temperature": float("nan")}, "temperature"),
        ({"messages": HELLO, "stop_token_ids": [407]}, "stop_token_ids"),
        ({"messages": HELLO, "tools": [{"type": "function"}]}, "tools[0].function"),
        ({"messages": HELLO, "documents": "x"}, "documents"),
        ({"messages": HELLO, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"messages": HELLO, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
        ({"messages": HELLO, "stream_options": {"include_usage": True}}, "stream_options"),
        (
            {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
    ],
)
async def test_bad_chats_name_their_field_and_the_next_one_works(
    text: ModelText, body: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await text.chat(body, ENVELOPE)
    assert caught.value.field == field
    assert await text.chat({"messages": HELLO}, ENVELOPE)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("", "prompt"),
        ([""], "prompt[0]"),
        (["a", "", "b"], "prompt[1]"),
        ([[5], [5, 400]], "prompt[1]"),
        ([], "prompt"),
        ([[]], "prompt[0]"),
        ([400], "prompt"),
        ([-1], "prompt"),
        (None, "prompt"),
        ("the fox " * 60, "prompt"),
        ([*["a"] * 7, "the fox " * 60], "prompt[7]"),
    ],
)
async def test_bad_prompts_are_named_by_their_place(text: ModelText, prompt: object, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        await text.completions({"prompt": prompt}, ENVELOPE)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}:")


async def test_a_model_without_a_chat_template() -> None:
    files = {"tokenizer.json": toys.tokenizer("llama2").to_str().encode()}
    model = await ModelText.load("bare", files, vocab_size=400, max_model_len=64, max_n=4)
    with pytest.raises(InvalidArgument, match="no chat template"):
        await model.chat({"messages": HELLO}, ENVELOPE)
    model.close()


async def test_the_demo_model_as_transformers_reads_it(demo_gguf: Path, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    from services.worker.gguf_file import GgufFile
    from services.worker.text_files import files_of_gguf

    files = files_of_gguf(GgufFile(demo_gguf))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = await ModelText.load("demo", files, vocab_size=49152, max_model_len=8192, max_n=4)
    assert text.facts.eos_token_ids == (2,)
    talk = [
        {"role": "user", "content": "In 1984, 🔥 żółw cost $3.50?\n"},
        {"role": "assistant", "content": "Yes."},
        HELLO[0],
    ]
    job = await text.chat({"messages": talk}, ENVELOPE)
    expected = oracle.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
    assert list(job.spec.prompt_ids) == expected
    assert await text.detokenize(job.spec.prompt_ids) == oracle.decode(expected)
    assert json.loads(files["config.json"])["vocab_size"] == 49152 == len(text.vocabulary)
    text.close()


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}


@pytest.fixture
async def thinker() -> AsyncIterator[ModelText]:
    files = toys.files("marked", toys.THINKING)
    model = await ModelText.load("toy", files, vocab_size=400, max_model_len=512, max_n=4)
    yield model
    model.close()


async def test_answers_are_read_as_the_template_tells(thinker: ModelText) -> None:
    job = await thinker.chat({"messages": HELLO, "tools": [TOOL], "parallel_tool_calls": False}, ENVELOPE)
    marks = tuple(toys.tokenizer("marked").token_to_id(mark) for mark in toys.MARKS)
    assert job.spec.text == TextOptions(
        kept_ids=marks,
        reasoning=ReasoningOptions("<think>", "</think>", inside=True),
        tools=ToolOptions("hermes", ("f",), parallel=False),
    )
    hidden = await thinker.chat(
        {"messages": HELLO, "include_reasoning": False, "chat_template_kwargs": {"enable_thinking": False}}, ENVELOPE
    )
    assert hidden.spec.text == TextOptions(
        kept_ids=marks[:2], reasoning=ReasoningOptions("<think>", "</think>", inside=False, shown=False)
    )
    plain = await thinker.completions({"prompt": "<think>"}, ENVELOPE)
    assert plain[0].spec.text == TextOptions(), "only conversations have a form"


async def test_no_tool_is_shown_or_read_where_none_may_be_called(thinker: ModelText) -> None:
    without = await thinker.chat({"messages": HELLO, "seed": 1}, ENVELOPE)
    body = {"messages": HELLO, "seed": 1, "tools": [TOOL], "tool_choice": "none"}
    assert await thinker.chat(body, ENVELOPE) == without
    assert await thinker.chat({**body, "tools": [], "tool_choice": None}, ENVELOPE) == without


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
async def test_a_call_that_must_be_made_is_forced_by_a_grammar(thinker: ModelText, choice: object) -> None:
    forced = (await thinker.chat({"messages": HELLO, "tools": [TOOL], "tool_choice": choice}, ENVELOPE)).spec
    assert forced.sampling.constraint is not None
    assert forced.sampling.constraint.kind == "lark"
    free = {**TOOL, "function": {"name": "f"}}
    assert (await thinker.chat({"messages": HELLO, "tools": [free]}, ENVELOPE)).spec.sampling.constraint is None


def _without_place(job: Job) -> Job:
    """The job without what says how its client spells the constraint, also as what forbids most tokens."""
    sampling = job.spec.sampling
    assert sampling.constraint is not None
    sampling = replace(sampling, constraint=replace(sampling.constraint, place=""))
    assert job.spec.forbids == job.spec.sampling.constraint.place
    return replace(job, spec=replace(job.spec, sampling=sampling, forbids=None))


async def test_responses_have_the_same_job_as_a_chat(thinker: ModelText) -> None:
    flat = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    said = {"name": "s", "schema": schema}
    asked = read_fields(
        {
            "tools": [flat], "tool_choice": "auto", "max_output_tokens": 9, "seed": 1, "top_logprobs": 2,
            "include": ["message.output_text.logprobs"], "text": {"format": {"type": "json_schema", **said}},
            "reasoning": {"effort": "none"},
        },
        Api.RESPONSES,
    )  # fmt: skip
    chat = {
        "messages": HELLO, "tools": [TOOL], "tool_choice": "auto", "max_tokens": 9, "seed": 1, "logprobs": True,
        "top_logprobs": 2, "response_format": {"type": "json_schema", "json_schema": said}, "reasoning_effort": "none",
    }  # fmt: skip
    job = await thinker.respond(asked, [Message("user", str(HELLO[0]["content"]))], ENVELOPE)
    other = await thinker.chat(chat, ENVELOPE)
    assert job.spec.sampling.constraint is not None
    assert job.spec.sampling.constraint.place.startswith("text.format")
    assert _without_place(job) == _without_place(other)


async def test_a_message_that_is_continued_may_be_echoed(text: ModelText) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "jumps over"}]
    body = {"messages": messages, "continue_final_message": True, "logprobs": True}
    shown = await text.chat({**body, "echo": True}, ENVELOPE)
    assert (shown.echo, shown.spec.sampling.prompt_logprobs) == ("jumps over", None)
    hidden = await text.chat({**body, "echo": False}, ENVELOPE)
    assert hidden.echo == ""
    assert (await text.detokenize(hidden.spec.prompt_ids)).endswith("<|im_start|>assistant\njumps over")
    with pytest.raises(InvalidArgument, match="needs continue_final_message") as caught:
        await text.chat({"messages": messages, "echo": True}, ENVELOPE)
    assert caught.value.field == "echo"


async def test_reasoning_in_the_message_that_is_continued_goes_on(thinker: ModelText) -> None:
    for content, inside in (("<think>hm", True), ("<think>hm</think>so", False), ("so", False)):
        body = {"messages": [*HELLO, {"role": "assistant", "content": content}], "continue_final_message": True}
        reasoning = (await thinker.chat(body, ENVELOPE)).spec.text.reasoning
        assert reasoning is not None
        assert reasoning.inside == inside


async def test_the_echo_of_a_prompt_that_was_cut_is_what_is_left(text: ModelText) -> None:
    body = {"prompt": "the quick brown fox", "echo": True, "truncate_prompt_tokens": 2}
    (job,) = await text.completions(body, ENVELOPE)
    assert job.echo == await text.detokenize(job.spec.prompt_ids)
    assert len(job.spec.prompt_ids) == 2


async def test_labels_go_with_the_request(text: ModelText) -> None:
    body = {"messages": HELLO, "user": "u", "prompt_cache_key": "k", "metadata": {"a": "b"}, "safety_identifier": "s"}
    assert (await text.chat(body, ENVELOPE)).spec.labels == {
        "user": "u", "prompt_cache_key": "k", "metadata.a": "b", "safety_identifier": "s",
    }  # fmt: skip


async def test_inputs_of_vectors_may_fill_the_context_and_are_cut_where_asked(text: ModelText) -> None:
    async def inputs(value: object, **more: object) -> list[tuple[int, ...]]:
        return await text.inputs(read_fields({"input": value, **more}, Api.EMBEDDINGS))

    assert await inputs(["a fox", [5, 6]]) == [toys.ids("byte_level", "a fox"), (5, 6)]
    assert len((await inputs([[5] * 64]))[0]) == 64
    assert len((await inputs("the fox " * 99, truncate_prompt_tokens=-1))[0]) == 64
    for value, field in ((["a", [5] * 65], "input[1]"), ("", "input"), (["a", ""], "input[1]"), ([[400]], "input[0]")):
        with pytest.raises(InvalidArgument) as caught:
            await inputs(value)
        assert caught.value.field == field


async def test_what_tokenize_takes(text: ModelText) -> None:
    async def ids(**body: object) -> tuple[int, ...]:
        return await text.tokenize_asked(read_fields(body, Api.TOKENIZE))

    assert await ids(prompt="a fox") == toys.ids("byte_level", "a fox")
    assert await ids(messages=HELLO) == (await text.chat({"messages": HELLO}, ENVELOPE)).spec.prompt_ids
    for body, field in (
        ({}, "prompt"),
        ({"prompt": "x", "messages": HELLO}, "prompt"),
        ({"prompt": ["x"]}, "prompt"),
        ({"prompt": "x", "tools": []}, "tools"),
        ({"messages": HELLO, "tools": [5]}, "tools[0]"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            await ids(**body)
        assert caught.value.field == field


async def test_tools_of_a_model_whose_way_is_not_known_are_refused() -> None:
    for template, settings in (("{{ tools }}{{ messages[0].content }}", None), (toys.CHATML, TextSettings("none"))):
        model = await ModelText.load(
            "toy", toys.files(template=template), vocab_size=400, max_model_len=256, max_n=4, settings=settings
        )
        with pytest.raises(InvalidArgument, match="is not known") as caught:
            await model.chat({"messages": HELLO, "tools": [TOOL], "truncate_prompt_tokens": 9}, ENVELOPE)
        assert caught.value.field == "tools"
        assert await model.chat({"messages": HELLO, "tools": [TOOL], "tool_choice": "none"}, ENVELOPE)
        model.close()


async def test_what_a_template_does_not_take_is_named_as_the_call_spells_it() -> None:
    template = "{{ raise_exception('no') if messages[0].content == 'bad' else messages[0].content }}"
    model = await ModelText.load("toy", toys.files(template=template), vocab_size=400, max_model_len=64, max_n=4)
    try:
        with pytest.raises(InvalidArgument, match=r"^input: the model's chat template does not take them") as caught:
            await model.respond(read_fields({"input": "bad"}, Api.RESPONSES), [Message("user", "bad")], ENVELOPE)
        assert caught.value.field == "input"
        with pytest.raises(InvalidArgument, match=r"^messages: the model's chat template") as caught:
            await model.chat({"messages": [{"role": "user", "content": "bad"}]}, ENVELOPE)
        assert caught.value.field == "messages"
    finally:
        model.close()
