"""The load generator against a server whose every answer is known."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import aiohttp
import pytest
from aiohttp import web

from services.cli import bench, load


class Server:
    """Speaks just enough of the OpenAI API, and counts how many requests it has at once."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []
        self.now = self.most = 0
        self.answers = ["one", " two", " three"]
        self.status = 200
        self.tail = b"data: [DONE]\n\n"
        self.url = ""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            return await self.stream(request)
        finally:
            self.now -= 1

    async def stream(self, request: web.Request) -> web.StreamResponse:
        if self.status != 200:
            return web.json_response({"error": {"message": "no"}}, status=self.status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        chat = request.path.endswith("chat/completions")
        for text in self.answers:
            choice = {"delta": {"content": text}} if chat else {"text": text}
            whole = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
            await response.write(whole[:9])
            await asyncio.sleep(0.001)
            await response.write(whole[9:])
        usage = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}}
        await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n" + self.tail)
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "known"}]})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"tokens": list(body["prompt"].encode())})

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        return web.json_response({"prompt": bytes(body["tokens"]).decode()})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    known = Server()
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/v1/completions", known.generate)
    app.router.add_post("/v1/chat/completions", known.generate)
    app.router.add_get("/v1/models", known.models)
    app.router.add_post("/tokenize", known.tokenize)
    app.router.add_post("/detokenize", known.detokenize)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    known.url = f"http://{host}:{port}"
    yield known
    await runner.cleanup()


@pytest.mark.parametrize("chat", [False, True])
async def test_one_request_is_timed_text_by_text(server: Server, chat: bool) -> None:
    async with aiohttp.ClientSession() as session:
        timing = await load.measure(session, load.Target(server.url, "known", chat, 3), "hello")
    assert timing.error == ""
    assert len(timing.texts) == 3
    assert timing.sent < timing.texts[0] < timing.texts[1] < timing.texts[2] <= timing.ended
    assert (timing.prompt_tokens, timing.output_tokens, timing.cached_tokens) == (5, 3, 2)
    asked = server.bodies[0]
    assert (asked["max_tokens"], asked["min_tokens"], asked["ignore_eos"], asked["temperature"]) == (3, 3, True, 0.0)


async def test_the_loop_is_closed(server: Server) -> None:
    async with aiohttp.ClientSession() as session:
        timings = await load.run(session, load.Target(server.url, "known", False, 3), [f"p{i}" for i in range(10)], 4)
    assert len(timings) == 10
    assert server.most == 4
    assert sorted(body["prompt"] for body in server.bodies) == sorted(f"p{i}" for i in range(10))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": 503}, "HTTP 503"),
        ({"answers": []}, "no text"),
        ({"tail": b'data: {"error": {"message": "lost"}}\n\n'}, "lost"),
        ({"tail": b"data: {nonsense\n\n"}, "JSONDecodeError"),
    ],
)
async def test_failures_are_kept_with_the_request(server: Server, change: dict, message: str) -> None:
    vars(server).update(change)
    async with aiohttp.ClientSession() as session:
        timing = await load.measure(session, load.Target(server.url, "known", False, 3), "hello")
    assert message in timing.error


async def test_nobody_listens() -> None:
    async with aiohttp.ClientSession() as session:
        timing = await load.measure(session, load.Target("http://127.0.0.1:9", "known", False, 3), "hello")
    assert "Connect" in timing.error


async def test_bench_prints_a_line_of_json_per_run(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    settings = bench.BenchSettings.build(
        base_url=server.url, concurrency=2, requests=4, prompt_tokens=30, output_tokens=3, runs=2, json_lines=True
    )
    figures = await bench.measure(settings)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["run"] for line in lines] == [0, 1]
    assert all(run.failed == 0 and run.requests == 4 and run.output_tokens == 12 for run in figures)
    measured = [body for body in server.bodies if body["max_tokens"] == 3]
    assert {len(body["prompt"]) for body in measured} == {30}
    assert len({body["prompt"] for body in measured}) == 8


def test_a_prefix_longer_than_the_prompt_is_refused() -> None:
    with pytest.raises(bench.SettingsError, match="shared-prefix-tokens"):
        bench.main("bench", ["--shared-prefix-tokens", "128"])


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main("bench", ["--base-url", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9" in capsys.readouterr().err
