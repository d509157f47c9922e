"""Embeddings over REST and gRPC: the whole gateway, in front of a scripted engine."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import struct
from array import array
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from protos import common_pb2, engine_pb2, gateway_pb2
from services.gateway.embeddings import AT_ONCE
from tests.gateway.fake_engine import CONTEXT, FakeEngine, text_files, until, vector_of
from tests.gateway.stack import Stack, gateway_stack

PATH = "/v1/embeddings"


def expected(text: str | Sequence[int]) -> list[float]:
    """What the scripted engine gives for an input; ids are bytes."""
    ids = text.encode() if isinstance(text, str) else text
    return vector_of(engine_pb2.Submit(prompt_id_i32le=array("i", list(ids)).tobytes()))


def cut(vector: Sequence[float], dimensions: int) -> Any:
    first = vector[:dimensions]
    return pytest.approx([value / math.hypot(*first) for value in first], abs=1e-6)


def sizes(dimensions: int) -> dict[str, bytes]:
    """Text files of a model whose config names the length of its vectors."""
    files = text_files()
    return files | {"config.json": json.dumps(json.loads(files["config.json"]) | {"hidden_size": dimensions}).encode()}


async def refused(s: Stack, body: dict[str, Any], field: str, status: int = 400) -> str:
    answer = await s.http.post(PATH, json=body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["param"] == field, error
    return str(error["message"])


async def test_the_client_gets_what_the_engine_gave() -> None:
    """The client asks for base64 unless told otherwise, and unpacks it itself."""
    async with gateway_stack() as s:
        inputs = ["hello", "world!", "🔥"]
        for kind in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            answer = await s.openai.embeddings.create(model="bytes", input=inputs, **kind)
            assert [item.index for item in answer.data] == [0, 1, 2]
            assert {item.object for item in answer.data} == {"embedding"}
            vectors = [item.embedding for item in answer.data]
            if kind.get("encoding_format") == "base64":
                vectors = [array("f", base64.b64decode(str(vector))).tolist() for vector in vectors]
            assert vectors == [expected(text) for text in inputs]
            assert (answer.object, answer.model) == ("list", "bytes")
            assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (15, 15)
        assert all(submit.pooling == common_pb2.POOLING_MEAN for submit in s.engine.submits)
        assert {submit.sampling.max_tokens for submit in s.engine.submits} == {1}
        assert s.engine.aborts == []


async def test_base64_is_of_little_endian_float32() -> None:
    values = [0.5, -0.25, 1e-3, 0.75]
    async with gateway_stack(FakeEngine(vector=lambda _: values)) as s:
        answer = await s.http.post(PATH, json={"input": "a", "encoding_format": "base64"})
        (item,) = answer.json()["data"]
        assert base64.b64decode(item["embedding"]) == struct.pack("<4f", *values)
        (item,) = (await s.http.post(PATH, json={"input": "a"})).json()["data"]
        assert item["embedding"] == list(struct.unpack("<4f", struct.pack("<4f", *values)))


async def test_token_ids() -> None:
    many: list[Any] = [[[104, 105]], [[104, 105], [7]]]
    async with gateway_stack() as s:
        for ids in ([104, 105], *many):
            inputs = ids if isinstance(ids[0], list) else [ids]
            answer = await s.openai.embeddings.create(model="bytes", input=ids, encoding_format="float")
            assert [item.embedding for item in answer.data] == [expected(each) for each in inputs]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"input": ""}, "input"),
    ({"input": ["", ""]}, "input[0]"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": []}, "input"),
    ({"input": [[]]}, "input[0]"),
    ({"input": [[1], []]}, "input[1]"),
    ({"input": [[1], [258]]}, "input[1]"),
    ({"input": [-1]}, "input"),
    ({"input": {"text": "a"}}, "input"),
    ({"input": ["a", 3]}, "input[1]"),
    ({}, "input"),
    ({"input": ["a"] * 2049}, "input"),
    ({"input": ["a", "b" * (CONTEXT + 1)]}, "input[1]"),
    ({"input": [[1] * (CONTEXT + 1)]}, "input[0]"),
    ({"input": "a", "dimensions": 0}, "dimensions"),
    ({"input": "a", "dimensions": 9}, "dimensions"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
    ({"input": "a", "pooling": "cls"}, "pooling"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"input": "a", "truncation_side": "left"}, "truncation_side"),
    ({"input": "a", "temperature": 1}, "temperature"),
    ({"input": "a", "inputs": 1}, "inputs"),
]


async def test_what_is_wrong_is_named() -> None:
    async with gateway_stack() as s:
        for body, field in WRONG:
            assert field in await refused(s, body, field)
        assert [len(submit.prompt_id_i32le) for submit in s.engine.submits] == [4], "what the vector showed"


async def test_dimensions_above_the_models_are_refused_before_anything_runs() -> None:
    async with gateway_stack(FakeEngine(files=sizes(8))) as s:
        assert "more than the 8" in await refused(s, {"input": "a", "dimensions": 9}, "dimensions")
        assert s.engine.submits == []
        answer = await s.openai.embeddings.create(model="bytes", input="abc", dimensions=8)
        assert answer.data[0].embedding == expected("abc")


async def test_fewer_dimensions_are_cut_and_of_length_1_again() -> None:
    async with gateway_stack() as s:
        for dimensions in (1, 3, 7):
            answer = await s.openai.embeddings.create(model="bytes", input="abc", dimensions=dimensions)
            assert answer.data[0].embedding == cut(expected("abc"), dimensions)
        s.engine.vector = lambda _: [0.0, 0.0, 1.0]
        answer = await s.openai.embeddings.create(model="bytes", input="abc", dimensions=2)
        assert answer.data[0].embedding == [0.0, 0.0], "without a direction, but finite"


async def test_fields_reach_the_engine() -> None:
    body = {"pooling": "last", "user": "u", "priority": -3, "request_id": "mine", "cache_salt": "salt"}
    async with gateway_stack() as s:
        long = bytes(range(65, 91)).decode() * 30
        answer = await s.http.post(PATH, json={"input": [long], "truncate_prompt_tokens": 5, **body})
        assert answer.json()["usage"]["prompt_tokens"] == 5
        (submit,) = s.engine.submits
        assert submit.pooling == common_pb2.POOLING_LAST
        assert (submit.priority, submit.request_id, submit.cache_salt) == (-3, "mine", "salt")
        assert array("i", submit.prompt_id_i32le).tolist() == list(long.encode()[-5:])
        to_fit = {"input": long, "truncate_prompt_tokens": -1, "truncation_side": "right"}
        assert (await s.http.post(PATH, json=to_fit)).status_code == 200
        assert array("i", s.engine.submits[1].prompt_id_i32le).tolist() == list(long.encode()[:CONTEXT])
        assert (await s.http.post(PATH, json={"input": long[:CONTEXT]})).status_code == 200, "it fills the context"


async def test_many_inputs_come_in_order_and_some_at_a_time() -> None:
    engine = FakeEngine()
    most = 0

    def vector(submit: engine_pb2.Submit) -> list[float]:
        nonlocal most
        most = max(most, len(engine.live))
        return vector_of(submit)

    engine.vector = vector
    async with gateway_stack(engine) as s:
        inputs = [[number % 256, number // 256] for number in range(3 * AT_ONCE + 5)]
        answer = await s.openai.embeddings.create(model="bytes", input=inputs, encoding_format="float")
        assert [item.embedding for item in answer.data] == [expected(ids) for ids in inputs]
        assert most <= AT_ONCE
        assert answer.usage.total_tokens == 2 * len(inputs)
        scrape = (await s.http.get("/metrics")).text
        ended = 'vllm:request_success_total{engine="fake",finished_reason="stop",model_name="bytes"}'
        assert f"{ended} {len(inputs)}.0" in scrape


async def test_a_number_that_is_not_finite_never_reaches_json() -> None:
    engine = FakeEngine()
    async with gateway_stack(engine) as s:
        for vector in ([math.nan, 1.0], [1.0, math.inf], [-math.inf, math.nan]):
            engine.vector = lambda _, vector=vector: vector
            answer = await s.http.post(PATH, json={"input": ["a", "b"]})
            assert answer.status_code == 500
            error = json.loads(answer.text, parse_constant=pytest.fail)["error"]
            assert "not finite" in error["message"]
            await until(lambda: not engine.live)


async def test_the_failure_of_one_input_is_the_failure_of_the_call() -> None:
    engine = FakeEngine(held=True)
    async with gateway_stack(engine) as s:
        call = asyncio.create_task(s.http.post(PATH, json={"input": ["a", "b", "c"]}))
        await until(lambda: len(engine.live) == 3)
        handle = list(engine.live)[1]
        failure = common_pb2.Failure(code=13, message="broken (error id 12)")
        engine.send(engine_pb2.AttachResponse(failed=engine_pb2.Failed(handle=handle, failure=failure)))
        answer = await call
        assert (answer.status_code, "broken" in answer.text) == (500, True)
        await until(lambda: len(engine.aborts) == 2)


async def test_a_full_queue_is_told_as_such() -> None:
    full = common_pb2.Failure(code=8, message="too many wait", retry_after_ms=2000, reason="QUEUE_FULL")
    async with gateway_stack(FakeEngine(refuse=full)) as s:
        answer = await s.http.post(PATH, json={"input": ["a", "b"]})
        assert answer.status_code == 429
        assert answer.headers["retry-after"] == "2"


async def test_an_engine_that_ends_a_request_without_its_vector() -> None:
    engine = FakeEngine(held=True)
    async with gateway_stack(engine) as s:
        call = asyncio.create_task(s.http.post(PATH, json={"input": "a"}))
        await until(lambda: engine.live)
        one = array("I", [next(iter(engine.live))]).tobytes()
        zero = array("I", [0]).tobytes()
        outputs = engine_pb2.StepOutputs(
            handle_u32le=one, choice_u32le=zero, first_index_u32le=zero, token_count_u32le=zero, finish_u8=b"\x05"
        )
        engine.send(engine_pb2.AttachResponse(outputs=outputs))
        assert (await call).status_code == 503


async def test_a_client_that_leaves_ends_all_its_inputs() -> None:
    engine = FakeEngine(held=True)
    async with gateway_stack(engine) as s:
        call = asyncio.create_task(s.http.post(PATH, json={"input": ["a"] * (AT_ONCE + 50)}))
        await until(lambda: len(engine.live) == AT_ONCE)
        call.cancel()
        await until(lambda: len(engine.aborts) == AT_ONCE)
        await until(lambda: s.gateway.router.live == 0)
        assert len(engine.submits) == AT_ONCE
        assert await s.gateway.front.drain(5) == 0


async def test_a_drain_waits_for_the_whole_call_and_takes_no_other() -> None:
    engine = FakeEngine(held=True)
    async with gateway_stack(engine) as s:
        inputs = ["a"] * (AT_ONCE + 50)
        call = asyncio.create_task(s.http.post(PATH, json={"input": inputs}))
        await until(lambda: len(engine.live) == AT_ONCE)
        drain = asyncio.create_task(s.gateway.front.drain(20))
        await until(lambda: s.gateway.front.draining)
        assert (await s.http.post(PATH, json={"input": "a"})).status_code == 503
        engine.held = False
        answer = await call
        assert len(answer.json()["data"]) == len(inputs)
        assert await drain == 0


async def test_an_engine_that_dies_is_asked_again() -> None:
    engine = FakeEngine(held=True)
    async with gateway_stack(engine) as s:
        call = asyncio.create_task(s.http.post(PATH, json={"input": ["a", "b"]}))
        await until(lambda: len(engine.live) == 2)
        await engine.kill()
        engine.held = False
        await engine.start()
        answer = await call
        assert [item["embedding"] for item in answer.json()["data"]] == [expected("a"), expected("b")]
        assert len(engine.submits) == 4


async def test_a_model_that_makes_no_embeddings_is_named() -> None:
    async with gateway_stack(FakeEngine(capabilities=("generate",))) as s:
        assert "bytes makes no embeddings" in await refused(s, {"input": "a"}, "model")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await s.stub.Embed(gateway_pb2.EmbedRequest(inputs=[gateway_pb2.EmbedInput(text="a")]))
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def texts(*values: str) -> list[gateway_pb2.EmbedInput]:
    return [gateway_pb2.EmbedInput(text=value) for value in values]


async def test_grpc() -> None:
    async with gateway_stack() as s:
        ids = gateway_pb2.EmbedInput(token_ids=common_pb2.TokenIds(ids=[5, 6]))
        answer = await s.stub.Embed(gateway_pb2.EmbedRequest(model="bytes", inputs=[*texts("hello"), ids]))
        assert [list(vector.values) for vector in answer.embeddings] == [expected("hello"), expected([5, 6])]
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 0)
        request = gateway_pb2.EmbedRequest(
            inputs=texts("hello"),
            dimensions=3,
            pooling=common_pb2.POOLING_LAST,
            request_id="mine",
            priority=2,
            truncate_prompt_tokens=4,
            truncation_side="right",
            cache_salt="salt",
        )
        answer = await s.stub.Embed(request)
        assert list(answer.embeddings[0].values) == cut(expected("hell"), 3)
        submit = s.engine.submits[-1]
        assert submit.pooling == common_pb2.POOLING_LAST
        assert (submit.priority, submit.request_id, submit.cache_salt) == (2, "mine", "salt")


async def test_more_vectors_than_a_message_holds_are_refused_before_any_is_made() -> None:
    async with gateway_stack(FakeEngine(files=sizes(4096))) as s:
        request = gateway_pb2.EmbedRequest(inputs=texts(*["a"] * 520))
        with pytest.raises(grpc.aio.AioRpcError, match="inputs: 520 vectors of 4096 numbers are more") as error:
            await s.stub.Embed(request)
        assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert s.engine.submits == []
        request.dimensions = 4
        assert len((await s.stub.Embed(request)).embeddings) == 520


WRONG_MESSAGES: list[tuple[dict[str, Any], str]] = [
    ({"inputs": []}, "inputs"),
    ({"inputs": texts("a", "")}, "inputs[1]"),
    ({"inputs": [*texts("a"), gateway_pb2.EmbedInput()]}, "inputs[1]"),
    ({"inputs": [gateway_pb2.EmbedInput(token_ids=common_pb2.TokenIds())]}, "inputs[0]"),
    ({"inputs": [gateway_pb2.EmbedInput(token_ids=common_pb2.TokenIds(ids=[999]))]}, "inputs[0]"),
    ({"dimensions": 0}, "dimensions"),
    ({"dimensions": 9}, "dimensions"),
    ({"pooling": common_pb2.POOLING_UNSPECIFIED}, "pooling"),
    ({"truncation_side": "middle", "truncate_prompt_tokens": 1}, "truncation_side"),
]


async def test_grpc_names_what_is_wrong() -> None:
    async with gateway_stack() as s:
        for changes, field in WRONG_MESSAGES:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await s.stub.Embed(gateway_pb2.EmbedRequest(**{"inputs": texts("a"), **changes}))
            assert error.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert (error.value.details() or "").startswith(field)
