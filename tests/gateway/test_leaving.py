"""Clients that leave, and clients that do not read. The engine makes no step meanwhile: leaving alone must do it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from protos import common_pb2, gateway_pb2
from tests.gateway.fake_engine import FakeEngine, until
from tests.gateway.stack import Stack, gateway_stack

BODY: dict[str, Any] = {"prompt": "x", "max_tokens": 400}


def request(body: bytes, *, path: str = "/v1/completions", length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body) if length is None else length}\r\n\r\n"
    return head.encode() + body


class Client:
    """One TCP connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, *requests: bytes) -> None:
        self.writer.write(b"".join(requests))
        await self.writer.drain()

    async def leave(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()

    async def reset(self) -> None:
        """Leaves without a goodbye."""
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.writer.transport.abort()

    async def half_close(self) -> None:
        """Sends nothing more, and would still read."""
        self.writer.write_eof()


@contextlib.asynccontextmanager
async def connected(s: Stack) -> AsyncIterator[Client]:
    client = Client(*await asyncio.open_connection("127.0.0.1", s.gateway.http.port))
    try:
        yield client
    finally:
        await client.leave()


Leave = Callable[[Client], Awaitable[None]]
LEAVES: tuple[Leave, ...] = (Client.leave, Client.reset, Client.half_close)


async def test_a_request_ends_at_the_engine_before_its_next_step() -> None:
    """While it waits or prefills, and while it decodes; streaming and not."""
    engine = FakeEngine(script=lambda *_: [65] * 400, held=True)
    async with gateway_stack(engine) as s:
        for leave, stream, steps in itertools.product(LEAVES, (False, True), (0, 3)):
            async with connected(s) as client:
                await client.send(request(json.dumps({**BODY, "stream": stream}).encode()))
                await until(lambda: engine.live)
                for _ in range(steps):
                    engine.step()
                if stream and steps:
                    assert b'"text":"A"' in await client.reader.readuntil(b"\n\n")
                before = engine.step_number
                await leave(client)
                await until(lambda: not engine.live and not s.gateway.router.live)
                assert engine.step_number == before
        assert len(engine.aborts) == 12
        told = (await s.http.get("/metrics")).text
        assert 'request_success_total{engine="fake",finished_reason="abort",model_name="bytes"} 12.0' in told


async def test_requests_behind_the_one_that_is_answered_are_never_begun() -> None:
    engine = FakeEngine(script=lambda *_: [65] * 400, held=True)
    one = request(json.dumps({**BODY, "stream": True}).encode())
    async with gateway_stack(engine) as s:
        for number, leave in enumerate(LEAVES, 1):
            async with connected(s) as client:
                await client.send(one, one, one)
                await until(lambda: engine.live)
                engine.step()
                await client.reader.readuntil(b"\n\n")
                await leave(client)
                await until(lambda: not engine.live and not s.gateway.router.live)
                assert (len(engine.submits), len(engine.aborts), engine.step_number) == (number, number, number)


async def test_requests_on_one_connection_are_answered_in_order() -> None:
    async with gateway_stack() as s, connected(s) as client:
        bodies = [json.dumps({"prompt": prompt, "max_tokens": 11}).encode() for prompt in ("a", "bb", "ccc")]
        await client.send(*map(request, bodies))
        for length in (1, 2, 3):
            head = await client.reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            answer = json.loads(await client.reader.readexactly(size))
            assert answer["usage"]["prompt_tokens"] == length
            assert answer["choices"][0]["text"] == "hello world"


async def test_a_body_that_is_never_finished_begins_nothing() -> None:
    async with gateway_stack() as s:
        for number, (leave, part) in enumerate(itertools.product(LEAVES, (b"", b'{"prompt": "never en')), 1):
            async with connected(s) as client:
                await client.send(request(part, length=1000))
                await asyncio.sleep(0.01)
                await leave(client)
                told = f'http_requests_total{{handler="/v1/completions",method="POST",status="499"}} {number}.0'
                await until(lambda told=told: told in s.gateway.metrics.render().decode())  # type: ignore[misc]
        assert s.engine.submits == []
        answer = await s.http.post("/v1/completions", json={"prompt": "x"})
        assert answer.status_code == 200


async def test_a_call_ends_at_the_engine_before_its_next_step() -> None:
    engine = FakeEngine(script=lambda *_: [65] * 400, held=True)
    turn = gateway_pb2.ChatMessage(role="user", content=[gateway_pb2.ContentPart(text="hi")])
    async with gateway_stack(engine) as s:
        for stream, steps, chat in itertools.product((False, True), (0, 3), (False, True)):
            options = gateway_pb2.RequestOptions(stream=stream)
            call = (
                s.stub.Chat(gateway_pb2.ChatRequest(messages=[turn], options=options))
                if chat
                else s.stub.Generate(gateway_pb2.GenerateRequest(text="x", options=options))
            )
            await until(lambda: engine.live)
            for _ in range(steps):
                engine.step()
            if stream and steps:
                await call.read()
            before = engine.step_number
            call.cancel()
            await until(lambda: not engine.live and not s.gateway.router.live)
            assert engine.step_number == before
        assert [abort.reason for abort in engine.aborts] == [common_pb2.FINISH_REASON_ABORT] * 8


@contextlib.asynccontextmanager
async def silent(s: Stack, body: dict[str, Any]) -> AsyncIterator[socket.socket]:
    """A client that asks and does not read."""
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(slow, ("127.0.0.1", s.gateway.http.port))
        await loop.sock_sendall(slow, request(json.dumps(body).encode()))
        yield slow


def unsent(s: Stack) -> int:
    """Bytes that the fullest connection keeps."""
    connections = s.gateway.http._server.server_state.connections
    return max(connection.transport.get_write_buffer_size() for connection in connections)  # type: ignore[union-attr]


async def test_a_client_that_does_not_read_holds_its_own_tokens_and_nobody_up() -> None:
    """Its connection's buffer stays small, others go on, and what it reads later is whole, in fewer chunks."""
    tokens = 400
    engine = FakeEngine(script=lambda *_: [65] * tokens)
    async with gateway_stack(engine) as s:
        body = {"prompt": ["x"] * 4, "n": 8, "max_tokens": tokens, "stream": True}
        async with silent(s, body) as slow:
            await until(lambda: engine.step_number >= tokens)
            answer = await s.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
            assert answer.json()["choices"][0]["text"] == "AAA"
            assert 0 < unsent(s) < 1 << 17
            received = b""
            while not received.endswith(b"0\r\n\r\n"):
                received += await asyncio.get_running_loop().sock_recv(slow, 1 << 20)
        events = [part.split(b"\n\n")[0] for part in received.split(b"data: ")]
        texts = [json.loads(part)["choices"][0]["text"] for part in events if part.startswith(b"{")]
        assert "".join(texts) == "A" * (32 * tokens)
        assert len(texts) < 32 * tokens // 2


async def test_a_client_that_does_not_read_is_seen_to_leave() -> None:
    engine = FakeEngine(script=lambda *_: [65] * 400)
    async with gateway_stack(engine) as s:
        async with silent(s, {"prompt": ["x"] * 4, "n": 8, "max_tokens": 400, "stream": True}):
            await until(lambda: engine.step_number >= 300)
            engine.held = True
            assert unsent(s) > 0
        await until(lambda: not engine.live and not s.gateway.router.live)
        assert len(engine.aborts) == 4
