"""/v1/responses: histories of items in; items, whole and as events, out."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from protos import common_pb2, engine_pb2
from services.common.errors import InvalidArgument
from services.gateway.messages import Message, ToolCall
from services.gateway.pipeline import ChoicePipeline
from services.gateway.request import (
    ChoiceTokens,
    Delta,
    FinishReason,
    ReasoningOptions,
    TextOptions,
    TokenLogprob,
    ToolOptions,
)
from services.gateway.rest.responses.items import read_input
from services.gateway.rest.responses.output import Events, Output
from services.gateway.rest.shapes import ChatLogprobs
from tests.gateway import toys
from tests.gateway.client_checks import CALLS, FLAT_WEATHER, call, obedient, say
from tests.gateway.fake_engine import FakeEngine, until
from tests.gateway.stack import Stack, gateway_stack

# Items in


def test_a_text_is_a_message_of_the_user() -> None:
    assert read_input("hi") == (Message("user", "hi"),)
    assert read_input("hi", "be brief") == (Message("system", "be brief"), Message("user", "hi"))


def test_what_a_model_answered_is_one_turn_again() -> None:
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "id": "msg_1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
        },
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "wait", "arguments": '{"s": 1}', "status": "completed"},
        {"type": "function_call_output", "call_id": "c2", "output": "waited"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "seen"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}], "encrypted_content": None},
        {"role": "assistant", "content": "Done."},
        {"role": "developer", "content": "Go on."},
    ]
    calls = (ToolCall("look", "{}", "c1"), ToolCall("wait", '{"s": 1}', "c2"))
    assert read_input(history) == (
        Message("user", "a\nb"),
        Message("assistant", "I look.", calls, reasoning="hm"),
        Message("tool", "waited", tool_call_id="c2", name="wait"),
        Message("tool", "seen", tool_call_id="c1", name="look"),
        Message("assistant", "Done.", reasoning="so"),
        Message("developer", "Go on."),
    )


def test_turns_of_the_assistant_that_somebody_wrote_stay_apart() -> None:
    assistant = {"role": "assistant", "content": "x"}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "r"}]}
    made = {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}
    assert read_input([assistant, assistant]) == (Message("assistant", "x"), Message("assistant", "x"))
    assert read_input([assistant, thought]) == (Message("assistant", "x"), Message("assistant", "", reasoning="r"))
    assert read_input([made, assistant]) == (Message("assistant", "x", (ToolCall("f", "", "c"),)),)


USER = {"role": "user", "content": "x"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
WRONG: list[tuple[object, str]] = [
    (None, "input"),
    ([], "input"),
    (5, "input"),
    ("\ud800", "input"),
    ([5], "input[0]"),
    ([{"type": "item_reference", "id": "x"}], "input[0]"),
    ([{"type": {}}], "input[0]"),
    ([{"content": "x"}], "input[0].role"),
    ([{"role": "tool", "content": "x"}], "input[0].role"),
    ([{"role": ["user"], "content": "x"}], "input[0].role"),
    ([{"role": "user"}], "input[0].content"),
    ([{"role": "user", "content": 5}], "input[0].content"),
    ([USER, {"role": "user", "content": [{"type": "input_audio", "data": "x"}]}], "input[1].content[0]"),
    ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text"),
    ([{"role": "user", "content": [{"type": "input_text", "text": "x", "extra": 1}]}], "input[0].content[0].extra"),
    ([{"role": "user", "content": "x", "extra": 1}], "input[0].extra"),
    ([{"role": "assistant", "content": "x", "phase": "commentary"}], "input[0].phase"),
    ([{**CALL, "name": ""}], "input[0].name"),
    ([{**CALL, "arguments": "{"}], "input[0].arguments"),
    ([{**CALL, "arguments": {}}], "input[0].arguments"),
    ([{**CALL, "arguments": '{"a": 1, "a": 2}'}], "input[0].arguments.a"),
    ([{"role": "user", "content": [{"type": "output_text", "text": "x"}]}], "input[0].content[0].type"),
    ([{"role": "system", "content": [{"type": "refusal", "refusal": "x"}]}], "input[0].content[0].type"),
    ([{"role": "assistant", "content": [{"type": "input_text", "text": "x"}]}], "input[0].content[0].type"),
    ([CALL, CALL], "input[1].call_id"),
    ([{"type": "function_call_output", "call_id": "c", "output": "x"}], "input[0].call_id"),
    ([CALL, {"type": "function_call_output", "call_id": "c"}], "input[1].output"),
    ([{"type": "reasoning", "summary": [], "encrypted_content": "x"}], "input[0].encrypted_content"),
    ([{"type": "reasoning", "summary": 0}], "input[0].summary"),
    ([{"type": "reasoning", "summary": False, "content": "x"}], "input[0].summary"),
]


@pytest.mark.parametrize(("value", "field"), WRONG, ids=[f"{i}:{field}" for i, (_, field) in enumerate(WRONG)])
def test_a_bad_item_is_named(value: object, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_input(value)
    assert caught.value.field == field


# Items out

OPTIONS = TextOptions(
    reasoning=ReasoningOptions("<think>", "</think>", inside=True), tools=ToolOptions("hermes", ("look", "wait"))
)
ANSWERS = (
    "hm 🔥</think>\n\nI see 🔥.\n" + call("look", a=1) + "\n" + call("wait"),
    "</think>" + call("look"),
    "hm</think>one 🔥 " + call("look", a="🔥") + " two\n" + call("wait") + "three 🔥 < " + call("look") + " \n 🔥",
    "</think>" + call("look") + " 🔥" + call("wait")[:-12] + call("look") + "\n\n",
    "no end of it",
    "hm</think>naïve 日本",
    "",
)


def deltas_of(text: str, cuts: Sequence[int], takes: Sequence[bool], finish: FinishReason) -> list[Delta]:
    """What the pipeline gives for a text whose tokens come in pieces, taken after some of them."""
    ends = (1,) if finish in (FinishReason.EOS, FinishReason.STOP_ID) else ()  # comes with the finish
    ids = toys.ids("byte_level", text) + ends
    pipeline = ChoicePipeline(0, toys.vocabulary("byte_level"), OPTIONS, needs_tokens=True)
    bounds = [0, *sorted(cut % (len(ids) + 1 - len(ends)) for cut in cuts), len(ids)]
    deltas = []
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        last = i == len(bounds) - 2
        positions = tuple((TokenLogprob(token_id, -1.0, 1),) for token_id in ids[start:end])
        pipeline.push(ChoiceTokens(0, start, ids[start:end], finish if last else FinishReason.NONE, positions))
        if (last or takes[i % len(takes)]) and (delta := pipeline.take()) is not None:
            deltas.append(delta)
    return deltas


def without_ids(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in item.items() if key != "call_id"} for item in items]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ANSWERS),
    st.one_of(st.none(), st.integers(0, 200)),
    st.lists(st.integers(0, 200), max_size=30),
    st.lists(st.booleans(), min_size=1, max_size=8),
    st.sampled_from((FinishReason.LENGTH, FinishReason.STOP_STRING, FinishReason.EOS, FinishReason.ABORT)),
)
def test_however_an_answer_is_cut_its_items_are_the_same(
    text: str, length: int | None, cuts: list[int], takes: list[bool], finish: FinishReason
) -> None:
    """In any pieces, taken at any time, and wherever it ends; each with its text, its tokens and its status."""
    text = text[:length]
    vocabulary = toys.vocabulary("byte_level")

    def items(deltas: Sequence[Delta]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        output = Output("x", Events(), ChatLogprobs(vocabulary, 0, True))
        told = b"".join(output.push(delta) for delta in deltas)
        return without_ids(output.done), events_of(told.decode())

    whole, _ = items(deltas_of(text, (), (False,), finish))
    cut = deltas_of(text, cuts, takes, finish)
    streamed, events = items(cut)
    assert streamed == whole
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["id"] for item in added] == [item["id"] for item in done] == [item["id"] for item in whole]
    assert without_ids(done) == whole
    pieces = dict.fromkeys((item["id"] for item in whole), "")
    for event in events:
        if event["type"].endswith(".delta"):
            pieces[event["item_id"]] += event["delta"]
    for item in whole:
        text_of = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert pieces[item["id"]] == text_of
        if item["type"] == "message":
            entries = item["content"][0]["logprobs"]
            assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text_of
            assert all(entry["bytes"] for entry in entries)
    assert all(delta.text == "".join(delta.texts) for delta in cut)
    once = deltas_of(text, (), (False,), finish)
    assert sum(delta.reasoning_tokens for delta in cut) == sum(delta.reasoning_tokens for delta in once)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 200), max_size=30))
def test_text_after_a_call_is_lost_nowhere(cuts: list[int]) -> None:
    """It is a message of its own, in its place."""
    text = f"</think>one {call('look')} two {call('wait')} three"
    for pieces in (cuts, ()):
        output = Output("x", Events(), None)
        for delta in deltas_of(text, pieces, (True,), FinishReason.STOP_STRING):
            output.push(delta)
        items = [item.get("name") or item["content"][0]["text"] for item in output.done]
        assert items == ["one", "look", "two", "wait", "three"]


WAIT = call("wait", seconds=10)
CUT: list[tuple[str, FinishReason, list[tuple[str, str]]]] = [
    ("hm", FinishReason.LENGTH, [("reasoning", "incomplete")]),
    ("hm", FinishReason.EOS, [("reasoning", "completed")]),
    ("hm</think>so", FinishReason.LENGTH, [("reasoning", "completed"), ("message", "incomplete")]),
    ("</think>so", FinishReason.ABORT, [("message", "incomplete")]),
    ("</think>so", FinishReason.STOP_STRING, [("message", "completed")]),
    # A call is complete when its arguments are, whatever ended the answer.
    *(
        (f"</think>{WAIT[:length]}", reason, [("function_call", status)])
        for length, status in ((40, "incomplete"), (-16, "incomplete"), (-13, "completed"), (None, "completed"))
        for reason in (FinishReason.LENGTH, FinishReason.STOP_STRING, FinishReason.STOP_ID, FinishReason.EOS)
    ),
    (
        f"</think>so {WAIT}\n{WAIT[:50]}",
        FinishReason.LENGTH,
        [("message", "completed"), ("function_call", "completed"), ("function_call", "incomplete")],
    ),
    (f"</think>{WAIT}so", FinishReason.LENGTH, [("function_call", "completed"), ("message", "incomplete")]),
]


@pytest.mark.parametrize(("text", "finish", "items"), CUT)
def test_what_is_cut_is_incomplete_and_nothing_else(
    text: str, finish: FinishReason, items: list[tuple[str, str]]
) -> None:
    for pieces in ((), range(200)):
        output = Output("x", Events(), None)
        for delta in deltas_of(text, pieces, (True,), finish):
            output.push(delta)
        assert [(item["type"], item["status"]) for item in output.done] == items


def test_tokens_before_the_answer_are_counted() -> None:
    for text, reasoning in (("hm 🔥</think>so", "hm 🔥</think>"), ("no end", "no end"), ("</think>so", "</think>")):
        (delta,) = deltas_of(text, (), (False,), FinishReason.STOP_STRING)
        ids = toys.ids("byte_level", reasoning)
        assert delta.token_ids[: len(ids)] == ids
        assert delta.reasoning_tokens == len(ids)


# The whole gateway


EVENT: TypeAdapter[ResponseStreamEvent] = TypeAdapter(ResponseStreamEvent)
"""What the official client takes for an event. It reads any; here each must be one by all its types."""


def unknown(model: object, place: str) -> set[str]:
    """Fields that the official client has no name for."""
    if isinstance(model, list):
        return {name for entry in model for name in unknown(entry, place)}
    if not isinstance(model, BaseModel):
        return set()
    found = {f"{place}.{name}" for name in model.model_extra or ()}
    return found.union(*(unknown(value, f"{place}.{name}") for name, value in model))


def events_of(body: str) -> list[dict[str, Any]]:
    events = []
    for block in body.split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
        EVENT.validate_python(event, strict=True)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def stream(s: Stack, **body: Any) -> list[dict[str, Any]]:
    answer = await s.http.post("/v1/responses", json={"stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events_of(answer.text)


async def test_calls_as_events_and_whole() -> None:
    body = {"input": say(CALLS), "tools": [FLAT_WEATHER], "include": ["message.output_text.logprobs"]}
    async with gateway_stack(obedient()) as s:
        whole = (await s.http.post("/v1/responses", json=body)).json()
        events = await stream(s, **body)
    final = events[-1]["response"]
    assert events[-1]["type"] == "response.completed"
    assert without_ids([{**item, "id": ""} for item in final["output"]]) == without_ids(
        [{**item, "id": ""} for item in whole["output"]]
    )
    assert [item["type"] for item in final["output"]] == ["message", "function_call", "function_call"]
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert [kind for kind, _ in itertools.groupby(kinds)] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    entries = [entry for event in events for entry in event.get("logprobs", ()) if event["type"].endswith(".delta")]
    assert "".join(entry["token"] for entry in entries) == "Let me look."
    assert final["output"][0]["content"][0]["logprobs"] == entries
    assert final["tools"] == [FLAT_WEATHER]
    assert events[0]["response"]["usage"] is None
    assert final["usage"]["output_tokens"] == len(CALLS.encode()) + 1


async def test_reasoning_is_an_item_of_its_own() -> None:
    text = f"<think>hm</think>so {call('get_weather', city='Oslo', unit='c')}"
    body = {"input": say(text), "tools": [FLAT_WEATHER], "include": ["message.output_text.logprobs"]}
    async with gateway_stack(obedient(), reasoning_parser="think") as s:
        events = await stream(s, **body)
        final = events[-1]["response"]
        assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call"]
        assert final["output"][0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
        (part,) = final["output"][1]["content"]
        assert part["text"] == "so"
        assert "".join(entry["token"] for entry in part["logprobs"]) == "so"
        assert final["usage"]["output_tokens_details"] == {"reasoning_tokens": len("<think>hm</think>")}
        told = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
        assert "".join(told) == "hm"
        (made,) = [item for item in final["output"] if item["type"] == "function_call"]
        result = {"type": "function_call_output", "call_id": made["call_id"], "output": "«rain»"}
        history = [*say(text), *final["output"], result]
        again = (await s.http.post("/v1/responses", json={**body, "input": history})).json()
        assert again["output"][0]["content"][0]["text"] == "rain"


async def test_a_response_that_runs_out_of_tokens_is_incomplete_in_its_last_item_only() -> None:
    text = call("get_weather", city="Oslo", unit="c")
    body = {"input": say(text), "tools": [FLAT_WEATHER], "max_output_tokens": 60}
    async with gateway_stack(obedient()) as s:
        events = await stream(s, **body)
        final = events[-1]["response"]
        assert events[-1]["type"] == "response.incomplete"
        assert (final["status"], final["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert [(item["type"], item["status"]) for item in final["output"]] == [("function_call", "incomplete")]
        assert final["max_output_tokens"] == 60
        whole = (await s.http.post("/v1/responses", json=body)).json()
        assert whole["status"] == "incomplete"
        assert whole["output"][0]["arguments"] == final["output"][0]["arguments"]


@pytest.mark.parametrize("end", ["completed", "incomplete"])
async def test_the_official_client_has_a_name_for_all_of_an_event(end: str) -> None:
    text = f"<think>hm</think>so {call('get_weather', city='Oslo', unit='c')} then {call('get_weather', city='Rome')}"
    tool = {"tools": [FLAT_WEATHER], "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    length = len(text) - 20 if end == "incomplete" else None
    body = {"input": say(text), "max_output_tokens": length, "metadata": {"a": "b"}, "user": "u", **tool}
    async with gateway_stack(obedient(), reasoning_parser="think") as s:
        events = await stream(s, **body)
        whole = (await s.http.post("/v1/responses", json=body)).json()
        options: Any = {"tools": [FLAT_WEATHER], "max_output_tokens": length or openai.NOT_GIVEN}
        async with s.openai.responses.stream(model="bytes", input=say(text), **options) as helped:
            assert [event.type async for event in helped][-1] == f"response.{end}"
    assert events[-1]["type"] == f"response.{end}"
    beyond = unknown(Response.model_validate(whole, strict=True), "response")
    for event in events:
        model = EVENT.validate_python(event, strict=True)
        assert model.to_dict(mode="json") == event
        beyond |= unknown(model, event["type"])
    # OpenAI's own answers have these, and its client's types do not.
    assert {name for name in beyond if not name.endswith("response.store")} == {
        "response.function_call_arguments.done.name",
        "response.output_text.delta.logprobs.bytes",
        "response.output_text.delta.logprobs.top_logprobs.bytes",
        "response.output_text.done.logprobs.bytes",
        "response.output_text.done.logprobs.top_logprobs.bytes",
    }


async def test_a_whole_response_has_the_output_of_a_streamed_one() -> None:
    """Also where text comes after a call, and wherever the tokens run out."""
    text = f"so {call('get_weather', city='Oslo', unit='c')} then 🔥 {call('get_weather', city='Rome', unit='c')} end"
    body = {"input": say(text), "tools": [FLAT_WEATHER], "include": ["message.output_text.logprobs"]}
    ends: set[tuple[str, str]] = set()
    async with gateway_stack(obedient()) as s:
        for length in (None, 2, 60, 85, 92, 100, 140, 170):
            asked = body if length is None else {**body, "max_output_tokens": length}
            whole = (await s.http.post("/v1/responses", json=asked)).json()
            last = (await stream(s, **asked))[-1]
            final = last["response"]
            assert last["type"] == f"response.{whole['status']}"
            assert whole["incomplete_details"] == (None if length is None else {"reason": "max_output_tokens"})
            same = ("status", "incomplete_details", "usage", "error", "max_output_tokens")
            assert {key: final[key] for key in same} == {key: whole[key] for key in same}
            for item in (*whole["output"], *final["output"]):
                item["id"] = item["id"].replace(whole["id"][5:], "").replace(final["id"][5:], "")
            assert without_ids(final["output"]) == without_ids(whole["output"])
            assert all(item["status"] == "completed" for item in whole["output"][:-1])
            ends.add((whole["output"][-1]["type"], whole["output"][-1]["status"]))
            if length is None:
                kinds = [item["type"] for item in whole["output"]]
                assert kinds == ["message", "function_call", "message", "function_call", "message"]
    assert len(ends) == 4


async def test_an_answer_without_a_word_is_an_empty_message() -> None:
    async with gateway_stack(obedient()) as s:
        whole = (await s.http.post("/v1/responses", json={"input": say("")})).json()
        assert whole["output"][0]["content"][0]["text"] == ""
        assert whole["status"] == "completed"
        events = await stream(s, input=say(""))
        assert events[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]


async def test_a_failure_in_mid_stream_is_a_failed_response() -> None:
    engine = FakeEngine(held=True)
    async with gateway_stack(engine) as s:

        async def break_it() -> None:
            await until(lambda: engine.live)
            engine.step()
            await asyncio.sleep(0.05)
            failure = common_pb2.Failure(code=13, message="the row's logits are not finite", error_id="abc")
            engine.send(
                engine_pb2.AttachResponse(failed=engine_pb2.Failed(handle=next(iter(engine.live)), failure=failure))
            )

        breaking = asyncio.create_task(break_it())
        events = await stream(s, input="x")
        await breaking
    *_, done, failed = events
    assert (done["type"], done["item"]["status"]) == ("response.output_item.done", "incomplete")
    assert failed["type"] == "response.failed"
    response = failed["response"]
    assert response["status"] == "failed"
    assert response["error"] == {"code": "server_error", "message": "the row's logits are not finite"}
    assert response["output"][0]["content"][0]["text"] == "h"


async def test_a_refusal_of_the_engine_is_a_status() -> None:
    refusal = common_pb2.Failure(code=8, message="queue is full", reason="QUEUE_FULL", retry_after_ms=1500)
    async with gateway_stack(FakeEngine(refuse=refusal)) as s:
        for streamed in (False, True):
            answer = await s.http.post("/v1/responses", json={"input": "x", "stream": streamed})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"input": "x", "store": True}, "store"),
    ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
    ({"input": "x", "conversation": "c"}, "conversation"),
    ({"input": "x", "background": True}, "background"),
    ({"input": "x", "truncation": "auto"}, "truncation"),
    ({"input": "x", "n": 2}, "n"),
    ({"input": "x", "messages": []}, "messages"),
    ({"input": "x" * 600}, "input"),
    ({"input": "x", "include": ["reasoning.encrypted_content"]}, "include"),
    ({"input": "x", "top_logprobs": 2}, "top_logprobs"),
    ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
    ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0]"),
    ({"input": "x", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools[0].function"),
    ({"input": "x", "tool_choice": "required"}, "tool_choice"),
    ({}, "input"),
]


async def test_what_needs_a_store_or_is_not_built_is_refused_by_name() -> None:
    async with gateway_stack() as s:
        for body, field in REFUSED:
            answer = await s.http.post("/v1/responses", json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), (body, answer.text)
        neutral = {"store": False, "background": False, "truncation": "disabled", "include": [], "tools": []}
        assert (await s.http.post("/v1/responses", json={"input": "x", **neutral})).status_code == 200
        assert len(s.engine.submits) == 1
