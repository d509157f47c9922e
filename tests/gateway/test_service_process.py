"""The gateway as a process: without torch, asked to end, and in front of a real engine and a simulated worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest

from services.local.cluster import Cluster, free_port
from tests.gateway.fake_engine import FakeEngine, until

ENGINE_METRICS = free_port()
ROOT = Path(__file__).resolve().parents[2]
WITHOUT_TORCH = (
    "import sys, runpy; sys.modules['torch'] = None; sys.argv[1:] = sys.argv[2:]; "
    "module = sys.orig_argv[3]; runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


@contextlib.asynccontextmanager
async def process(module: str, *arguments: str) -> AsyncIterator[tuple[subprocess.Popen[bytes], httpx.AsyncClient]]:
    """A role in a process that cannot import torch."""
    port = free_port()
    command = [sys.executable, "-c", WITHOUT_TORCH, module, f"--http-port={port}", *arguments]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, env=environ)  # noqa: ASYNC220
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            for _ in range(400):
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get("/health/ready")).status_code == 200:
                        break
                await asyncio.sleep(0.05)
            yield child, client
    finally:
        child.kill()
        child.wait()
        assert child.stderr is not None
        child.stderr.close()


async def test_it_starts_without_torch_serves_and_drains_on_sigterm() -> None:
    engine = FakeEngine(held=True)
    await engine.start()
    arguments = (f"--engine={engine.address}", f"--grpc-port={free_port()}")
    try:
        async with process("services.gateway", *arguments) as (child, client):
            live = asyncio.create_task(client.post("/v1/completions", json={"prompt": "x", "stream": True}))
            await until(lambda: engine.live)
            child.send_signal(signal.SIGTERM)
            for _ in range(400):
                ready = await client.get("/health/ready")
                if ready.status_code == 503:
                    break
                await asyncio.sleep(0.01)
            assert "draining" in ready.json()["missing"]
            refused = await client.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503
            engine.held = False
            answer = await live
            assert answer.text.endswith("data: [DONE]\n\n")
            assert await asyncio.to_thread(child.wait, 20) == 0
            assert child.stderr is not None
            lines = [json.loads(line) for line in child.stderr.read().splitlines()]
            (finished,) = [line for line in lines if line["event"] == "request finished"]
            assert finished["completion_tokens"] == 12
            assert finished["trace_id"]
        assert engine.aborts == []
    finally:
        await engine.kill()


async def test_a_rest_process_in_front_of_a_gateway() -> None:
    engine = FakeEngine()
    await engine.start()
    grpc_port = free_port()
    try:
        async with (
            process("services.gateway", f"--engine={engine.address}", f"--grpc-port={grpc_port}"),
            process("services.gateway.rest", f"--gateway=127.0.0.1:{grpc_port}") as (child, client),
            openai.AsyncOpenAI(base_url=f"{client.base_url}/v1", api_key="none", max_retries=0) as api,
        ):
            messages = [{"role": "user", "content": "hi"}]
            stream = await api.chat.completions.create(model="bytes", messages=messages, stream=True)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello world"
            with pytest.raises(openai.BadRequestError) as caught:
                await api.chat.completions.create(model="bytes", messages=messages, temperature=-1)
            assert caught.value.param == "temperature"
            with pytest.raises(openai.NotFoundError):
                await api.chat.completions.create(model="nope", messages=messages)
            assert [model.id async for model in api.models.list()] == ["bytes"]
            child.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(child.wait, 20) == 0
    finally:
        await engine.kill()


def test_a_wrong_option_and_a_port_in_use_are_said() -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "services.gateway", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)

    wrong = run("--htpp-port", "1")
    assert wrong.returncode == 2
    assert "--http-port" in wrong.stderr
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = run("--http-port", str(taken.getsockname()[1]))
    assert busy.returncode == 1
    assert "cannot listen" in busy.stderr


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    """Real processes; the worker answers a script."""
    script = tmp_path_factory.mktemp("script") / "script.json"
    long = "".join(chr(ord("a") + i % 26) for i in range(300))
    entries = [{"contains": "long", "text": long}, {"contains": "short", "text": "short answer"}]
    script.write_text(json.dumps({"requests": entries, "otherwise": {"text": "hello"}}))
    worker = {"simulated": True, "script": script, "simulated_step_us": 5000}
    engine = {"served_model_name": "simulated", "metrics_port": ENGINE_METRICS}
    with Cluster(worker=worker, engine=engine) as running:
        yield running


async def test_the_official_client_against_real_processes(cluster: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0) as api:
        messages = [{"role": "user", "content": "a short one"}]
        whole = await api.chat.completions.create(model="simulated", messages=messages, logprobs=True, n=2)
        assert [choice.message.content for choice in whole.choices] == ["short answer"] * 2
        assert [choice.finish_reason for choice in whole.choices] == ["stop"] * 2
        assert whole.choices[0].logprobs is not None
        stream = await api.completions.create(model="simulated", prompt="short", stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "short answer"
        echoed = await api.completions.create(model="simulated", prompt="short", echo=True, logprobs=1, max_tokens=3)
        logprobs = echoed.choices[0].logprobs
        assert echoed.choices[0].text == "shortsho"
        assert logprobs is not None
        assert logprobs.text_offset == list(range(8))  # one entry per token, the prompt's first has no value
        assert [value is None for value in logprobs.token_logprobs or []] == [True] + [False] * 7


async def test_equal_client_ids_do_not_mix(cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.http_url, timeout=30) as client:

        async def ask(prompt: str) -> str:
            body = {"prompt": prompt, "request_id": "same", "max_tokens": 50}
            return (await client.post("/v1/completions", json=body)).json()["choices"][0]["text"]

        answers = await asyncio.gather(ask("short"), ask("other"), ask("short"))
        assert answers == ["short answer", "hello", "short answer"]


async def test_an_engine_killed_and_restarted_leaves_the_stream_whole(cluster: Cluster) -> None:
    expected = "".join(chr(ord("a") + i % 26) for i in range(300))
    async with openai.AsyncOpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0) as api:
        stream = await api.completions.create(
            model="simulated", prompt="long", stream=True, max_tokens=400, n=2, stream_options={"include_usage": True}
        )
        texts = ["", ""]
        killed = False
        async for chunk in stream:
            for choice in chunk.choices:
                texts[choice.index] += choice.text
            if not killed and len(texts[0]) > 40:
                killed = True
                await asyncio.to_thread(cluster.kill, "engine")
                cluster.start_role("engine")
        assert texts == [expected, expected]


async def test_a_client_that_leaves_frees_its_blocks(cluster: Cluster) -> None:
    """Through the real engine: nothing runs afterwards."""
    async with httpx.AsyncClient(timeout=30) as client:

        async def running() -> float:
            text = (await client.get(f"http://127.0.0.1:{ENGINE_METRICS}/metrics")).text
            lines = [line for line in text.splitlines() if line.startswith("vllm:num_requests_running")]
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

        for stream in (True, False):
            body = {"prompt": "long", "stream": stream, "max_tokens": 400}
            with contextlib.suppress(httpx.ReadTimeout):
                async with client.stream(
                    "POST", f"{cluster.http_url}/v1/completions", json=body, timeout=0.3
                ) as answer:
                    await anext(answer.aiter_lines())
            for _ in range(100):
                if await running() == 0:
                    break
                await asyncio.sleep(0.02)
            assert await running() == 0
