"""What ends an answer, through a whole gateway: the same text, reason and usage on every way in."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import pytest

from protos import common_pb2, engine_pb2, gateway_pb2
from tests.gateway.fake_engine import VOCAB, FakeEngine, until
from tests.gateway.stack import Stack, gateway_stack


class Ended(NamedTuple):
    """What a client has in the end."""

    text: str
    reason: str
    stop: str
    tokens: int


def says(text: str) -> FakeEngine:
    """An engine whose model says this, whatever it is asked; a token per byte, three in a step."""

    def script(submit: engine_pb2.Submit, choice: int) -> list[int]:
        del submit, choice
        return list(text.encode())

    return FakeEngine(script=script, per_step=3, context=8192)


async def over_rest(stack: Stack, prompt: str | list[int], include: bool, stream: bool) -> Ended:
    """A completion by REST."""
    body: dict[str, Any] = {"model": "bytes", "prompt": prompt, "max_tokens": 40, "stop": ["###"], "stream": stream}
    body |= {"include_stop_str_in_output": include}
    if not stream:
        answer = (await stack.http.post("/v1/completions", json=body)).json()
        (choice,) = answer["choices"]
        return Ended(
            choice["text"], choice["finish_reason"], choice["stop_reason"], answer["usage"]["completion_tokens"]
        )
    body["stream_options"] = {"include_usage": True}
    lines = (await stack.http.post("/v1/completions", json=body)).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    last = choices[-1]
    tokens = chunks[-1]["usage"]["completion_tokens"]
    return Ended("".join(choice["text"] for choice in choices), last["finish_reason"], last["stop_reason"], tokens)


async def over_grpc(stack: Stack, prompt: str | list[int], include: bool, stream: bool) -> Ended:
    """The same by gRPC."""
    request = gateway_pb2.GenerateRequest(
        sampling=gateway_pb2.SamplingOptions(max_tokens=40, stop=["###"], include_stop_str_in_output=include),
        options=gateway_pb2.RequestOptions(stream=stream),
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    messages = [message async for message in stack.stub.Generate(request)]
    last = messages[-1]
    reason = {common_pb2.FINISH_REASON_STOP_STRING: "stop"}[last.finish.reason]
    text = "".join(message.text for message in messages)
    return Ended(text, reason, last.finish.stop_string, last.usage.completion_tokens)


@pytest.mark.parametrize(("include", "text"), [(False, "one "), (True, "one ###")])
async def test_a_stop_string_ends_the_same_text_on_every_way_in(include: bool, text: str) -> None:
    """A prompt as text and as ids, whole and streamed, by REST and by gRPC."""
    async with gateway_stack(says("one ### two, three and more")) as stack:
        for ask in (over_rest, over_grpc):
            for prompt in ("hi", list(b"hi")):
                for stream in (False, True):
                    assert await ask(stack, prompt, include, stream) == Ended(text, "stop", "###", 7)
        await until(lambda: len(stack.engine.aborts) == 8)
        for abort in stack.engine.aborts:
            assert (abort.reason, abort.kept_tokens) == (common_pb2.FINISH_REASON_STOP_STRING, 7)


@pytest.mark.parametrize("wrong", [[VOCAB + 7], [-1]])
async def test_stop_ids_that_the_vocabulary_lacks_are_refused_and_nothing_else_is_hurt(wrong: list[int]) -> None:
    async with gateway_stack(says("fine")) as stack:
        body = {"model": "bytes", "prompt": "hi", "max_tokens": 4, "min_tokens": 1}
        refused = await stack.http.post("/v1/completions", json={**body, "stop_token_ids": wrong})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "stop_token_ids"
        assert stack.engine.submits == []
        answer = await stack.http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, "fine")


async def test_a_choice_that_may_call_once_ends_after_the_call() -> None:
    """The engine is told, with the tokens that count."""
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    messages = [{"role": "user", "content": "hi"}]
    async with gateway_stack(says(call + "\n" + call + "\n" + call)) as stack:
        body = {"model": "bytes", "messages": messages, "tools": [tool], "parallel_tool_calls": False}
        answer = (await stack.http.post("/v1/chat/completions", json=body)).json()
        (choice,) = answer["choices"]
        (made,) = choice["message"]["tool_calls"]
        assert (made["function"]["name"], made["function"]["arguments"]) == ("f", '{"a": 1}')
        assert choice["finish_reason"] == "tool_calls"
        kept = call.index("}}") + 2
        assert answer["usage"]["completion_tokens"] == kept
        await until(lambda: stack.engine.aborts)
        (abort,) = stack.engine.aborts
        assert (abort.reason, abort.kept_tokens) == (common_pb2.FINISH_REASON_STOP_STRING, kept)
