"""The one table of errors: what each of them is on gRPC and on REST, as a refusal and in the middle of a stream."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import grpc
import grpc.aio
import httpx
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from protos import common_pb2, engine_pb2, gateway_pb2
from services.common import errors
from services.common.errors import TriptychError, from_code_number
from services.common.status import from_rpc_status, to_rpc_status
from services.gateway.rest.reply import error_body, error_headers
from services.gateway.text import ModelText
from tests.gateway.fake_engine import FakeEngine, until
from tests.gateway.stack import Stack, gateway_stack


class Row(NamedTuple):
    kind: type[TriptychError]
    code: grpc.StatusCode
    http: int
    type: str


Code = grpc.StatusCode
TABLE = (
    Row(errors.InvalidArgument, Code.INVALID_ARGUMENT, 400, "invalid_request_error"),
    Row(errors.DataLoss, Code.DATA_LOSS, 400, "invalid_request_error"),
    Row(errors.FailedPrecondition, Code.FAILED_PRECONDITION, 400, "invalid_request_error"),
    Row(errors.Unauthenticated, Code.UNAUTHENTICATED, 401, "authentication_error"),
    Row(errors.PermissionDenied, Code.PERMISSION_DENIED, 403, "permission_error"),
    Row(errors.NotFound, Code.NOT_FOUND, 404, "not_found_error"),
    Row(errors.OutOfRange, Code.OUT_OF_RANGE, 410, "invalid_request_error"),
    Row(errors.ResourceExhausted, Code.RESOURCE_EXHAUSTED, 429, "rate_limit_error"),
    Row(errors.Cancelled, Code.CANCELLED, 499, "cancelled"),
    Row(TriptychError, Code.INTERNAL, 500, "internal_error"),
    Row(errors.Fenced, Code.ABORTED, 500, "internal_error"),
    Row(errors.Unimplemented, Code.UNIMPLEMENTED, 501, "not_implemented_error"),
    Row(errors.Unavailable, Code.UNAVAILABLE, 503, "service_unavailable_error"),
    Row(errors.DeadlineExceeded, Code.DEADLINE_EXCEEDED, 504, "timeout_error"),
)
NUMBER = {row.code: row.code.value[0] for row in TABLE}
each = pytest.mark.parametrize("row", TABLE, ids=lambda row: row.code.name)
USER = gateway_pb2.ChatMessage(role="user", content=[gateway_pb2.ContentPart(text="hi")])
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def tree(kind: type[TriptychError]) -> Iterator[type[TriptychError]]:
    yield kind
    for below in kind.__subclasses__():
        if below.__module__ == errors.__name__:
            yield from tree(below)


def details(status: status_pb2.Status) -> dict[str, Any]:
    """The details of a status by the name of their type."""
    found: dict[str, Any] = {}
    for packed in status.details:
        for kind in (error_details_pb2.BadRequest, error_details_pb2.ErrorInfo, error_details_pb2.RetryInfo):
            message = kind()
            if packed.Unpack(message):
                found[kind.DESCRIPTOR.name] = message
    assert len(found) == len(status.details)
    return found


def test_the_table_has_every_error_once() -> None:
    assert {row.kind for row in TABLE} == set(tree(TriptychError))
    assert len({row.code for row in TABLE}) == len(TABLE)


# At the mapping


@each
def test_a_status_and_its_details(row: Row) -> None:
    error = row.kind("no good", field="top_p", reason="WHY", retry_after_ms=1500, error_id="id7")
    status = to_rpc_status(error)
    assert (status.code, status.message) == (NUMBER[row.code], "no good")
    said = details(status)
    (violation,) = said["BadRequest"].field_violations
    assert (violation.field, violation.description) == ("top_p", "no good")
    assert (said["ErrorInfo"].reason, said["ErrorInfo"].domain) == ("WHY", "triptych")
    assert dict(said["ErrorInfo"].metadata) == {"error_id": "id7"}
    assert said["RetryInfo"].retry_delay.ToMilliseconds() == 1500
    assert details(to_rpc_status(row.kind("no good"))) == {}


@each
def test_a_status_comes_back_as_the_same_error(row: Row) -> None:
    error = row.kind("no good", field="top_p", reason="WHY", retry_after_ms=1500, error_id="id7")
    for again in (
        from_rpc_status(to_rpc_status(error)),
        from_code_number(
            error.code_number, "no good", field="top_p", reason="WHY", retry_after_ms=1500, error_id="id7"
        ),
    ):
        assert type(again) is row.kind
        assert (again.message, again.field, again.reason) == ("no good", "top_p", "WHY")
        assert (again.retry_after_ms, again.error_id) == (1500, "id7")


@each
def test_an_error_object(row: Row) -> None:
    error = row.kind("no good", field="top_p", reason="WHY", retry_after_ms=1001)
    assert error.http_status == row.http
    assert json.loads(error_body(error)) == {
        "error": {"message": "no good", "type": row.type, "param": "top_p", "code": "why"}
    }
    assert error_headers(error) == {"retry-after": "2"}
    bare = row.kind("no good")
    assert json.loads(error_body(bare))["error"]["param"] is None
    assert json.loads(error_body(bare))["error"]["code"] == row.code.name.lower()
    assert error_headers(bare) == {}


def test_a_number_that_nobody_knows_is_an_internal_error() -> None:
    for number in (0, 2, 17, 4_000_000_000):
        assert type(from_code_number(number, "?")) is TriptychError
    assert from_rpc_status(status_pb2.Status(code=3, details=[any_pb2.Any(type_url="x/y", value=b"z")])).field is None


# Through a gateway: whatever the engine says


async def failed_call(call: Any) -> tuple[grpc.StatusCode, TriptychError, dict[str, Any]]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [message async for message in call]
    status = rpc_status.from_call(caught.value)
    assert status is not None
    return caught.value.code(), from_rpc_status(status), details(status)


BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
}


def failure(row: Row) -> common_pb2.Failure:
    return common_pb2.Failure(
        code=NUMBER[row.code], message=f"engine: {row.code.name}", field="prompt", reason="WHY", retry_after_ms=2500
    )


def shown(row: Row) -> dict[str, Any]:
    return {"message": f"engine: {row.code.name}", "type": row.type, "param": "prompt", "code": "why"}


async def test_a_refusal_has_its_status_on_both_protocols() -> None:
    """Streamed or not: nothing of the answer has been sent."""
    stream = gateway_pb2.RequestOptions(stream=True)
    async with gateway_stack() as s:
        for row in TABLE:
            s.engine.refuse = failure(row)
            for call in (
                s.stub.Generate(gateway_pb2.GenerateRequest(text="x")),
                s.stub.Chat(gateway_pb2.ChatRequest(messages=[USER], options=stream)),
            ):
                code, error, said = await failed_call(call)
                assert (code, type(error)) == (row.code, row.kind)
                assert said["BadRequest"].field_violations[0].field == "prompt"
                assert said["ErrorInfo"].reason == "WHY"
                assert said["RetryInfo"].retry_delay.ToMilliseconds() == 2500
            for path, streamed in (("/v1/chat/completions", True), ("/v1/completions", False), ("/v1/responses", True)):
                answer = await s.http.post(path, json={**BODIES[path], "stream": streamed})
                assert (answer.status_code, answer.json()["error"]) == (row.http, shown(row)), path
                assert answer.headers["retry-after"] == "3"
                assert answer.headers["content-type"] == "application/json"


async def step_of(s: Stack) -> None:
    await until(lambda: s.engine.live)
    s.engine.step()


def fail(s: Stack, row: Row) -> None:
    """What runs fails."""
    (handle,) = s.engine.live
    s.engine.live.clear()
    s.engine.send(engine_pb2.AttachResponse(failed=engine_pb2.Failed(handle=handle, failure=failure(row))))


@pytest.mark.parametrize("method", ["Generate", "Chat"])
async def test_a_failure_in_the_middle_of_a_grpc_stream_is_its_status(method: str) -> None:
    options = gateway_pb2.RequestOptions(stream=True)
    request: Any = gateway_pb2.GenerateRequest(text="x", options=options)
    if method == "Chat":
        request = gateway_pb2.ChatRequest(messages=[USER], options=options)
    async with gateway_stack(FakeEngine(held=True)) as s:
        for row in TABLE:
            call = aiter(getattr(s.stub, method)(request))
            await step_of(s)
            assert (await anext(call)).HasField("started")
            fail(s, row)
            code, error, said = await failed_call(call)
            assert (code, type(error), set(said)) == (row.code, row.kind, {"BadRequest", "ErrorInfo", "RetryInfo"})


@pytest.mark.parametrize("path", BODIES)
async def test_a_failure_in_the_middle_of_events_is_the_last_of_them(path: str) -> None:
    async with gateway_stack(FakeEngine(held=True)) as s:
        for row in TABLE:
            request = s.http.build_request("POST", path, json={**BODIES[path], "stream": True})
            sending = asyncio.create_task(s.http.send(request, stream=True))
            await step_of(s)
            answer = await sending
            assert answer.status_code == 200
            fail(s, row)
            *_, last = (await answer.aread()).decode().strip().split("\n\n")
            event = json.loads(last.partition("data: ")[2])
            if path == "/v1/responses":
                assert event["type"] == "response.failed"
                assert event["response"]["status"] == "failed"
                assert event["response"]["error"]["message"] == f"engine: {row.code.name}"
            else:
                assert event == {"error": shown(row)}


async def test_the_field_that_leaves_no_token_is_named_as_the_client_spells_it() -> None:
    no_token = common_pb2.Failure(code=3, message="no token is left", field="sampling")
    async with gateway_stack(FakeEngine(held=True)) as s:

        async def fail_next() -> None:
            await step_of(s)
            (handle,) = s.engine.live
            s.engine.live.clear()
            s.engine.send(engine_pb2.AttachResponse(failed=engine_pb2.Failed(handle=handle, failure=no_token)))

        for body, param in (
            ({"allowed_token_ids": [65], "bad_words": ["A"]}, "allowed_token_ids"),
            ({"response_format": {"type": "json_object"}, "min_tokens": 2}, "response_format"),
            ({"min_tokens": 2}, "min_tokens"),
        ):
            failing = asyncio.create_task(fail_next())
            answer = await s.http.post("/v1/chat/completions", json={**CHAT, **body})
            await failing
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
            assert answer.json()["error"]["message"] == f"{param}: no token is left"
        for stream in (False, True):
            sampling = gateway_pb2.SamplingOptions(bad_words=["A"])
            options = gateway_pb2.RequestOptions(stream=stream)
            failing = asyncio.create_task(fail_next())
            call = s.stub.Generate(gateway_pb2.GenerateRequest(text="x", sampling=sampling, options=options))
            code, error, _ = await failed_call(call)
            await failing
            assert (code, error.field) == (Code.INVALID_ARGUMENT, "sampling.bad_words")


# Through a gateway: what it says by itself


async def test_a_wrong_value_names_its_field() -> None:
    async with gateway_stack() as s:
        sampling = gateway_pb2.SamplingOptions(top_p=7)
        code, error, said = await failed_call(s.stub.Chat(gateway_pb2.ChatRequest(messages=[USER], sampling=sampling)))
        assert (code, error.field) == (Code.INVALID_ARGUMENT, "sampling.top_p")
        assert set(said) == {"BadRequest"}
        answer = await s.http.post("/v1/chat/completions", json={**CHAT, "top_p": 7})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_p")
        assert s.engine.submits == []


async def test_a_model_or_route_that_is_not_there() -> None:
    async with gateway_stack() as s:
        code, error, _ = await failed_call(s.stub.Chat(gateway_pb2.ChatRequest(messages=[USER], model="nope")))
        assert (code, error.field, error.reason) == (Code.NOT_FOUND, "model", "MODEL_NOT_FOUND")
        answer = await s.http.post("/v1/chat/completions", json={**CHAT, "model": "nope"})
        told = answer.json()["error"]
        assert (answer.status_code, told["param"], told["code"]) == (404, "model", "model_not_found")
        answer = await s.http.get("/v1/nothing")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "route_not_found")
        answer = await s.http.get("/v1/completions")
        assert (answer.status_code, answer.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_too_many_requests_hear_when_to_come_back() -> None:
    async with gateway_stack(FakeEngine(held=True), max_concurrent_requests=1) as s:
        first = s.stub.Generate(gateway_pb2.GenerateRequest(text="x"))
        await until(lambda: s.engine.live)
        code, error, said = await failed_call(s.stub.Chat(gateway_pb2.ChatRequest(messages=[USER])))
        assert (code, error.reason) == (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert said["RetryInfo"].retry_delay.ToMilliseconds() == 1000
        answer = await s.http.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.json()["error"]["type"]) == (429, "rate_limit_error")
        assert answer.headers["retry-after"] == "1"
        first.cancel()


async def test_without_an_engine_it_is_unavailable_for_now() -> None:
    async with gateway_stack(replay_budget_s=0) as s:
        await s.engine.kill()
        await until(s.gateway.front.obstacle)
        code, error, said = await failed_call(s.stub.Generate(gateway_pb2.GenerateRequest(text="x")))
        assert (code, error.reason) == (Code.UNAVAILABLE, "ENGINE_UNAVAILABLE")
        assert said["RetryInfo"].retry_delay.ToMilliseconds() == 1000
        answer = await s.http.post("/v1/completions", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        assert answer.headers["retry-after"] == "1"
        await s.engine.start()


async def test_what_is_not_built_is_unimplemented_and_a_field_of_it_is_refused() -> None:
    async with gateway_stack() as s:
        code, *_ = await failed_call(s.stub.Resume(gateway_pb2.ResumeRequest(token=b"x" * 16)))
        assert code is Code.UNIMPLEMENTED
        answer = await s.http.post("/v1/chat/completions", json={**CHAT, "store": True})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "store")


async def test_a_fault_of_ours_tells_an_id_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: object, **__: object) -> object:
        raise ZeroDivisionError("a secret")

    async with gateway_stack() as s:
        monkeypatch.setattr(ModelText, "chat", broken)
        monkeypatch.setattr(ModelText, "converse", broken)
        code, error, said = await failed_call(s.stub.Chat(gateway_pb2.ChatRequest(messages=[USER])))
        assert code is Code.INTERNAL
        assert error.error_id
        assert said["ErrorInfo"].metadata["error_id"] == error.error_id
        answer = await s.http.post("/v1/chat/completions", json=CHAT)
        message = answer.json()["error"]["message"]
        assert answer.status_code == 500
        assert "secret" not in error.message + message
        logged = caplog.text + "".join(str(record.__dict__) for record in caplog.records) + capfd.readouterr().err
        assert error.error_id in logged
        assert message.partition("error id ")[2].rstrip(")") in logged


async def test_who_gives_up_is_told_apart() -> None:
    """A client that leaves, and one whose time is over: nothing runs on for either."""
    async with gateway_stack(FakeEngine(held=True)) as s:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [m async for m in s.stub.Generate(gateway_pb2.GenerateRequest(text="x"), timeout=0.3)]
        assert caught.value.code() is Code.DEADLINE_EXCEEDED
        await until(lambda: not s.engine.live)
        call = s.stub.Generate(gateway_pb2.GenerateRequest(text="x"))
        await until(lambda: s.engine.live)
        call.cancel()
        assert await call.code() is Code.CANCELLED
        await until(lambda: not s.engine.live)
        with contextlib.suppress(httpx.ReadTimeout):
            await s.http.post("/v1/completions", json={"prompt": "x"}, timeout=0.3)
        await until(lambda: not s.engine.live)
        metrics = (await s.http.get("/metrics")).text
        assert 'http_requests_total{handler="/v1/completions",method="POST",status="499"} 1.0' in metrics


async def test_numbers_that_are_no_numbers_never_reach_json() -> None:
    """A refusal of them is JSON that strict readers take."""

    def strict(word: str) -> None:
        raise AssertionError(word)

    async with gateway_stack() as s:
        for value in ("NaN", "Infinity", "-Infinity", "1e999", '"nan"'):
            for name in ("temperature", "top_p", "min_p", "presence_penalty"):
                body = f'{{"prompt": "x", "{name}": {value}}}'
                answer = await s.http.post("/v1/completions", content=body)
                assert answer.status_code == 400
                json.loads(answer.text, parse_constant=strict)
        answer = await s.http.post("/v1/completions", json={"prompt": "x", "logprobs": 5})
        json.loads(answer.text, parse_constant=strict)
        assert -9999.0 in json.loads(answer.text)["choices"][0]["logprobs"]["top_logprobs"][0].values()
