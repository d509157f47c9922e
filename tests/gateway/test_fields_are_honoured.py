"""No accepted field is ever ignored: each row of the table, by a value of its own, changes the job that is run.

What a row needs beside it to have an effect stands in CONTEXT. A row whose effect is not in the job stands in
ELSEWHERE, with the test that sees it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from protos.gateway_pb2 import RequestOptions, SamplingOptions
from services.gateway import embeddings
from services.gateway.fields import Api, accepted, read_fields
from services.gateway.messages import read_messages
from services.gateway.models import Model
from services.gateway.prompts import TextSettings
from services.gateway.rest.responses.items import read_input
from services.gateway.text import Envelope, ModelText
from services.gateway.wire import EngineInfo
from tests.gateway import toys
from tests.gateway.test_fields import GOOD

ENVELOPE = Envelope("made-here")
TALK = [{"role": "user", "content": "the fox"}]
OPEN = [*TALK, {"role": "assistant", "content": "jumps"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FLAT = {"type": "function", **TOOL["function"]}
LONG = "the lazy dog " * 9

BASE: Mapping[Api, dict[str, Any]] = {
    Api.CHAT: {"messages": TALK, "seed": 1},
    Api.COMPLETIONS: {"prompt": LONG, "seed": 1},
    Api.GRPC: {"seed": 1},
    Api.RESPONSES: {"input": LONG, "seed": 1},
    Api.TOKENIZE: {"messages": TALK},
    Api.EMBEDDINGS: {"input": LONG},
}
SAMPLES: dict[str, Any] = {
    "messages": TALK * 2, "prompt": "lazy", "input": "lazy", "seed": 7, "bad_words": ["fox"],
    "chat_template": "{{ messages[0].content }}", "chat_template_kwargs": {"enable_thinking": False},
    "documents": [{"a": 1}], "reasoning_effort": "none", "reasoning": {"effort": "none"}, "tools": [TOOL],
    "tool_choice": "none", "response_format": {"type": "json_object"}, "text": {"format": {"type": "json_object"}},
    "structured_outputs": {"regex": "a+"}, "constraint": {"regex": "a+"},
}  # fmt: skip
CONTEXT: dict[str, dict[str, Any]] = {
    "continue_final_message": {"messages": OPEN},
    "echo": {"messages": OPEN, "continue_final_message": True},
    "tool_choice": {"tools": [TOOL]},
    "parallel_tool_calls": {"tools": [TOOL]},
    "truncation_side": {"truncate_prompt_tokens": 2},
    "stream_options": {"stream": True},
    "stream_interval": {"stream": True},
    "include_stop_str_in_output": {"stop": "x"},
    "prompt_logprobs": {},
    "return_tokens_as_token_ids": {"logprobs": 3},
    "top_logprobs": {"logprobs": True, "include": ["message.output_text.logprobs"]},
}
ELSEWHERE = {
    "model": "chooses the model: test_rest, test_service",
    "return_token_strs": "beside the ids: test_rest",
    "media_io_kwargs": "what is made of media: test_media_requests",
    "mm_processor_kwargs": "the same",
    "encoding_format": "how vectors are written: test_embeddings",
}


@pytest.fixture(scope="module")
def text() -> Iterator[ModelText]:
    files = toys.files("marked", toys.THINKING, temperature=0.25)
    settings = TextSettings(allow_chat_template=True)
    model = asyncio.run(ModelText.load("toy", files, vocab_size=400, max_model_len=512, max_n=4, settings=settings))
    yield model
    model.close()


def model_of(text: ModelText) -> Model:
    info = EngineInfo(1, "e", "toy", "llama", 400, 512, "", "float32", ("embed",), 0, 4, {})
    return Model(info, text)


async def outcome(text: ModelText, api: Api, body: dict[str, Any]) -> object:
    """All that a request brings about."""
    match api:
        case Api.CHAT:
            return await text.chat(body, ENVELOPE)
        case Api.COMPLETIONS:
            return await text.completions(body, ENVELOPE)
        case Api.RESPONSES:
            asked = read_fields(body, Api.RESPONSES)
            return await text.respond(asked, read_input(asked.input, asked.instructions), ENVELOPE)
        case Api.GRPC:
            values = dict(body)
            messages = read_messages(values.pop("messages", TALK))
            return await text.converse(values, messages, ENVELOPE)
        case Api.TOKENIZE:
            return await text.tokenize_asked(read_fields(body, Api.TOKENIZE))
        case _:
            return await embeddings.read(model_of(text), read_fields(body, Api.EMBEDDINGS), ENVELOPE)


def rows() -> list[tuple[Api, str]]:
    return [(api, name) for api in BASE for name in accepted(api) if name not in ELSEWHERE]


def sample(api: Api, name: str) -> Any:
    if name == "logprobs":
        return True if api is Api.CHAT else 3
    if name == "add_special_tokens":
        return api is not Api.COMPLETIONS
    if name == "tools" and api is Api.RESPONSES:
        return [FLAT]
    return SAMPLES.get(name, GOOD[name])


def context(api: Api, name: str) -> dict[str, Any]:
    """What else is asked for, as far as the call takes it."""
    wanted = dict(CONTEXT.get(name, {}))
    if api is Api.RESPONSES and "tools" in wanted:
        wanted["tools"] = [FLAT]
    if api is Api.CHAT and "logprobs" in wanted:
        wanted["logprobs"] = True
    known = accepted(api).keys() | ({"messages"} if api is Api.GRPC else set())
    return {other: value for other, value in wanted.items() if other in known}


GENERATE = sorted(
    {field.name for message in (SamplingOptions, RequestOptions) for field in message.DESCRIPTOR.fields} | {"echo"}
)


@pytest.mark.parametrize("name", GENERATE)
async def test_what_a_prompt_over_grpc_may_say_changes_the_job_as_well(text: ModelText, name: str) -> None:
    beside = {"seed": 1, **(context(Api.GRPC, name) if name != "echo" else {})}
    value = False if name == "add_special_tokens" else sample(Api.GRPC, name)
    changed = await text.generate({**beside, name: value}, LONG, ENVELOPE)
    assert changed != await text.generate(beside, LONG, ENVELOPE)


@pytest.mark.parametrize(("api", "name"), rows())
async def test_a_field_that_is_accepted_changes_the_job(text: ModelText, api: Api, name: str) -> None:
    beside = {**BASE[api], **context(api, name)}
    if api is Api.TOKENIZE and name == "prompt":
        beside = {"prompt": "a fox"}
    changed = await outcome(text, api, {**beside, name: sample(api, name)})
    assert changed != await outcome(text, api, beside)
