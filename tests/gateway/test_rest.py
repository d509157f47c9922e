"""The OpenAI API as the official client sees it: the whole gateway, in front of a scripted engine."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import httpx
import openai
import pytest

from protos import common_pb2, engine_pb2
from tests.gateway.client_checks import obedient, say
from tests.gateway.fake_engine import END, START, FakeEngine, until
from tests.gateway.stack import Stack, gateway_stack

CHAT: Any = [{"role": "user", "content": "hi"}]
PROMPT = "user: hi\nassistant: "


async def events(s: Stack, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream, which must end with [DONE]."""
    answer = await s.http.post(path, json={"stream": True, **body})
    assert answer.status_code == 200, answer.text
    lines = answer.text.split("\n\n")
    assert lines[-1] == ""
    assert lines[-2] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


async def test_chat_whole_and_streamed_say_the_same() -> None:
    async with gateway_stack() as s:
        whole = await s.openai.chat.completions.create(model="bytes", messages=CHAT)
        assert whole.choices[0].message.content == "hello world"
        assert whole.choices[0].finish_reason == "stop"
        assert whole.usage is not None
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT), 12)
        stream = await s.openai.chat.completions.create(model="bytes", messages=CHAT, stream=True)
        chunks = [chunk async for chunk in stream]
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello world"
        assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]
        assert chunks[-1].choices[0].delta.content is None
        assert {chunk.id for chunk in chunks} == {chunks[0].id}
        assert bytes(s.engine.submits[0].prompt_id_i32le[::4]) == PROMPT.encode()
        assert s.engine.aborts == []


async def test_the_stream_helper_of_the_client_works() -> None:
    async with gateway_stack() as s, s.openai.chat.completions.stream(model="bytes", messages=CHAT) as stream:
        completion = await stream.get_final_completion()
        assert completion.choices[0].message.content == "hello world"


async def test_usage_comes_only_if_asked_for() -> None:
    """The last chunk with a choice ends it, nothing of the text is lost, then the usage."""
    async with gateway_stack() as s:
        for path, body in (("/v1/chat/completions", {"messages": CHAT}), ("/v1/completions", {"prompt": "abc"})):
            plain = await events(s, path, {**body, "max_tokens": 10})
            assert all("usage" not in chunk for chunk in plain)
            asked = await events(s, path, {**body, "max_tokens": 10, "stream_options": {"include_usage": True}})
            *chunks, last = asked
            assert all(chunk["usage"] is None for chunk in chunks)
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] == 10
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
            texts = [
                chunk["choices"][0].get("text") or chunk["choices"][0].get("delta", {}).get("content") or ""
                for chunk in chunks
            ]
            assert "".join(texts) == "hello worl"
            always = {"include_usage": True, "continuous_usage_stats": True}
            counted = await events(s, path, {**body, "max_tokens": 10, "stream_options": always})
            totals = [chunk["usage"]["completion_tokens"] for chunk in counted]
            assert totals == sorted(totals)
            assert totals[-1] == 10


async def test_choices_are_told_apart() -> None:
    """Each choice has its number, its own text and its own end, streamed side by side."""
    engine = FakeEngine(script=lambda submit, choice: list(b"choice %d" % choice))
    async with gateway_stack(engine) as s:
        chunks = await events(s, "/v1/chat/completions", {"messages": CHAT, "n": 3})
        texts = {0: "", 1: "", 2: ""}
        finishes: dict[int, str] = {}
        for chunk in chunks:
            (choice,) = chunk["choices"]
            texts[choice["index"]] += choice["delta"].get("content", "")
            if choice["finish_reason"]:
                finishes[choice["index"]] = choice["finish_reason"]
        assert texts == {0: "choice 0", 1: "choice 1", 2: "choice 2"}
        assert finishes == {0: "stop", 1: "stop", 2: "stop"}
        order = [chunk["choices"][0]["index"] for chunk in chunks]
        assert order.index(2) < len(order) - 1 - order[::-1].index(0), "none waits for another to end"
        whole = await s.openai.completions.create(model="bytes", prompt=["a", "b"], n=2)
        assert [(c.index, c.text) for c in whole.choices] == [
            (0, "choice 0"), (1, "choice 1"), (2, "choice 0"), (3, "choice 1"),
        ]  # fmt: skip
        streamed = await events(s, "/v1/completions", {"prompt": ["a", "b"], "n": 2})
        joined = dict.fromkeys(range(4), "")
        for chunk in streamed:
            joined[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert joined == {0: "choice 0", 1: "choice 1", 2: "choice 0", 3: "choice 1"}


async def test_chat_logprobs() -> None:
    """The sampled token even without top ones, finite numbers, and the bytes of each token."""
    text = "a🔥"
    async with gateway_stack(FakeEngine(script=lambda *_: list(text.encode()))) as s:
        for top in (None, 0):
            extra = {} if top is None else {"top_logprobs": top}
            answer = await s.openai.chat.completions.create(model="bytes", messages=CHAT, logprobs=True, **extra)
            assert answer.choices[0].logprobs is not None
            content = answer.choices[0].logprobs.content or []
            assert [entry.logprob for entry in content] == [-0.5] * 6
            assert all(entry.top_logprobs == [] for entry in content)
            assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == text
            assert [entry.token for entry in content] == ["a", "\\xf0", "\\x9f", "\\x94", "\\xa5", "<|end|>"]
        raw = await s.http.post(
            "/v1/chat/completions", json={"messages": CHAT, "logprobs": True, "top_logprobs": 3, "top_k": 1}
        )
        top_logprobs = raw.json()["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        assert [entry["logprob"] for entry in top_logprobs] == [-0.5, -1.0, -9999.0]
        streamed = await events(s, "/v1/chat/completions", {"messages": CHAT, "logprobs": True})
        entries = [entry for chunk in streamed for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
        assert bytes(byte for entry in entries for byte in entry["bytes"] or []).decode() == text


@pytest.mark.parametrize("skip", [True, False])
async def test_bytes_joined_are_the_text(skip: bool) -> None:
    """Nothing of what ends an answer, of a stop string, or of what is left out; a broken character as it is shown."""
    broken = [*b"\xf0\x9fx \xf0\x9f\x94\xa5ab\xf0", START]
    async with gateway_stack(FakeEngine(script=lambda *_: broken)) as s:
        for per_step in (1, 4):
            s.engine.per_step = per_step
            for asked in (
                {},
                {"stop": "b"},
                {"stop": "🔥a"},
                {"stop": "🔥a", "include_stop_str_in_output": True},
                {"max_tokens": 5},
                {"stop_token_ids": [97]},
                {"stop_token_ids": [97], "include_stop_str_in_output": True},
            ):
                body = {"messages": CHAT, "logprobs": True, "skip_special_tokens": skip, **asked}
                (choice,) = (await s.http.post("/v1/chat/completions", json=body)).json()["choices"]
                entries = choice["logprobs"]["content"]
                text = choice["message"]["content"].encode()
                assert b"".join(bytes(entry["bytes"]) for entry in entries) == text, asked
                assert all(entry["token"] for entry in entries)
                chunks = await events(s, "/v1/chat/completions", body)
                told = [chunk["choices"][0]["logprobs"] or {} for chunk in chunks]
                assert [entry for logprobs in told for entry in logprobs.get("content", ())] == entries


async def test_reasoning_comes_beside_the_answer() -> None:
    """Streamed and whole, shown or not, with log probabilities of all tokens; its tokens are counted."""
    text = "<think>hm 🔥</think>\n\nso 🔥"
    reasoned = len("<think>hm 🔥</think>\n\n".encode())
    async with gateway_stack(obedient(), reasoning_parser="think") as s:
        body: dict[str, Any] = {"messages": say(text), "logprobs": True}
        for shown in (True, False):
            fields = {**body, "include_reasoning": shown}
            whole = (await s.http.post("/v1/chat/completions", json=fields)).json()
            (choice,) = whole["choices"]
            assert choice["message"]["content"] == "so 🔥"
            assert choice["message"].get("reasoning_content") == ("hm 🔥" if shown else None)
            assert len(choice["logprobs"]["content"]) == len(text.encode()) + 1
            assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": reasoned}
            chunks = await events(s, "/v1/chat/completions", fields)
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert deltas[0] == {"role": "assistant", "content": None}
            assert "".join(delta.get("content") or "" for delta in deltas) == "so 🔥"
            assert "".join(delta.get("reasoning_content", "") for delta in deltas) == ("hm 🔥" if shown else "")
            assert not any(delta.get("reasoning_content") and delta.get("content") for delta in deltas)
            entries = [e for chunk in chunks for e in (chunk["choices"][0]["logprobs"] or {}).get("content", [])]
            assert entries == choice["logprobs"]["content"]
        cut = (await s.http.post("/v1/chat/completions", json={**body, "max_tokens": 9})).json()
        assert cut["choices"][0]["finish_reason"] == "length"
        assert cut["choices"][0]["message"] == {
            "role": "assistant", "content": None, "refusal": None, "reasoning_content": "hm",
        }  # fmt: skip
        assert cut["usage"]["completion_tokens_details"] == {"reasoning_tokens": 9}


async def test_completion_logprobs_and_their_offsets() -> None:
    """Offsets count all emitted text, the echoed prompt too, streamed or not."""
    async with gateway_stack() as s:
        body = {"prompt": "é1", "max_tokens": 3, "logprobs": 0, "echo": False}
        (choice,) = (await s.http.post("/v1/completions", json=body)).json()["choices"]
        assert choice["text"] == "hel"
        assert choice["logprobs"] == {
            "tokens": ["h", "e", "l"],
            "token_logprobs": [-0.5] * 3,
            "top_logprobs": [],
            "text_offset": [0, 1, 2],
        }
        streamed = await events(s, "/v1/completions", {**body, "logprobs": 2, "echo": True})
        assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "é1hel"
        own = [chunk["choices"][0]["logprobs"] for chunk in streamed]
        tokens = [token for entry in own for token in entry["tokens"]]
        offsets = [offset for entry in own for offset in entry["text_offset"]]
        assert tokens[-3:] == ["h", "e", "l"]
        assert offsets[-3:] == [2, 3, 4]
        assert own[-1]["top_logprobs"][-1] == {"l": -0.5, "m": -1.0}


async def test_offsets_say_where_the_text_of_a_token_begins() -> None:
    """Inside a character of several tokens it begins where the character does; after a broken one behind that."""
    output = list(b"a\xf0\x9f\x94\xa5b\xf0\x9fc\xf0")
    text, starts = "a🔥b\ufffdc\ufffd", [0, 1, 1, 1, 1, 2, 3, 3, 4, 5, 6]  # and the model's end
    async with gateway_stack(FakeEngine(script=lambda *_: output)) as s:
        for per_step in (1, 3, 11):
            s.engine.per_step = per_step
            for fields, echo in (
                ({"prompt": "x"}, ""),
                ({"prompt": "x🔥", "echo": True}, "x🔥"),
                ({"prompt": list(b"x\xf0\x9f\x94\xa5\xf0y\xe2"), "echo": True}, "x🔥\ufffdy\ufffd"),
            ):
                body = {**fields, "logprobs": 0, "max_tokens": 20}
                (choice,) = (await s.http.post("/v1/completions", json=body)).json()["choices"]
                assert choice["text"] == echo + text
                assert choice["logprobs"]["text_offset"] == [len(echo) + start for start in starts]
                chunks = await events(s, "/v1/completions", body)
                offsets = [at for chunk in chunks for at in chunk["choices"][0]["logprobs"]["text_offset"]]
                assert offsets == choice["logprobs"]["text_offset"]


async def test_fields_reach_the_engine() -> None:
    async with gateway_stack() as s:
        await s.openai.chat.completions.create(
            model="bytes", messages=CHAT, temperature=0.5, top_p=0.25, seed=7, max_completion_tokens=9, n=2,
            frequency_penalty=1.5, presence_penalty=-1.5, logit_bias={"65": -100}, stop=["zz"],
            extra_body={"top_k": 4, "min_p": 0.125, "repetition_penalty": 1.5, "min_tokens": 2,
                        "stop_token_ids": [66], "allowed_token_ids": [1, 2], "priority": -3, "cache_salt": "s",
                        "num_speculative_tokens": 5},
            extra_headers={"x-request-id": "mine", "traceparent": f"00-{'a' * 32}-{'b' * 16}-01"},
        )  # fmt: skip
        (submit,) = s.engine.submits
        got = submit.sampling
        assert (got.temperature, got.top_p, got.seed, got.max_tokens, got.n) == (0.5, 0.25, 7, 9, 2)
        assert (got.frequency_penalty, got.presence_penalty, got.top_k, got.min_p) == (1.5, -1.5, 4, 0.125)
        assert (got.repetition_penalty, got.min_tokens, got.num_speculative_tokens) == (1.5, 2, 5)
        assert (list(got.stop_token_ids), list(got.eos_token_ids), list(got.allowed_token_ids)) == ([66], [END], [1, 2])
        assert [(entry.token_id, entry.bias) for entry in got.logit_bias] == [(65, -100.0)]
        assert (submit.priority, submit.cache_salt, submit.request_id) == (-3, "s", "mine")
        assert submit.traceparent.startswith(f"00-{'a' * 32}-")
        named = {"messages": CHAT, "request_id": "ours"}
        answer = await s.http.post("/v1/chat/completions", json=named, headers={"x-request-id": "mine"})
        assert (answer.json()["id"], answer.headers["x-request-id"]) == ("chatcmpl-ours", "mine")
        assert s.engine.submits[-1].request_id == "ours"


async def test_a_stop_string_ends_the_choice_at_the_engine() -> None:
    async with gateway_stack(FakeEngine(step_s=0.005)) as s:
        answer = await s.openai.chat.completions.create(model="bytes", messages=CHAT, stop=[" wo"])
        assert answer.choices[0].message.content == "hello"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].model_extra == {"stop_reason": " wo"}
        await until(lambda: s.engine.aborts)
        assert [abort.reason for abort in s.engine.aborts] == [common_pb2.FINISH_REASON_STOP_STRING]
        assert not s.engine.live


async def test_token_ids_beside_the_text() -> None:
    async with gateway_stack() as s:
        body = {"prompt": [97, 98], "return_token_ids": True, "max_tokens": 2}
        (choice,) = (await s.http.post("/v1/completions", json=body)).json()["choices"]
        assert choice["token_ids"] == list(b"he")
        assert choice["prompt_token_ids"] == [97, 98]


async def test_models_tokenize_and_detokenize() -> None:
    async with gateway_stack() as s:
        assert [model.id async for model in s.openai.models.list()] == ["bytes"]
        assert (await s.openai.models.retrieve("bytes")).model_extra["max_model_len"] == 512
        with pytest.raises(openai.NotFoundError, match="nope"):
            await s.openai.models.retrieve("nope")
        tokens = (await s.http.post("/tokenize", json={"prompt": "abc", "return_token_strs": True})).json()
        assert tokens == {"count": 3, "max_model_len": 512, "tokens": [97, 98, 99], "token_strs": ["a", "b", "c"]}
        chat = (await s.http.post("/tokenize", json={"messages": CHAT})).json()
        assert bytes(chat["tokens"]).decode() == PROMPT
        assert (await s.http.post("/detokenize", json={"tokens": [104, 105]})).json() == {"prompt": "hi"}


BAD: list[tuple[str, object, int, str | None]] = [
    ("/v1/chat/completions", {"model": "nope", "messages": CHAT}, 404, "model"),
    ("/v1/chat/completions", {"model": 5, "messages": CHAT}, 400, "model"),
    ("/v1/chat/completions", {}, 400, "messages"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    ("/v1/chat/completions", {"messages": CHAT, "top_logprobs": 2}, 400, "top_logprobs"),
    ("/v1/chat/completions", {"messages": CHAT, "temperatur": 1}, 400, "temperatur"),
    ("/v1/chat/completions", {"messages": CHAT, "tools": [{}]}, 400, "tools[0]"),
    ("/v1/chat/completions", {"messages": CHAT, "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("/v1/completions", {"prompt": ""}, 400, "prompt"),
    ("/v1/completions", {"prompt": [""]}, 400, "prompt[0]"),
    ("/v1/completions", {"prompt": []}, 400, "prompt"),
    ("/v1/completions", {"prompt": "x" * 600}, 400, "prompt"),
    ("/v1/completions", {"prompt": [1, -1]}, 400, "prompt"),
    ("/v1/completions", {"prompt": [1, 258]}, 400, "prompt"),
    ("/v1/completions", {"prompt": "x", "n": 9}, 400, "n"),
    ("/v1/completions", {"prompt": "x", "n": 0}, 400, "n"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens"),
    ("/v1/completions", {"prompt": "x", "temperature": "warm"}, 400, "temperature"),
    ("/v1/completions", {"prompt": "x", "num_speculative_tokens": 17}, 400, "num_speculative_tokens"),
    ("/v1/chat/completions", {"messages": CHAT, "num_speculative_tokens": True}, 400, "num_speculative_tokens"),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"258": -100}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    ("/v1/completions", b'{"prompt": "x", "temperature": NaN}', 400, "temperature"),
    ("/v1/completions", b'{"prompt": "x", "top_p": Infinity}', 400, "top_p"),
    ("/v1/completions", b'{"prompt": "x", "top_p": 1e999}', 400, "top_p"),
    ("/v1/completions", b'{"prompt": "x", "n": 1, "n": 1}', 400, "n"),
    ("/v1/completions", b'{"prompt": "\\ud800"}', 400, "prompt"),
    ("/v1/responses", b'{"input": [{"role": "user", "role": "user", "content": "x"}]}', 400, "input[0].role"),
    ("/v1/completions", b"[1]", 400, "body"),
    ("/v1/completions", b"{", 400, "body"),
    ("/v1/completions", b"\xff\xfe", 400, "body"),
    ("/v1/completions", b"", 400, "body"),
    ("/v1/completions", b"[" * 100_000, 400, "body"),
    ("/v1/completions", b'{"prompt": "' + b"x" * 200_000 + b'"}', 413, None),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {"tokens": [999]}, 400, "tokens"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
]  # fmt: skip


async def test_bad_input_is_named_and_the_server_goes_on() -> None:
    """The answer is JSON without NaN, names the field, and nothing reaches the engine."""

    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} in JSON")

    async with gateway_stack(max_body_bytes=100_000) as s:
        for path, body, status, field in BAD:
            answer = await s.http.post(path, **({"content": body} if isinstance(body, bytes) else {"json": body}))
            assert answer.status_code == status, (body, answer.text)
            error = json.loads(answer.text, parse_constant=no_constant)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            if field is not None:
                assert error["param"] == field, (body, error)
        assert s.engine.submits == []
        assert (await s.openai.chat.completions.create(model="bytes", messages=CHAT)).choices[0].message.content


async def test_a_refusal_of_the_engine_is_a_status_even_for_a_stream() -> None:
    refusal = common_pb2.Failure(code=8, message="queue is full", reason="QUEUE_FULL", retry_after_ms=1500)
    async with gateway_stack(FakeEngine(refuse=refusal)) as s:
        for stream in (False, True):
            answer = await s.http.post("/v1/completions", json={"prompt": "x", "stream": stream})
            assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
            assert answer.json()["error"]["code"] == "queue_full"
        with pytest.raises(openai.RateLimitError):
            await s.openai.chat.completions.create(model="bytes", messages=CHAT)


async def test_a_failure_in_mid_stream_is_an_event() -> None:
    """What has come stays, then comes the error, and no end as if all were well."""
    engine = FakeEngine(held=True)
    async with gateway_stack(engine) as s:

        async def break_it() -> None:
            await until(lambda: engine.live)
            engine.step()
            await asyncio.sleep(0.05)
            failure = common_pb2.Failure(code=13, message="the row's logits are not finite", error_id="abc")
            handle = next(iter(engine.live))
            engine.send(engine_pb2.AttachResponse(failed=engine_pb2.Failed(handle=handle, failure=failure)))

        breaking = asyncio.create_task(break_it())
        answer = await s.http.post("/v1/completions", json={"prompt": "x", "stream": True})
        await breaking
        first, error, end = answer.text.split("\n\n")
        assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == "h"
        assert json.loads(error.removeprefix("data: "))["error"]["message"] == "the row's logits are not finite"
        assert end == ""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_aborted_at_the_engine(stream: bool) -> None:
    """While it decodes, streaming or not, and before the first token."""
    engine = FakeEngine(script=lambda *_: [65] * 400, step_s=0.01)
    async with gateway_stack(engine) as s:
        body = {"prompt": "x", "max_tokens": 400, "stream": stream}
        for held in (False, True):
            engine.held = held
            before = len(engine.aborts)
            if stream and not held:
                async with s.http.stream("POST", "/v1/completions", json=body) as answer:
                    await anext(answer.aiter_lines())
            else:
                with pytest.raises(httpx.ReadTimeout):
                    await s.http.post("/v1/completions", json=body, timeout=0.2)
            await until(lambda before=before: len(engine.aborts) > before)
            await until(lambda: not engine.live)
        assert all(abort.reason == common_pb2.FINISH_REASON_ABORT for abort in engine.aborts)
        assert s.gateway.router.live == 0


async def test_an_engine_killed_in_mid_stream_is_a_pause() -> None:
    text = "The engine may die at any moment. " * 4
    engine = FakeEngine(script=lambda *_: list(text.encode()), step_s=0.004)
    async with gateway_stack(engine) as s:
        stream = await s.openai.chat.completions.create(
            model="bytes", messages=CHAT, stream=True, logprobs=True, stream_options={"include_usage": True}
        )
        got = ""
        entries = 0
        async for chunk in stream:
            for choice in chunk.choices:
                got += choice.delta.content or ""
                entries += len((choice.logprobs.content or []) if choice.logprobs else [])
            if len(got) == 20:
                await engine.kill()
                await engine.start()
            if chunk.usage:
                assert chunk.usage.completion_tokens == len(text) + 1
        assert got == text
        assert entries == len(text) + 1
        assert len(engine.submits) == 2


async def test_metrics_count_what_happened() -> None:
    async with gateway_stack() as s:
        await s.openai.chat.completions.create(model="bytes", messages=CHAT)
        await s.http.post("/v1/completions", json={"prompt": ""})
        text = (await s.http.get("/metrics")).text
        assert 'vllm:request_success_total{engine="fake",finished_reason="stop",model_name="bytes"} 1.0' in text
        assert 'vllm:time_to_first_token_seconds_count{engine="fake",model_name="bytes"} 1.0' in text
        assert 'http_requests_total{handler="/v1/completions",method="POST",status="400"} 1.0' in text
        assert not any(math.isnan(float(line.rsplit(" ", 1)[1])) for line in text.splitlines() if line[0] != "#")
