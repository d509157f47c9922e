"""Every feature over gRPC: the engine is asked for the same as over REST, and the answers are the same."""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from protos import common_pb2, engine_pb2, gateway_pb2
from services.common.errors import InvalidArgument, TriptychError
from services.common.server import error_of
from services.gateway.fields import Api, Caller, accepted
from services.gateway.service import writing
from tests.gateway.client_checks import CALLS, TIME, WEATHER, call, obedient, say
from tests.gateway.fake_engine import text_files, until
from tests.gateway.stack import Stack, gateway_stack

TEMPLATE = (
    "{% if documents %}documents: {{ documents | tojson }}\n{% endif %}"
    "{% if tools %}tools: {{ tools | tojson }}, called as <tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ mood }}assistant: "
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}{% endif %}"
)
pytestmark = pytest.mark.asyncio(loop_scope="module")
Request = gateway_pb2.ChatRequest
Sampling = gateway_pb2.SamplingOptions
Options = gateway_pb2.RequestOptions
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
THOUGHT = "<think>let me see 🔥</think>It is noon."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def s() -> AsyncIterator[Stack]:
    files = text_files()
    config = json.loads(files["tokenizer_config.json"]) | {"chat_template": TEMPLATE}
    files["tokenizer_config.json"] = json.dumps(config).encode()
    async with gateway_stack(obedient(files=files), allow_chat_template=True) as stack:
        yield stack


def user(text: str) -> gateway_pb2.ChatMessage:
    return gateway_pb2.ChatMessage(role="user", content=[gateway_pb2.ContentPart(text=text)])


def told(text: str) -> list[gateway_pb2.ChatMessage]:
    """Messages that make the model say this."""
    return [user(say(text)[0]["content"])]


@dataclass
class Said:
    """One choice of an answer, however it came."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)  # name, arguments
    finish: str | None = None
    stop: str | int | None = None
    ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[bytes, float, int]] = field(default_factory=list)  # token, logprob, number of others


_REASONS = {1: "stop", 2: "stop", 3: "stop", 4: "length", 7: "tool_calls"}


async def over_grpc(s: Stack, request: Request, *, stream: bool) -> tuple[dict[int, Said], gateway_pb2.Usage]:
    """The choices, after all that the contract says of a stream's form was found to hold."""
    asked = Request()
    asked.CopyFrom(request)
    asked.options.stream = stream
    messages = [message async for message in s.stub.Chat(asked)]
    said: dict[int, Said] = {}
    for number, message in enumerate(messages):
        first = message.index not in said
        one = said.setdefault(message.index, Said())
        assert (message.role == "assistant") == first
        assert one.finish is None
        assert message.HasField("started") == (number == 0)
        assert message.HasField("usage") == (number == len(messages) - 1)
        if asked.options.return_token_ids:
            assert message.first_index == len(one.ids)
        one.content += message.content
        one.reasoning += message.reasoning_content
        for piece in message.tool_calls:
            new = piece.index == len(one.calls)
            assert new or piece.index == len(one.calls) - 1
            assert piece.HasField("id") == piece.HasField("name") == new
            if new:
                assert piece.id.startswith("call_")
                one.calls.append([piece.name, ""])
            one.calls[-1][1] += piece.arguments
        one.ids += message.token_ids
        one.logprobs += [(p.token.bytes, p.token.logprob, len(p.top)) for p in message.logprobs]
        if message.HasField("finish"):
            one.finish = _REASONS[message.finish.reason]
            if message.finish.HasField("stop_string"):
                one.stop = message.finish.stop_string
            if message.finish.HasField("stop_token_id"):
                one.stop = message.finish.stop_token_id
    if not stream:
        assert len(messages) == len(said)
    return said, messages[-1].usage


async def over_rest(s: Stack, body: dict[str, Any]) -> tuple[dict[int, Said], dict[str, Any]]:
    answer = await s.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    said = {}
    for choice in answer.json()["choices"]:
        message = choice["message"]
        calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls") or []]
        entries = (choice["logprobs"] or {}).get("content") or []
        said[choice["index"]] = Said(
            message["content"] or "",
            message.get("reasoning_content") or "",
            calls,
            choice["finish_reason"],
            choice["stop_reason"],
            list(choice.get("token_ids") or []),
            [(bytes(e["bytes"] or b""), e["logprob"], len(e["top_logprobs"])) for e in entries],
        )
    return said, answer.json()["usage"]


def asked_of(s: Stack) -> engine_pb2.Submit:
    """What the engine was asked for last, without what is new in every request."""
    submit = engine_pb2.Submit()
    submit.CopyFrom(s.engine.submits[-1])
    for name in ("handle", "token", "request_id", "traceparent"):
        submit.ClearField(name)
    return submit


ANSWER = "hello 🔥 world"
NOON = say("noon")[0]["content"]
HISTORY_JSON = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], "name": "ann"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "get_time", "arguments": '{"a": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": NOON},
]
Part = gateway_pb2.ContentPart
HISTORY = [
    gateway_pb2.ChatMessage(role="system", content=[Part(text="Be brief.")]),
    gateway_pb2.ChatMessage(role="user", content=[Part(text="one"), Part(text="two")], name="ann"),
    gateway_pb2.ChatMessage(
        role="assistant",
        reasoning_content="hm",
        tool_calls=[gateway_pb2.ToolCall(id="c1", name="get_time", arguments='{"a": 1}')],
    ),
    gateway_pb2.ChatMessage(role="tool", tool_call_id="c1", content=[Part(text=NOON)]),
]
TOOLS = json.dumps([WEATHER, TIME])
NAMED = {"type": "function", "function": {"name": "get_time"}}
GRAMMAR = 'start: "a" | "b"'

PAIRS: dict[str, tuple[dict[str, Any], Request]] = {
    "plain": ({}, Request()),
    "how tokens are chosen": (
        {
            "max_tokens": 9,
            "min_tokens": 2,
            "temperature": 0.5,
            "top_p": 0.25,
            "top_k": 7,
            "min_p": 0.125,
            "repetition_penalty": 1.5,
            "frequency_penalty": -1,
            "presence_penalty": 1,
            "logit_bias": {"5": -1.5},
            "allowed_token_ids": [1, 2, 300 - 60],
            "bad_words": ["no"],
            "stop_token_ids": [3],
            "ignore_eos": True,
            "num_speculative_tokens": 2,
        },
        Request(
            sampling=Sampling(
                max_tokens=9,
                min_tokens=2,
                temperature=0.5,
                top_p=0.25,
                top_k=7,
                min_p=0.125,
                repetition_penalty=1.5,
                frequency_penalty=-1,
                presence_penalty=1,
                logit_bias=[common_pb2.LogitBias(token_id=5, bias=-1.5)],
                allowed_token_ids=[1, 2, 240],
                bad_words=["no"],
                stop_token_ids=[3],
                ignore_eos=True,
                num_speculative_tokens=2,
            )
        ),
    ),
    "a stop string": (
        {"stop": ["wor"], "include_stop_str_in_output": True},
        Request(sampling=Sampling(stop=["wor"], include_stop_str_in_output=True)),
    ),
    "a stop id": ({"stop_token_ids": [ord("w")]}, Request(sampling=Sampling(stop_token_ids=[ord("w")]))),
    "choices": (
        {"n": 3, "return_token_ids": True},
        Request(sampling=Sampling(n=3), options=Options(return_token_ids=True)),
    ),
    "log probabilities": (
        {"logprobs": True, "top_logprobs": 2, "return_token_ids": True},
        Request(sampling=Sampling(logprobs=2), options=Options(return_token_ids=True)),
    ),
    "how it is treated": (
        {"priority": -3, "cache_salt": "s"},
        Request(options=Options(priority=-3, cache_salt="s")),
    ),
    "special tokens": (
        {"skip_special_tokens": False, "add_special_tokens": True},
        Request(sampling=Sampling(skip_special_tokens=False), options=Options(add_special_tokens=True)),
    ),
    "a prompt that is cut": (
        {"truncate_prompt_tokens": 30, "truncation_side": "left"},
        Request(options=Options(truncate_prompt_tokens=30, truncation_side="left")),
    ),
    "a schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        Request(sampling=Sampling(constraint=common_pb2.Constraint(json_schema=json.dumps(SCHEMA)))),
    ),
    "an object": (
        {"response_format": {"type": "json_object"}},
        Request(sampling=Sampling(constraint=common_pb2.Constraint(json_object=True))),
    ),
    "an expression": (
        {"structured_outputs": {"regex": "[a-z]+"}},
        Request(sampling=Sampling(constraint=common_pb2.Constraint(regex="[a-z]+"))),
    ),
    "a grammar": (
        {"structured_outputs": {"grammar": GRAMMAR}},
        Request(sampling=Sampling(constraint=common_pb2.Constraint(lark=GRAMMAR))),
    ),
    "one of some texts": (
        {"structured_outputs": {"choice": ["a.b", "c"]}},
        Request(sampling=Sampling(constraint=common_pb2.Constraint(choice=common_pb2.Choices(values=["a.b", "c"])))),
    ),
    "tools": (
        {"messages": say(CALLS), "tools": [WEATHER, TIME]},
        Request(messages=told(CALLS), tools_json=TOOLS),
    ),
    "one tool at a time": (
        {"messages": say(CALLS), "tools": [WEATHER, TIME], "parallel_tool_calls": False},
        Request(messages=told(CALLS), tools_json=TOOLS, parallel_tool_calls=False),
    ),
    "a call must be made": (
        {"messages": say(call("get_time")), "tools": [WEATHER, TIME], "tool_choice": "required"},
        Request(messages=told(call("get_time")), tools_json=TOOLS, tool_choice="required"),
    ),
    "this call must be made": (
        {"messages": say(call("get_time")), "tools": [WEATHER, TIME], "tool_choice": NAMED},
        Request(messages=told(call("get_time")), tools_json=TOOLS, tool_choice=json.dumps(NAMED)),
    ),
    "no call may be made": (
        {"messages": say("no <call>"), "tools": [WEATHER, TIME], "tool_choice": "none"},
        Request(messages=told("no <call>"), tools_json=TOOLS, tool_choice="none"),
    ),
    "a call that is cut": (
        {"messages": say(CALLS), "tools": [WEATHER, TIME], "max_tokens": 60},
        Request(messages=told(CALLS), tools_json=TOOLS, sampling=Sampling(max_tokens=60)),
    ),
    "a call that a stop string cuts": (
        {"messages": say(CALLS), "tools": [WEATHER, TIME], "stop": ['"unit']},
        Request(messages=told(CALLS), tools_json=TOOLS, sampling=Sampling(stop=['"unit'])),
    ),
    "a call that must be made and is cut": (
        {"messages": say(call("get_time")), "tools": [WEATHER, TIME], "tool_choice": NAMED, "max_tokens": 20},
        Request(
            messages=told(call("get_time")),
            tools_json=TOOLS,
            tool_choice=json.dumps(NAMED),
            sampling=Sampling(max_tokens=20),
        ),
    ),
    "reasoning": ({"messages": say(THOUGHT)}, Request(messages=told(THOUGHT))),
    "reasoning that is not shown": (
        {"messages": say(THOUGHT), "include_reasoning": False},
        Request(messages=told(THOUGHT), include_reasoning=False),
    ),
    "no reasoning": ({"reasoning_effort": "none"}, Request(reasoning_effort="none")),
    "variables of the template": (
        {"chat_template_kwargs": {"mood": "happy "}},
        Request(chat_template_kwargs_json='{"mood": "happy "}'),
    ),
    "documents": ({"documents": [{"text": "d"}]}, Request(documents_json='[{"text": "d"}]')),
    "another template": (
        {"chat_template": "{{ messages[0].content }}!"},
        Request(chat_template="{{ messages[0].content }}!"),
    ),
    "a message that is continued": (
        {
            "messages": [*say("d"), {"role": "assistant", "content": NOON}],
            "continue_final_message": True,
            "echo": True,
        },
        Request(
            messages=[
                *told("d"),
                gateway_pb2.ChatMessage(role="assistant", content=[Part(text=NOON)]),
            ],
            continue_final_message=True,
            echo=True,
        ),
    ),
    "a message that is continued and not repeated": (
        {"messages": [*say("d"), {"role": "assistant", "content": NOON}], "continue_final_message": True},
        Request(
            messages=[*told("d"), gateway_pb2.ChatMessage(role="assistant", content=[Part(text=NOON)])],
            continue_final_message=True,
        ),
    ),
    "no opening": ({"add_generation_prompt": False}, Request(add_generation_prompt=False)),
    "a history": ({"messages": HISTORY_JSON}, Request(messages=HISTORY)),
}


@pytest.mark.parametrize("name", PAIRS)
async def test_both_protocols_ask_and_answer_the_same(s: Stack, name: str) -> None:
    body, request = PAIRS[name]
    if not request.messages:
        request.messages.extend(told(ANSWER))
    request.sampling.seed = 7
    rest, rest_usage = await over_rest(s, {"messages": say(ANSWER), "seed": 7, **body})
    asked = asked_of(s)
    whole, usage = await over_grpc(s, request, stream=False)
    assert asked_of(s) == asked
    assert whole == rest
    assert usage.prompt_tokens == rest_usage["prompt_tokens"]
    assert usage.completion_tokens == rest_usage["completion_tokens"]
    streamed, streamed_usage = await over_grpc(s, request, stream=True)
    assert asked_of(s) == asked
    assert streamed == rest
    assert streamed_usage == usage


async def test_features_do_what_they_say(s: Stack) -> None:
    """The same on both sides could still be nothing on both sides."""
    request = PAIRS["tools"][1]
    (said,), _ = [
        list(part.values()) if isinstance(part, dict) else part for part in await over_grpc(s, request, stream=True)
    ]
    assert (said.content, said.finish) == ("Let me look.", "tool_calls")
    assert [name for name, _ in said.calls] == ["get_weather", "get_time"]
    assert json.loads(said.calls[0][1]) == {"city": "Oslo 🌍", "unit": "c"}
    said = (await over_grpc(s, PAIRS["one tool at a time"][1], stream=True))[0][0]
    assert [name for name, _ in said.calls] == ["get_weather"]
    said = (await over_grpc(s, PAIRS["a call that is cut"][1], stream=True))[0][0]
    assert said.finish == "length"
    said = (await over_grpc(s, PAIRS["a call that a stop string cuts"][1], stream=True))[0][0]
    assert (said.finish, said.stop) == ("stop", '"unit')
    assert said.calls[0][1].endswith(", ")
    assert len(said.calls) == 1
    said = (await over_grpc(s, PAIRS["a call that must be made and is cut"][1], stream=True))[0][0]
    assert (said.finish, said.content, said.calls) == ("length", "", [])
    said = (await over_grpc(s, PAIRS["reasoning"][1], stream=True))[0][0]
    assert (said.content, said.reasoning) == ("It is noon.", "let me see 🔥")
    said = (await over_grpc(s, PAIRS["reasoning that is not shown"][1], stream=True))[0][0]
    assert (said.content, said.reasoning) == ("It is noon.", "")
    said = (await over_grpc(s, PAIRS["a message that is continued"][1], stream=False))[0][0]
    assert said.content == f"{NOON}noon"
    said = (await over_grpc(s, PAIRS["a message that is continued and not repeated"][1], stream=False))[0][0]
    assert said.content == "noon"


async def test_constraints_reach_the_engine_as_they_are(s: Stack) -> None:
    kinds = {"a schema": "json_schema", "an object": "json_object", "an expression": "regex", "a grammar": "lark"}
    for name, kind in {**kinds, "one of some texts": "regex"}.items():
        constraint = PAIRS[name][1].sampling.constraint
        request = gateway_pb2.GenerateRequest(text="x", sampling=Sampling(constraint=constraint))
        [message async for message in s.stub.Generate(request)]
        reached = s.engine.submits[-1].sampling.constraint
        assert reached.WhichOneof("kind") == kind
        if kind == "json_schema":
            assert '"x"' in reached.json_schema
        if name == "an expression":
            assert reached == constraint
    assert reached.regex == r"(a\.b|c)"
    await over_grpc(s, PAIRS["this call must be made"][1], stream=False)
    assert "get_time" in s.engine.submits[-1].sampling.constraint.lark


async def refused(s: Stack, request: Request | gateway_pb2.GenerateRequest) -> TriptychError:
    method = s.stub.Chat if isinstance(request, Request) else s.stub.Generate
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [message async for message in method(request)]
    return error_of(caught.value)


def constrained(**kind: Any) -> Request:
    return Request(messages=told("x"), sampling=Sampling(constraint=common_pb2.Constraint(**kind)))


WRONG: list[tuple[Request, str]] = [
    (constrained(), "sampling.constraint"),
    (constrained(regex="a", starts_after=common_pb2.TokenIds(ids=[1])), "sampling.constraint.starts_after"),
    (constrained(json_object=False), "sampling.constraint.json_object"),
    (constrained(regex=""), "sampling.constraint.regex"),
    (constrained(regex="("), "sampling.constraint.regex"),
    (constrained(lark="start: nothing"), "sampling.constraint.lark"),
    (constrained(json_schema="{"), "sampling.constraint.json_schema"),
    (constrained(json_schema='{"$ref": "#"}'), "sampling.constraint.json_schema"),
    (constrained(choice=common_pb2.Choices()), "sampling.constraint.choice.values"),
    (constrained(choice=common_pb2.Choices(values=["a", ""])), "sampling.constraint.choice.values"),
    (Request(messages=told("x"), tools_json="["), "tools_json"),
    (Request(messages=told("x"), tools_json="{}"), "tools_json"),
    (Request(messages=told("x"), tools_json='[{"type": "function"}]'), "tools_json[0].function"),
    (Request(messages=told("x"), tools_json=r'[{"type": "\ud800"}]'), "tools_json[0].type"),
    (Request(messages=told("x"), tools_json='[{"type": "function", "type": "function"}]'), "tools_json[0].type"),
    (Request(messages=told("x"), tool_choice="required"), "tool_choice"),
    (Request(messages=told("x"), tools_json=TOOLS, tool_choice="sometimes"), "tool_choice"),
    (Request(messages=told("x"), tools_json=TOOLS, tool_choice="7"), "tool_choice"),
    (Request(messages=told("x"), tools_json=TOOLS, tool_choice='{"type": "function"'), "tool_choice"),
    (Request(messages=told("x"), parallel_tool_calls=False), "parallel_tool_calls"),
    (Request(messages=told("x"), sampling=Sampling(n=0)), "sampling.n"),
    (Request(messages=told("x"), reasoning_effort="huge"), "reasoning_effort"),
    (Request(messages=told("x"), chat_template_kwargs_json="[]"), "chat_template_kwargs_json"),
    (Request(messages=told("x"), chat_template_kwargs_json='{"x": NaN}'), "chat_template_kwargs_json.x"),
    (Request(messages=told("x"), chat_template_kwargs_json='{"tools": 1}'), "chat_template_kwargs_json.tools"),
    (Request(messages=told("x"), documents_json="[1]"), "documents_json"),
    (Request(messages=told("x"), chat_template="{% x %}"), "chat_template"),
    (Request(messages=told("x"), echo=True), "echo"),
    (Request(messages=told("x"), options=Options(truncate_prompt_tokens=-2)), "options.truncate_prompt_tokens"),
    (Request(messages=told("x"), options=Options(truncation_side="up")), "options.truncation_side"),
    (Request(messages=told("x"), options=Options(stream_interval=0)), "options.stream_interval"),
    (Request(messages=told("x"), options=Options(stream_interval=2)), "options.stream_interval"),
    (Request(messages=told("x"), sampling=Sampling(prompt_logprobs=21)), "sampling.prompt_logprobs"),
    (Request(messages=[user("x")] * 8193), "messages"),
    (Request(messages=[gateway_pb2.ChatMessage(role="user")]), "messages[0].content"),
    (Request(messages=[gateway_pb2.ChatMessage(content=[Part(text="x")])]), "messages[0].role"),
    *(
        (Request(messages=[user("x"), gateway_pb2.ChatMessage(role=role, content=[Part(text="x")], **more)]), place)
        for role, more, place in (
            ("tool", {}, "messages[1].tool_call_id"),
            ("user", {"tool_call_id": "c1"}, "messages[1].tool_call_id"),
            ("user", {"tool_calls": [gateway_pb2.ToolCall(name="f")]}, "messages[1].tool_calls"),
            ("system", {"reasoning_content": "hm"}, "messages[1].reasoning_content"),
        )
    ),
    (
        Request(
            messages=[
                gateway_pb2.ChatMessage(role="assistant", tool_calls=[gateway_pb2.ToolCall(name="f", arguments="{")])
            ]
        ),
        "messages[0].tool_calls[0].arguments",
    ),
]


@pytest.mark.parametrize(("request_", "place"), WRONG, ids=[place for _, place in WRONG])
async def test_what_is_wrong_is_named_as_the_contract_spells_it(s: Stack, request_: Request, place: str) -> None:
    before = len(s.engine.submits)
    error = await refused(s, request_)
    assert isinstance(error, InvalidArgument)
    assert error.field == place, error.message
    assert len(s.engine.submits) == before


async def test_a_word_that_is_no_tool_choice_is_told_those_that_are(s: Stack) -> None:
    error = await refused(s, Request(messages=told("x"), tools_json=TOOLS, tool_choice="sometimes"))
    assert error.message.startswith('tool_choice: must be "none", "auto", "required" or {"type": "function"')
    assert error.message.endswith("not 'sometimes'")


async def test_a_prompt_may_be_constrained_and_cut_too(s: Stack) -> None:
    request = gateway_pb2.GenerateRequest(
        text=say("12")[0]["content"],
        sampling=Sampling(constraint=common_pb2.Constraint(regex="[0-9]+")),
        options=Options(truncate_prompt_tokens=8, add_special_tokens=False, stream=True),
    )
    assert "".join([message.text async for message in s.stub.Generate(request)]) == "12"
    assert s.engine.submits[-1].sampling.constraint.regex == "[0-9]+"
    bad = gateway_pb2.GenerateRequest(text="x", sampling=Sampling(constraint=common_pb2.Constraint(regex="(")))
    assert (await refused(s, bad)).field == "sampling.constraint.regex"


async def test_a_stream_may_come_in_larger_pieces(s: Stack) -> None:
    options = Options(stream=True, stream_interval=5, return_token_ids=True)
    request = Request(messages=told("abcdefghijklm"), options=options)
    sizes = [len(message.token_ids) async for message in s.stub.Chat(request)]
    assert sum(sizes) == 14
    assert all(size >= 5 for size in sizes[1:-1])
    assert (await over_grpc(s, request, stream=True))[0][0].content == "abcdefghijklm"


async def with_prompt_logprobs(s: Stack, method: str, *, stream: bool) -> list[Any]:
    """The messages of a request whose engine tells the log probabilities of its prompt before its tokens."""
    sampling = Sampling(prompt_logprobs=1, logprobs=1, max_tokens=7)
    options = Options(stream=stream, return_token_ids=True)
    request: Any = gateway_pb2.GenerateRequest(text=say("abcdef")[0]["content"], sampling=sampling, options=options)
    if method == "Chat":
        request = Request(messages=told("abcdef"), sampling=sampling, options=options)
    s.engine.held = True
    try:
        call = getattr(s.stub, method)(request)
        await until(lambda: s.engine.live)
        ((handle, running),) = s.engine.live.items()
        count = len(running.submit.prompt_id_i32le) // 4
        ids = [0] * (2 * (count - 1))
        places = common_pb2.Logprobs(
            count_i32le=array("i", [0] + [2] * (count - 1)).tobytes(),
            token_id_i32le=array("i", ids).tobytes(),
            logprob_f32le=struct.pack(f"<{len(ids)}f", *[float("-inf")] * len(ids)),
            rank_i32le=array("i", [1] * len(ids)).tobytes(),
        )
        piece = engine_pb2.PromptLogprobsOutput(handle=handle, first_position=0, logprobs=places)
        s.engine.send(engine_pb2.AttachResponse(outputs=engine_pb2.StepOutputs(prompt_logprobs=[piece])))
    finally:
        s.engine.held = False
    messages = [message async for message in call]
    assert sum(len(message.prompt_logprobs) for message in messages) == count
    return messages


@pytest.mark.parametrize("method", ["Generate", "Chat"])
async def test_log_probabilities_of_the_prompt_come_once_with_the_first_message(s: Stack, method: str) -> None:
    first, *rest = await with_prompt_logprobs(s, method, stream=True)
    assert not first.prompt_logprobs[0].HasField("token")
    assert [len(place.top) for place in first.prompt_logprobs[1:]] == [1] * (len(first.prompt_logprobs) - 1)
    assert {place.token.logprob for place in first.prompt_logprobs[1:]} == {-9999.0}
    assert all(not message.prompt_logprobs for message in rest)


@pytest.mark.parametrize("method", ["Generate", "Chat"])
async def test_many_log_probabilities_come_in_several_messages(
    s: Stack, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (whole,) = await with_prompt_logprobs(s, method, stream=False)
    monkeypatch.setattr(writing, "_MOST_CANDIDATES", 4)
    messages = await with_prompt_logprobs(s, method, stream=False)
    text = "text" if method == "Generate" else "content"
    assert "".join(getattr(message, text) for message in messages) == getattr(whole, text) == "abcdef"
    for column in ("prompt_logprobs", "logprobs", "token_ids"):
        joined = [value for message in messages for value in getattr(message, column)]
        assert joined == list(getattr(whole, column))
        assert max(len(getattr(message, column)) for message in messages) == 2
    told_so_far = 0
    for message in messages:
        assert message.first_index == told_so_far
        told_so_far += len(message.token_ids)
        assert len(message.token_ids) == len(message.logprobs)
    assert [message.HasField("started") for message in messages] == [True] + [False] * (len(messages) - 1)
    assert [message.HasField("finish") for message in messages] == [False] * (len(messages) - 1) + [True]
    assert [message.HasField("usage") for message in messages] == [False] * (len(messages) - 1) + [True]


async def test_a_conversation_is_tokenized_as_it_would_be_sent(s: Stack) -> None:
    kwargs = '{"mood": "happy "}'
    turns = gateway_pb2.TokenizeMessages(messages=told("x"), tools_json=TOOLS, chat_template_kwargs_json=kwargs)
    answer = await s.stub.Tokenize(gateway_pb2.TokenizeRequest(messages=turns))
    await over_grpc(s, Request(messages=told("x"), tools_json=TOOLS, chat_template_kwargs_json=kwargs), stream=False)
    assert list(answer.token_ids) == list(array("i", s.engine.submits[-1].prompt_id_i32le))
    last = gateway_pb2.ChatMessage(role="assistant", content=[Part(text="half a")])
    turns = gateway_pb2.TokenizeMessages(messages=[*told("x"), last], continue_final_message=True)
    answer = await s.stub.Tokenize(gateway_pb2.TokenizeRequest(messages=turns))
    assert bytes(answer.token_ids).decode().endswith("assistant: half a")


@pytest.mark.parametrize("kept", [False, True])
async def test_the_way_over_ids_gives_the_same_as_the_direct_one(s: Stack, kept: bool) -> None:
    """Rendered and tokenized by one call, continued by another: stop strings end the text there too."""
    messages = told("one ### two")
    sampling = Sampling(stop=["###"], include_stop_str_in_output=kept, max_tokens=50)
    direct, usage = await over_grpc(s, Request(messages=messages, sampling=sampling), stream=False)
    ids = await s.stub.Tokenize(gateway_pb2.TokenizeRequest(messages=gateway_pb2.TokenizeMessages(messages=messages)))
    request = gateway_pb2.GenerateRequest(
        token_ids=common_pb2.TokenIds(ids=ids.token_ids), sampling=sampling, options=Options(return_token_ids=True)
    )
    (split,) = [message async for message in s.stub.Generate(request)]
    assert split.text == direct[0].content == ("one ###" if kept else "one ")
    assert split.finish.stop_string == direct[0].stop == "###"
    assert split.usage == usage
    text = (await s.stub.Detokenize(gateway_pb2.DetokenizeRequest(token_ids=split.token_ids))).text
    assert text.startswith(split.text)
    assert text.removesuffix("###") == "one "


@pytest.mark.parametrize(
    ("turns", "place"),
    [
        (gateway_pb2.TokenizeMessages(), "messages.messages"),
        (gateway_pb2.TokenizeMessages(messages=told("x"), tools_json="?"), "messages.tools_json"),
        (gateway_pb2.TokenizeMessages(messages=told("x"), tools_json="[1]"), "messages.tools_json[0]"),
        (
            gateway_pb2.TokenizeMessages(messages=told("x"), chat_template_kwargs_json="[]"),
            "messages.chat_template_kwargs_json",
        ),
        (
            gateway_pb2.TokenizeMessages(messages=told("x"), chat_template_kwargs_json='{"mod": 1}'),
            "messages.chat_template_kwargs_json.mod",
        ),
        (
            gateway_pb2.TokenizeMessages(messages=[gateway_pb2.ChatMessage(role="user")]),
            "messages.messages[0].content",
        ),
        (
            gateway_pb2.TokenizeMessages(
                messages=[user("x"), gateway_pb2.ChatMessage(role="robot", content=[Part(text="x")])]
            ),
            "messages.messages[1].role",
        ),
        (
            gateway_pb2.TokenizeMessages(messages=told("x"), add_generation_prompt=True, continue_final_message=True),
            "messages.continue_final_message",
        ),
    ],
)
async def test_what_cannot_be_tokenized_is_named(s: Stack, turns: gateway_pb2.TokenizeMessages, place: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await s.stub.Tokenize(gateway_pb2.TokenizeRequest(messages=turns))
    error = error_of(caught.value)
    assert isinstance(error, InvalidArgument)
    assert error.field == place


async def test_every_field_of_the_table_has_its_place_in_a_message() -> None:
    """And every option of the messages is in the table: none is taken and ignored."""
    places = {"sampling": Sampling, "options": Options}

    def has(spelled: str) -> bool:
        outer, _, inner = spelled.partition(".")
        if inner:
            return inner in places[outer].DESCRIPTOR.fields_by_name
        return outer in Request.DESCRIPTOR.fields_by_name

    caller = Caller(Api.GRPC, "sampling.")
    spelled = {caller.spell(name) for name in accepted(Api.GRPC) if name != "model"}
    assert [name for name in spelled if not has(name)] == []
    for outer, message in places.items():
        for inner in message.DESCRIPTOR.fields_by_name:
            assert f"{outer}.{inner}" in spelled
    others = {"model", "messages", "sampling", "options"}
    assert set(Request.DESCRIPTOR.fields_by_name) - others <= spelled
    prompts = {"model", "text", "token_ids", "sampling", "options"}
    assert set(gateway_pb2.GenerateRequest.DESCRIPTOR.fields_by_name) - prompts <= spelled
