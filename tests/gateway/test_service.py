"""GatewayService as a gRPC client sees it, with a scripted engine behind the gateway."""

from __future__ import annotations

import asyncio
import itertools
import math
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from protos import common_pb2, engine_pb2, gateway_pb2
from services.common.errors import InvalidArgument, NotFound, ResourceExhausted, TriptychError, Unimplemented
from services.common.server import error_of
from tests.gateway.fake_engine import END, FakeEngine, until
from tests.gateway.stack import Stack, gateway_stack

USER = gateway_pb2.ChatMessage(role="user", content=[gateway_pb2.ContentPart(text="hi")])
STREAM = gateway_pb2.RequestOptions(stream=True)


async def refusal(call: Any) -> TriptychError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [message async for message in call]
    return error_of(caught.value)


async def test_generate_streams_deltas_and_gives_one_message_otherwise() -> None:
    async with gateway_stack() as s:
        streamed = [m async for m in s.stub.Generate(gateway_pb2.GenerateRequest(text="abc", options=STREAM))]
        assert "".join(m.text for m in streamed) == "hello world"
        assert [m.HasField("started") for m in streamed] == [True] + [False] * (len(streamed) - 1)
        assert len(streamed[0].started.token) == 16
        assert streamed[0].started.model == "bytes"
        assert streamed[-1].finish.reason == common_pb2.FINISH_REASON_EOS
        assert streamed[-1].usage.completion_tokens == 12
        (whole,) = [m async for m in s.stub.Generate(gateway_pb2.GenerateRequest(text="abc"))]
        assert whole.text == "hello world"
        assert whole.started.request_id
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 12)
        assert s.engine.aborts == []


async def test_chat_with_choices_ids_and_log_probabilities() -> None:
    async with gateway_stack(FakeEngine(script=lambda submit, choice: list(b"xyz"[choice:]))) as s:
        request = gateway_pb2.ChatRequest(
            model="bytes",
            messages=[USER],
            sampling=gateway_pb2.SamplingOptions(n=2, logprobs=3),
            options=gateway_pb2.RequestOptions(return_token_ids=True, request_id="mine"),
        )
        first, second = [m async for m in s.stub.Chat(request)]
        assert (first.content, second.content, first.role) == ("xyz", "yz", "assistant")
        assert list(first.token_ids) == [*b"xyz", END]
        assert first.logprobs[0].token.bytes == b"x"
        assert [math.isfinite(entry.logprob) for entry in first.logprobs[0].top] == [True] * 3
        assert first.started.request_id == "mine"
        assert not first.HasField("usage")
        assert second.usage.completion_tokens == 7


async def test_bytes_of_tokens_joined_are_the_text() -> None:
    script = list(b"x \xf0\x9f\x94\xa5 \xf0\x9f.\xf0")
    async with gateway_stack(FakeEngine(script=lambda *_: script)) as s:
        for skip, stop, stream in itertools.product((True, False), ("~", "🔥 ", " "), (True, False)):
            sampling = gateway_pb2.SamplingOptions(logprobs=1, skip_special_tokens=skip, stop=[stop], max_tokens=20)
            options = gateway_pb2.RequestOptions(stream=stream)
            chat = gateway_pb2.ChatRequest(messages=[USER], sampling=sampling, options=options)
            said = [m async for m in s.stub.Chat(chat)]
            goes_on = gateway_pb2.GenerateRequest(text="a", sampling=sampling, options=options)
            made = [m async for m in s.stub.Generate(goes_on)]
            text = "x 🔥 \ufffd.\ufffd".partition(stop)[0]
            assert "".join(m.content for m in said) == "".join(m.text for m in made) == text
            for messages in (said, made):
                assert b"".join(entry.token.bytes for m in messages for entry in m.logprobs) == text.encode()
            assert all(entry.token.logprob == -0.5 for m in said for entry in m.logprobs)
            whole = [m.logprobs for m in said if m.logprobs]
            assert sum(map(len, whole)) == said[-1].usage.completion_tokens


async def test_ids_as_a_prompt_and_echo() -> None:
    async with gateway_stack() as s:
        request = gateway_pb2.GenerateRequest(
            token_ids=common_pb2.TokenIds(ids=[97, 98]), echo=True, sampling=gateway_pb2.SamplingOptions(max_tokens=2)
        )
        (answer,) = [m async for m in s.stub.Generate(request)]
        assert answer.text == "abhe"
        assert answer.finish.reason == common_pb2.FINISH_REASON_LENGTH


async def test_a_prompt_without_ids_is_refused_by_its_name() -> None:
    async with gateway_stack() as s:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [m async for m in s.stub.Generate(gateway_pb2.GenerateRequest(token_ids=common_pb2.TokenIds()))]
        error = error_of(caught.value)
        assert isinstance(error, InvalidArgument)
        assert error.field == "token_ids"
        assert not s.engine.submits


SAMPLING = gateway_pb2.SamplingOptions


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (SAMPLING(temperature=math.nan), "sampling.temperature"),
        (SAMPLING(top_p=math.inf), "sampling.top_p"),
        (SAMPLING(n=9), "sampling.n"),
        (SAMPLING(max_tokens=0), "sampling.max_tokens"),
        (SAMPLING(stop=[""]), "sampling.stop"),
        (SAMPLING(stop_token_ids=[258]), "sampling.stop_token_ids"),
        (SAMPLING(logit_bias=[common_pb2.LogitBias(token_id=258, bias=1)]), "sampling.logit_bias"),
        (SAMPLING(logprobs=21), "sampling.logprobs"),
        (SAMPLING(num_speculative_tokens=17), "sampling.num_speculative_tokens"),
    ],
)
async def test_bad_sampling_options_are_named(sampling: gateway_pb2.SamplingOptions, field: str) -> None:
    async with gateway_stack() as s:
        error = await refusal(s.stub.Generate(gateway_pb2.GenerateRequest(text="x", sampling=sampling)))
        assert isinstance(error, InvalidArgument)
        assert error.field == field
        assert s.engine.submits == []


async def test_what_is_wrong_or_not_built_is_refused_by_name() -> None:
    async with gateway_stack() as s:
        generate, chat = s.stub.Generate, s.stub.Chat
        error = await refusal(generate(gateway_pb2.GenerateRequest(text="x", model="nope")))
        assert isinstance(error, NotFound)
        assert (error.field, error.reason) == ("model", "MODEL_NOT_FOUND")
        assert isinstance(await refusal(generate(gateway_pb2.GenerateRequest())), InvalidArgument)
        assert isinstance(await refusal(generate(gateway_pb2.GenerateRequest(text=""))), InvalidArgument)
        assert isinstance(await refusal(chat(gateway_pb2.ChatRequest())), InvalidArgument)
        nameless = gateway_pb2.ChatMessage(role="assistant", tool_calls=[gateway_pb2.ToolCall(arguments="{}")])
        assert isinstance(await refusal(chat(gateway_pb2.ChatRequest(messages=[nameless]))), InvalidArgument)
        image = gateway_pb2.ChatMessage(role="user", content=[gateway_pb2.ContentPart(image_url="data:,")])
        assert isinstance(await refusal(chat(gateway_pb2.ChatRequest(messages=[image]))), InvalidArgument)
        assert isinstance(await refusal(s.stub.Resume(gateway_pb2.ResumeRequest(token=b"x" * 16))), Unimplemented)


async def test_a_name_as_long_as_a_book_comes_back_short() -> None:
    async with gateway_stack() as s:
        for name in ("x" * 100_000, "本" * 100_000):
            error = await refusal(s.stub.Generate(gateway_pb2.GenerateRequest(text="x", model=name)))
            assert isinstance(error, NotFound)
            assert len(error.message) < 1100


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\x12\x02\xff\xfe"], ids=["no message", "no UTF-8"])
async def test_bytes_that_are_no_request_are_the_clients_fault(data: bytes) -> None:
    async with gateway_stack() as s:
        service = "/triptych.v1.GatewayService/"
        assert isinstance(await refusal(s.channel.unary_stream(service + "Generate")(data)), InvalidArgument)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.channel.unary_unary(service + "Abort")(b"\xff" * 4)
        assert isinstance(error_of(caught.value), InvalidArgument)


async def test_a_refusal_of_the_engine_keeps_its_details() -> None:
    failure = common_pb2.Failure(code=8, message="queue is full", reason="QUEUE_FULL", retry_after_ms=700)
    async with gateway_stack(FakeEngine(refuse=failure)) as s:
        error = await refusal(s.stub.Generate(gateway_pb2.GenerateRequest(text="x", options=STREAM)))
        assert isinstance(error, ResourceExhausted)
        assert (error.reason, error.retry_after_ms) == ("QUEUE_FULL", 700)


async def test_a_failure_in_mid_stream_is_a_status_with_details() -> None:
    async with gateway_stack(FakeEngine(held=True)) as s:
        call = aiter(s.stub.Generate(gateway_pb2.GenerateRequest(text="x", options=STREAM)))
        await until(lambda: s.engine.live)
        s.engine.step()
        assert (await anext(call)).text == "h"
        failed = engine_pb2.Failed(
            handle=next(iter(s.engine.live)), failure=common_pb2.Failure(code=13, message="boom", error_id="id7")
        )
        s.engine.send(engine_pb2.AttachResponse(failed=failed))
        error = await refusal(call)
        assert (error.message, error.error_id) == ("boom", "id7")


async def hanging(s: Stack, *, read: bool) -> Any:
    call = s.stub.Generate(gateway_pb2.GenerateRequest(text="x", options=STREAM))
    await until(lambda: s.engine.live)
    if read:
        s.engine.step()
        await call.read()
    return call


@pytest.mark.parametrize("read", [True, False])
async def test_a_cancelled_call_is_aborted_at_the_engine(read: bool) -> None:
    async with gateway_stack(FakeEngine(held=True)) as s:
        call = await hanging(s, read=read)
        call.cancel()
        await until(lambda: s.engine.aborts)
        await until(lambda: not s.engine.live)
        assert s.gateway.router.live == 0


async def test_a_deadline_travels_and_ends_the_request() -> None:
    async with gateway_stack(FakeEngine(held=True)) as s:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [m async for m in s.stub.Generate(gateway_pb2.GenerateRequest(text="x"), timeout=0.5)]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0 < s.engine.submits[0].deadline_ms <= 500
        await until(lambda: not s.engine.live)


async def test_abort_and_explain_take_the_token() -> None:
    async with gateway_stack(FakeEngine(held=True)) as s:
        call = aiter(s.stub.Generate(gateway_pb2.GenerateRequest(text="x", options=STREAM)))
        await until(lambda: s.engine.live)
        s.engine.step()
        token = (await anext(call)).started.token
        assert (await s.stub.Explain(gateway_pb2.ExplainRequest(token=token))).state == "running"
        assert (await s.stub.Abort(gateway_pb2.AbortRequest(token=token))).found
        rest = [m async for m in call]
        assert rest[-1].finish.reason == common_pb2.FINISH_REASON_ABORT
        assert not (await s.stub.Abort(gateway_pb2.AbortRequest(token=token))).found
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await s.stub.Explain(gateway_pb2.ExplainRequest(token=b"short"))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_tokenize_detokenize_and_models() -> None:
    async with gateway_stack() as s:
        text = await s.stub.Tokenize(gateway_pb2.TokenizeRequest(text="ab"))
        assert (list(text.token_ids), list(text.tokens), text.max_model_len) == ([97, 98], ["a", "b"], 512)
        turns = gateway_pb2.TokenizeMessages(messages=[USER], add_generation_prompt=False)
        chat = await s.stub.Tokenize(gateway_pb2.TokenizeRequest(messages=turns))
        assert bytes(chat.token_ids) == b"user: hi\n"
        assert (await s.stub.Detokenize(gateway_pb2.DetokenizeRequest(token_ids=[104, END]))).text == "h<|end|>"
        (model,) = (await s.stub.ListModels(gateway_pb2.ListModelsRequest())).models
        assert (model.name, model.max_model_len, model.vocab_size) == ("bytes", 512, 258)
        assert (await s.stub.GetModel(gateway_pb2.GetModelRequest(model="bytes"))).model == model


async def test_health_follows_the_engine_and_reflection_lists_the_services() -> None:
    engine = FakeEngine()
    async with gateway_stack(engine) as s:
        check = s.channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )

        async def becomes(status: int, service: str) -> None:
            async with asyncio.timeout(10):
                while (await check(health_pb2.HealthCheckRequest(service=service))).status != status:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

        serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
        await becomes(serving, "triptych.v1.GatewayService")
        await engine.kill()
        await becomes(not_serving, "")
        assert (await s.http.get("/health/ready")).status_code == 503
        assert (await s.http.get("/health/live")).status_code == 200
        await engine.start()
        await becomes(serving, "")
        stub = reflection_pb2_grpc.ServerReflectionStub(s.channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([asked])):
            names = {service.name for service in answer.list_services_response.service}
        assert {"triptych.v1.GatewayService", "triptych.v1.OpenAiRestService", "grpc.health.v1.Health"} <= names


async def test_an_engine_that_makes_no_progress_ends_readiness() -> None:
    """The process lives, requests do not."""
    async with gateway_stack(ready_silence_s=3.0) as s:
        s.engine.send(engine_pb2.AttachResponse(load=common_pb2.Load(running=1, silence_ms=5000)))
        await until(s.gateway.front.obstacle)
        answer = await s.http.get("/health/ready")
        assert answer.status_code == 503
        assert "5000 ms" in answer.json()["missing"]
        s.engine.send(engine_pb2.AttachResponse(load=common_pb2.Load()))
        await until(lambda: s.gateway.front.obstacle() is None)


async def test_an_engine_that_is_not_ready_ends_readiness() -> None:
    """As while its worker is gone: the stream stands, and requests would wait."""
    async with gateway_stack() as s:
        assert s.engine.server is not None
        await s.engine.server.set_ready(False)
        await until(s.gateway.front.obstacle)
        assert "not ready" in (await s.http.get("/health/ready")).json()["missing"]
        await s.engine.server.set_ready(True)
        await until(lambda: s.gateway.front.obstacle() is None)


async def test_too_many_requests_are_refused_and_a_draining_gateway_takes_none() -> None:
    async with gateway_stack(FakeEngine(held=True), max_concurrent_requests=1) as s:
        await hanging(s, read=False)
        error = await refusal(s.stub.Generate(gateway_pb2.GenerateRequest(text="x")))
        assert isinstance(error, ResourceExhausted)
        assert error.retry_after_ms == 1000
        draining = asyncio.create_task(s.gateway.drain())
        await until(lambda: s.gateway.front.draining)
        answer = await s.http.post("/v1/completions", json={"prompt": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        s.engine.held = False
        await draining
        assert s.engine.aborts == []
