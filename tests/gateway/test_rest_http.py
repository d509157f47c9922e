"""HTTP around an Api: routes, limits, errors, and clients that leave. Real sockets, a scripted Api."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping

import httpx
import pytest

from services.common.errors import InvalidArgument, ResourceExhausted, Unavailable
from services.common.server import Server
from services.gateway.rest import asgi, facade, forward, http
from services.gateway.rest.reply import DONE, SSE, Reply, event
from tests.gateway.fake_engine import until


class Scripted:
    """Answers by what the body says."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.closed = 0
        self.seen: list[tuple[str, bytes, Mapping[str, str]]] = []
        self.missing: str | None = None
        self.release = asyncio.Event()

    async def call(self, operation: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        self.seen.append((operation, body, headers))
        if body == b"hang":
            try:
                await self.release.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
        if body == b"bug":
            raise ZeroDivisionError
        if body == b"full":
            raise ResourceExhausted("queue is full", reason="QUEUE_FULL", retry_after_ms=1500)
        if body == b"bad":
            raise InvalidArgument("temperature: must be a number", field="temperature")
        if body in (b"stream", b"endless"):
            return Reply(Events(self, endless=body == b"endless"), SSE)
        return Reply(b'{"echo":"' + operation.encode() + b'"}')

    async def obstacle(self) -> str | None:
        return self.missing


class Events:
    def __init__(self, api: Scripted, endless: bool) -> None:
        self.api, self.endless = api, endless

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield event(b'{"n":1}')
        while self.endless:
            await asyncio.sleep(0.01)
            yield event(b'{"n":2}')
        yield DONE

    async def aclose(self) -> None:
        self.api.closed += 1


@contextlib.asynccontextmanager
async def serving(
    api: asgi.Api, limit: int = 1000
) -> AsyncIterator[tuple[httpx.AsyncClient, list[tuple[object, ...]]]]:
    observed: list[tuple[object, ...]] = []
    site = asgi.Site(api, "1.2.3", lambda: b"a_metric 1\n", "text/plain", limit, lambda *a: observed.append(a))
    server = http.HttpServer(asgi.application(site), http.bind("127.0.0.1", 0))
    await server.start()
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
            yield client, observed
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def forwarding(api: Scripted, limit: int = 1000) -> AsyncIterator[httpx.AsyncClient]:
    """The REST process in front of the facade."""
    grpc_server = Server(["127.0.0.1:0"])
    facade.OpenAiRest(api).add_to(grpc_server)
    await grpc_server.start(facade.SERVICE)
    await grpc_server.set_ready(True)
    front = forward.Forward(f"127.0.0.1:{grpc_server.ports[0]}")
    try:
        async with serving(front, limit) as (client, _):
            yield client
    finally:
        await front.close()
        await grpc_server.stop(0)


async def test_routes_reach_their_operations() -> None:
    api = Scripted()
    async with serving(api) as (client, observed):
        for path, operation in asgi.POSTS.items():
            answer = await client.post(path, content=b"x", headers={"x-request-id": "mine", "traceparent": "t"})
            assert answer.json() == {"echo": operation}
            assert answer.headers["x-request-id"] == "mine"
            assert api.seen[-1][2]["traceparent"] == "t"
        assert (await client.get("/v1/models")).json() == {"echo": "models"}
        assert (await client.get("/v1/models/org/name")).json() == {"echo": "model"}
        assert api.seen[-1][1] == b"org/name"
        assert (await client.get("/version")).json() == {"version": "1.2.3"}
        assert (await client.get("/metrics")).text == "a_metric 1\n"
        assert (await client.get("/health/live")).status_code == 200
        assert (await client.get("/health/ready")).status_code == 200
        api.missing = "the engine"
        assert (await client.get("/health")).json() == {"status": "not ready", "missing": "the engine"}
        assert (await client.get("/health/ready")).status_code == 503
        assert observed[0][:3] == ("POST", "/v1/chat/completions", 200)


async def test_a_request_id_is_made_where_none_or_a_bad_one_came() -> None:
    async with serving(Scripted()) as (client, _):
        for given in (None, "two words", "é", "", "x" * 129, "x" * 200):
            headers = {} if given is None else {"x-request-id": given.encode()}
            answer = await client.post("/tokenize", content=b"x", headers=headers)
            assert len(answer.headers["x-request-id"]) == 32
        for given in ("x" * 128, "!~"):
            answer = await client.post("/tokenize", content=b"x", headers={"x-request-id": given})
            assert answer.headers["x-request-id"] == given


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", "/v1/chat/completions", 405), ("POST", "/health", 405)],
)
async def test_unknown_routes_and_methods_get_the_error_object(method: str, path: str, status: int) -> None:
    async with serving(Scripted()) as (client, _):
        answer = await client.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert path in answer.json()["error"]["message"]


async def test_a_body_over_the_limit_is_refused_with_the_limit() -> None:
    """With a Content-Length and without one."""

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"x" * 100

    api = Scripted()
    async with serving(api) as (client, _):
        for content in (b"x" * 1001, pieces()):
            answer = await client.post("/v1/completions", content=content)
            assert answer.status_code == 413
            assert "1000" in answer.json()["error"]["message"]
        assert (await client.post("/v1/completions", content=b"x" * 1000)).status_code == 200


@pytest.mark.parametrize("through", [serving, forwarding])
async def test_errors_keep_status_field_and_retry_after(through) -> None:
    async with through(Scripted()) as served:
        client = served if isinstance(served, httpx.AsyncClient) else served[0]
        bad = await client.post("/v1/completions", content=b"bad")
        assert bad.status_code == 400
        assert bad.json()["error"] == {
            "message": "temperature: must be a number",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_argument",
        }
        full = await client.post("/v1/completions", content=b"full")
        assert (full.status_code, full.headers["retry-after"]) == (429, "2")
        assert full.json()["error"]["code"] == "queue_full"
        bug = await client.post("/v1/completions", content=b"bug")
        assert bug.status_code == 500
        assert "error id" in bug.json()["error"]["message"]
        assert (await client.post("/v1/completions", content=b"x")).status_code == 200


@pytest.mark.parametrize("through", [serving, forwarding])
async def test_events_pass_as_they_are(through) -> None:
    async with through(Scripted()) as served:
        client = served if isinstance(served, httpx.AsyncClient) else served[0]
        answer = await client.post("/v1/chat/completions", content=b"stream")
        assert answer.headers["content-type"] == SSE
        assert answer.text == 'data: {"n":1}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("through", [serving, forwarding])
async def test_a_client_that_leaves_ends_its_request(through) -> None:
    """Not streaming, then streaming."""
    api = Scripted()
    async with through(api) as served:
        client = served if isinstance(served, httpx.AsyncClient) else served[0]
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/v1/completions", content=b"hang", timeout=0.2)
        await until(lambda: api.cancelled == 1)
        async with client.stream("POST", "/v1/completions", content=b"endless") as answer:
            await anext(answer.aiter_lines())
        await until(lambda: api.closed == 1)
        if not isinstance(served, httpx.AsyncClient):
            await until(lambda: len(served[1]) == 2)
            assert [entry[2] for entry in served[1]] == [499, 499]


async def test_the_rest_process_says_when_its_gateway_is_not_there() -> None:
    front = forward.Forward("127.0.0.1:1")
    async with serving(front) as (client, _):
        assert "gateway at 127.0.0.1:1" in (await client.get("/health/ready")).json()["missing"]
        answer = await client.post("/v1/completions", content=b"{}")
        assert answer.status_code == Unavailable.http_status
        assert answer.json()["error"]["type"] == "service_unavailable_error"
    await front.close()
