"""The REST API over HttpBody: every route has its call, and a REST process in front answers as the gateway does."""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio
from google.api import annotations_pb2
from google.protobuf import json_format, message_factory

from protos import gateway_pb2, openai_rest_pb2
from services.common.channel import MAX_MESSAGE_BYTES
from services.common.errors import InvalidArgument, NotFound
from services.gateway.rest import routes
from services.gateway.rest.forward import Forward
from services.gateway.rest.renderer import Renderer
from services.gateway.rest.reply import Reply, error_body
from tests.gateway.client_checks import obedient, say
from tests.gateway.stack import Stack, gateway_stack

BODIES: dict[str, list[dict[str, object]]] = {
    "chat_completions": [{"messages": say("hello 🔥")}, {"messages": say("hello 🔥"), "stream": True}],
    "completions": [{"prompt": "x"}, {"prompt": "x", "stream": True, "n": 2}],
    "responses": [{"input": say("hey")}, {"input": say("hey"), "stream": True}],
    "embeddings": [{"input": ["a", "b"]}],
    "tokenize": [{"prompt": "ab"}, {"messages": say("x")}],
    "detokenize": [{"tokens": [104, 105]}],
}
MARK = {"x-request-id": "mine"}
in_one_loop = pytest.mark.asyncio(loop_scope="module")
each = pytest.mark.parametrize("row", routes.API, ids=lambda row: row.operation)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack() -> AsyncIterator[tuple[Stack, Forward]]:
    async with gateway_stack(obedient(per_step=64)) as s:
        forward = Forward(f"127.0.0.1:{s.gateway.grpc_port}")
        yield s, forward
        await forward.close()


async def text_of(reply: Reply) -> str:
    if isinstance(reply.body, bytes):
        return reply.body.decode()
    return b"".join([chunk async for chunk in reply.body]).decode()


def lasting(text: str) -> str:
    """Without what is new in every answer."""
    text = re.sub(r'"(created|created_at|completed_at)":[0-9.]+', "", text)
    return re.sub(r"msg_[0-9a-f]+", "msg", text)


def test_the_contract_has_a_call_for_every_route_and_no_other() -> None:
    service = openai_rest_pb2.DESCRIPTOR.services_by_name["OpenAiRestService"]
    called = set()
    for method in service.methods:
        rule = method.GetOptions().Extensions[annotations_pb2.http]
        verb = rule.WhichOneof("pattern")
        assert rule.body == ("*" if verb == "post" else "")
        called.add((verb.upper(), (rule.post or rule.get).replace("=**", "")))
    assert called == {(row.method, row.path) for row in routes.API}


@in_one_loop
@each
async def test_a_rest_process_in_front_answers_the_same(stack: tuple[Stack, Forward], row: routes.Row) -> None:
    s, forward = stack
    if row.method == "GET":
        direct = await s.http.get(row.path.replace("{model}", "bytes"))
        assert await text_of(await forward.call(row.operation, b"bytes", MARK)) == direct.text
        return
    for body in BODIES[row.operation]:
        direct = await s.http.post(row.path, json=body, headers=MARK)
        assert direct.status_code == 200
        request = direct.request.content
        reply = await forward.call(row.operation, request, MARK)
        assert reply.content_type == direct.headers["content-type"]
        assert lasting(await text_of(reply)) == lasting(direct.text)


@in_one_loop
@pytest.mark.parametrize("size", [1, 256 * 1024, 256 * 1024 + 1, MAX_MESSAGE_BYTES + 7])
async def test_a_long_document_comes_in_pieces_and_whole(
    stack: tuple[Stack, Forward], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    document = bytes(random.Random(size).choices(b"abc{}", k=1000)) * (size // 1000 + 1)

    async def long(*_: object) -> Reply:
        return Reply(document[:size])

    monkeypatch.setattr(Renderer, "call", long)
    reply = await stack[1].call("tokenize", b"{}", {})
    assert reply == Reply(document[:size])


@in_one_loop
@each
async def test_and_refuses_the_same(stack: tuple[Stack, Forward], row: routes.Row) -> None:
    _, forward = stack
    if row.operation == "models":
        return
    if row.operation == "model":
        with pytest.raises(NotFound) as missing:
            await forward.call("model", b"no/such", MARK)
        assert (missing.value.field, missing.value.reason) == ("model", "MODEL_NOT_FOUND")
        return
    with pytest.raises(InvalidArgument) as caught:
        await forward.call(row.operation, b'{"nonsense": 1}', MARK)
    assert caught.value.field == "nonsense"


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text()


def test_the_page_names_every_route_and_call() -> None:
    assert [row.path for row in routes.ROUTES if f"{row.method} {row.path}`" not in PAGE] == []
    calls = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"].methods
    assert [call.name for call in calls if f"`{call.name}`" not in PAGE] == []


def test_the_lines_of_the_page_are_requests() -> None:
    lines = re.findall(r"grpcurl -plaintext -d '(.*)' \S+ triptych\.v1\.GatewayService/(\w+)$", PAGE, re.MULTILINE)
    assert len(lines) == PAGE.count("grpcurl -plaintext -d")
    methods = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"].methods_by_name
    for text, method in lines:
        request = message_factory.GetMessageClass(methods[method].input_type)()
        assert json_format.Parse(text, request).ListFields()


@in_one_loop
@pytest.mark.parametrize("text", ["a", "\x01", '"', "\n", "\\", "日", "🔥", "\x7f", "%"])
async def test_a_refusal_fits_into_headers_whatever_it_quotes(stack: tuple[Stack, Forward], text: str) -> None:
    """A client's own words come back in several spellings; more than 8 KiB of them would be a failure of the call."""
    s, forward = stack
    body = json.dumps({text * 3000: 1}).encode()
    direct = await s.http.post("/v1/completions", content=body)
    with pytest.raises(InvalidArgument) as caught:
        await forward.call("completions", body, {})
    assert direct.status_code == 400
    assert error_body(caught.value) == direct.content
    key = gateway_pb2.ChatRequest(
        messages=[gateway_pb2.ChatMessage(role=text * 3000, content=[gateway_pb2.ContentPart(text="x")])]
    )
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        [message async for message in s.stub.Chat(key)]
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
