"""What the official client sees of the API, as checks that take a client, whatever stands between it and the engine.

The engine behind it must be `obedient()`: each choice says what stands between the last « and »
of its prompt, so that a check decides what the model answers.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from protos import engine_pb2
from tests.gateway.fake_engine import FakeEngine

MODEL = "bytes"
Check = Callable[[openai.AsyncOpenAI], Awaitable[None]]


def obedient(**knobs: Any) -> FakeEngine:
    """An engine whose model says what it is told to; "{choice}" in that becomes the choice's number."""

    def script(submit: engine_pb2.Submit, choice: int) -> list[int]:
        prompt = bytes(submit.prompt_id_i32le[::4]).decode(errors="replace")
        wanted = prompt.rpartition("«")[2].partition("»")[0]
        return list(wanted.replace("{choice}", str(choice)).encode())

    return FakeEngine(script=script, context=8192, **knobs)


def say(text: str) -> Any:
    """Messages, or an input, that make an obedient model say this."""
    return [{"role": "user", "content": f"«{text}»"}]


def call(name: str, **arguments: object) -> str:
    """A call as the byte model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Weather(BaseModel):
    """Weather at a place."""

    city: str
    unit: Literal["c", "f"]


class Point(BaseModel):
    """A point."""

    x: int
    y: int


WEATHER: Any = openai.pydantic_function_tool(Weather, name="get_weather")
TIME: Any = {
    "type": "function",
    "function": {"name": "get_time", "description": "The time.", "parameters": {"type": "object", "properties": {}}},
}
FLAT_WEATHER: Any = {"type": "function", **WEATHER["function"]}
CALLS = f"Let me look.\n{call('get_weather', city='Oslo 🌍', unit='c')}\n{call('get_time')}"


# Chat


async def chat(client: openai.AsyncOpenAI) -> None:
    """A whole answer with its usage, and one cut by length."""
    answer = await client.chat.completions.create(model=MODEL, messages=say("hello 🔥"))
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "hello 🔥", "stop")
    assert choice.message.tool_calls is None
    assert answer.object == "chat.completion"
    assert answer.model == MODEL
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("hello 🔥".encode()) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    short = await client.chat.completions.create(model=MODEL, messages=say("hello"), max_completion_tokens=3)
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("hel", "length")


async def chat_stream(client: openai.AsyncOpenAI) -> None:
    """The role first, then text, the reason, and the usage last, which only the last chunk has."""
    stream = await client.chat.completions.create(
        model=MODEL, messages=say("n{choice} 🔥"), n=2, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = [chunk async for chunk in stream]
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 2 * (len("n0 🔥".encode()) + 1)
    texts, reasons = {0: "", 1: ""}, {}
    for chunk in chunks:
        assert chunk.usage is None
        (choice,) = chunk.choices
        if choice.delta.role is not None:
            assert texts[choice.index] == ""
        texts[choice.index] += choice.delta.content or ""
        assert choice.index not in reasons
        if choice.finish_reason is not None:
            reasons[choice.index] = choice.finish_reason
    assert texts == {0: "n0 🔥", 1: "n1 🔥"}
    assert reasons == {0: "stop", 1: "stop"}


async def chat_stream_helper(client: openai.AsyncOpenAI) -> None:
    """The client's own accumulation gives the whole answer."""
    async with client.chat.completions.stream(model=MODEL, messages=say("hello 🔥"), logprobs=True) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "hello 🔥"
    assert {"content.delta", "content.done", "logprobs.content.delta"} <= set(kinds)
    whole = await client.chat.completions.create(model=MODEL, messages=say("hello 🔥"), logprobs=True)
    assert final.choices[0].logprobs is not None
    assert whole.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content == whole.choices[0].logprobs.content


async def chat_logprobs(client: openai.AsyncOpenAI) -> None:
    """An entry per token, whose bytes put together are the text."""
    answer = await client.chat.completions.create(
        model=MODEL, messages=say("é🔥"), logprobs=True, top_logprobs=3, max_tokens=6
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == "é🔥"
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert all(-9999.0 <= top.logprob <= 0.0 for entry in entries for top in entry.top_logprobs)


async def completions(client: openai.AsyncOpenAI) -> None:
    """Prompts times choices, numbered through, whole and streamed."""
    prompts = ["«a{choice}»", "«b{choice}»"]
    whole = await client.completions.create(model=MODEL, prompt=prompts, n=2)
    expected = {0: "a0", 1: "a1", 2: "b0", 3: "b1"}
    assert {choice.index: choice.text for choice in whole.choices} == expected
    texts = dict.fromkeys(expected, "")
    async for chunk in await client.completions.create(model=MODEL, prompt=prompts, n=2, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected


# Tools


async def tools(client: openai.AsyncOpenAI) -> None:
    """Calls beside text, calls alone, and no call where none may be made."""
    answer = await client.chat.completions.create(model=MODEL, messages=say(CALLS), tools=[WEATHER, TIME])
    (choice,) = answer.choices
    assert (choice.message.content, choice.finish_reason) == ("Let me look.", "tool_calls")
    first, second = choice.message.tool_calls or []
    assert first.type == "function"
    assert second.type == "function"
    assert (first.function.name, json.loads(first.function.arguments)) == (
        "get_weather",
        {"city": "Oslo 🌍", "unit": "c"},
    )
    assert (second.function.name, json.loads(second.function.arguments)) == ("get_time", {})
    assert first.id != second.id
    only = await client.chat.completions.create(model=MODEL, messages=say(call("get_time")), tools=[TIME])
    assert only.choices[0].message.content is None
    none = await client.chat.completions.create(model=MODEL, messages=say("no call"), tools=[TIME], tool_choice="none")
    assert (none.choices[0].message.content, none.choices[0].finish_reason) == ("no call", "stop")
    assert none.choices[0].message.tool_calls is None


async def tools_stream(client: openai.AsyncOpenAI) -> None:
    """Id, type and name come once per call, with a number that goes on; the pieces are the whole answer's calls."""
    stream = await client.chat.completions.create(
        model=MODEL, messages=say(CALLS), tools=[WEATHER, TIME], stream=True, logprobs=True
    )
    calls: list[list[str]] = []
    content, reason, entries = "", None, 0
    async for chunk in stream:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            entries += len((choice.logprobs.content or []) if choice.logprobs else [])
            for piece in choice.delta.tool_calls or []:
                assert piece.function is not None
                if piece.index == len(calls):
                    assert piece.type == "function"
                    calls.append([piece.id or "", piece.function.name or "", ""])
                else:
                    assert piece.index == len(calls) - 1
                    assert (piece.id, piece.type, piece.function.name) == (None, None, None)
                calls[piece.index][2] += piece.function.arguments or ""
            reason = choice.finish_reason or reason
    assert (content, reason) == ("Let me look.", "tool_calls")
    assert all(id.startswith("call_") for id, _, _ in calls)
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == [
        ("get_weather", {"city": "Oslo 🌍", "unit": "c"}),
        ("get_time", {}),
    ]
    assert entries == len(CALLS.encode()) + 1


async def tools_stream_helper(client: openai.AsyncOpenAI) -> None:
    """The client's own accumulation gives calls whose arguments fit the model class."""
    async with client.chat.completions.stream(model=MODEL, messages=say(CALLS), tools=[WEATHER, TIME]) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert kinds.count("tool_calls.function.arguments.done") == 2
    first, second = final.choices[0].message.tool_calls or []
    assert first.function.parsed_arguments == Weather(city="Oslo 🌍", unit="c")
    assert second.function.name == "get_time"
    assert final.choices[0].finish_reason == "tool_calls"


async def tools_history(client: openai.AsyncOpenAI) -> None:
    """An answer with calls goes back as it came, with the results."""
    first = await client.chat.completions.create(model=MODEL, messages=say(call("get_time")), tools=[TIME])
    message = first.choices[0].message
    (made,) = message.tool_calls or []
    history: Any = [
        *say(call("get_time")),
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": made.id, "content": "it is «noon»"},
    ]
    second = await client.chat.completions.create(model=MODEL, messages=history, tools=[TIME])
    assert second.choices[0].message.content == "noon"


async def parse(client: openai.AsyncOpenAI) -> None:
    """Answers and arguments as objects of model classes."""
    answer = await client.chat.completions.parse(model=MODEL, messages=say('{"x": 1, "y": -2}'), response_format=Point)
    assert answer.choices[0].message.parsed == Point(x=1, y=-2)
    called = await client.chat.completions.parse(
        model=MODEL, messages=say(call("get_weather", city="Oslo", unit="f")), tools=[WEATHER], tool_choice="required"
    )
    (made,) = called.choices[0].message.tool_calls or []
    assert made.function.parsed_arguments == Weather(city="Oslo", unit="f")


# Responses


async def responses(client: openai.AsyncOpenAI) -> None:
    """A whole response: text, what it was asked with, usage; one cut by length is incomplete."""
    answer = await client.responses.create(
        model=MODEL,
        input="«hello 🔥»",
        instructions="Be brief.",
        metadata={"a": "b"},
        top_logprobs=2,
        include=["message.output_text.logprobs"],
    )
    assert (answer.status, answer.output_text, answer.metadata) == ("completed", "hello 🔥", {"a": "b"})
    assert answer.instructions == "Be brief."
    (message,) = answer.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    entries = part.logprobs or []
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == "hello 🔥"
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert answer.usage is not None
    assert answer.usage.output_tokens == len("hello 🔥".encode()) + 1
    short = await client.responses.create(model=MODEL, input=say("hello"), max_output_tokens=3)
    assert (short.status, short.output_text) == ("incomplete", "hel")
    assert short.incomplete_details is not None
    assert short.incomplete_details.reason == "max_output_tokens"


async def responses_stream(client: openai.AsyncOpenAI) -> None:
    """The events in their order, numbered through; the client's own accumulation accepts them."""
    stream = await client.responses.create(model=MODEL, input=say("hey"), stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if event.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "hey"
    async with client.responses.stream(model=MODEL, input=say(CALLS), tools=[FLAT_WEATHER]) as helped:
        async for _ in helped:
            pass
        final = await helped.get_final_response()
    assert final.output_text == "Let me look."


async def responses_tools(client: openai.AsyncOpenAI) -> None:
    """Calls are items; they go back with their results as the history of the next request."""
    asked = say(call("get_weather", city="Oslo", unit="c"))
    first = await client.responses.create(model=MODEL, input=asked, tools=[FLAT_WEATHER])
    (made,) = first.output
    assert made.type == "function_call"
    assert (made.name, json.loads(made.arguments)) == ("get_weather", {"city": "Oslo", "unit": "c"})
    result: Any = {"type": "function_call_output", "call_id": made.call_id, "output": "«rain»"}
    history: Any = [*asked, *(item.model_dump(exclude_none=True) for item in first.output), result]
    second = await client.responses.create(model=MODEL, input=history, tools=[FLAT_WEATHER])
    assert second.output_text == "rain"


async def responses_parse(client: openai.AsyncOpenAI) -> None:
    """An answer as an object of a model class."""
    answer = await client.responses.parse(model=MODEL, input=say('{"x": 1, "y": -2}'), text_format=Point)
    assert answer.output_parsed == Point(x=1, y=-2)


# Errors and models


async def errors(client: openai.AsyncOpenAI) -> None:
    """Each refusal is the client's own type of it, and names the field at fault."""
    wrong: list[tuple[type[openai.APIStatusError], str, dict[str, Any]]] = [
        (openai.NotFoundError, "model", {"model": "nope"}),
        (openai.BadRequestError, "temperature", {"temperature": -1}),
        (openai.BadRequestError, "messages", {"messages": []}),
        (openai.BadRequestError, "nonsense", {"extra_body": {"nonsense": 1}}),
        (openai.BadRequestError, "store", {"store": True}),
        (openai.BadRequestError, "tools[0].function.name", {"tools": [{"type": "function", "function": {}}]}),
    ]
    for stream in (False, True):
        for kind, field, fields in wrong:
            with pytest.raises(kind) as caught:
                await client.chat.completions.create(
                    **{"model": MODEL, "messages": say("x"), "stream": stream, **fields}
                )
            assert caught.value.param == field, fields
            assert field in caught.value.message
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    assert refused.value.param == "previous_response_id"


async def models(client: openai.AsyncOpenAI) -> None:
    """The one there is, in the list and by name, and none of another name."""
    assert [model.id async for model in client.models.list()] == [MODEL]
    assert (await client.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("nope")


CHECKS: tuple[Check, ...] = (
    chat,
    chat_stream,
    chat_stream_helper,
    chat_logprobs,
    completions,
    tools,
    tools_stream,
    tools_stream_helper,
    tools_history,
    parse,
    responses,
    responses_stream,
    responses_tools,
    responses_parse,
    errors,
    models,
)
"""All checks; each stands alone, and any order will do."""
