"""The engine as a process of its own: no torch, no numpy, signals, metrics, logs, bad settings."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from services.engine.__main__ import main
from services.engine.events import FINISH_LENGTH
from tests.engine.cluster import ROOT, Gateway

BLOCKED = """
import asyncio, sys
sys.modules["torch"] = None
sys.modules["numpy"] = None
from services.engine.__main__ import main
sys.exit(asyncio.run(main(sys.argv[1:])))
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


class EngineProcess:
    """An engine in a process that can import neither torch nor numpy."""

    def __init__(self, worker: str, listen: str, log: Path, *options: str) -> None:
        self.metrics_port = free_port()
        self.log = log
        command = [sys.executable, "-c", BLOCKED, "--worker", worker, "--listen", listen, *options]
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*command, "--metrics-port", str(self.metrics_port)], cwd=ROOT, stderr=stderr
            )

    async def ended(self) -> int:
        return await asyncio.wait_for(asyncio.to_thread(self.process.wait), 20)

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def scrape(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
            return text


def exists(address: str) -> bool:
    return Path(address.removeprefix("unix:")).exists()


async def test_it_serves_is_measured_and_drains_without_torch_or_numpy(
    worker: str, listen: str, tmp_path: Path
) -> None:
    engine = EngineProcess(worker, listen, tmp_path / "log", "--served-model-name", "toy")
    gateway = Gateway(listen)
    try:
        hello = await gateway.wait_until_served()
        assert hello.model.name == "toy"
        await gateway.attach()
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        await gateway.generate([1, 2, 3], handle=4, traceparent=parent)
        live = await gateway.submit(5, [1, 2, 3], max_tokens=300)
        await gateway.until(lambda: live.tokens)
        scraped = await asyncio.to_thread(engine.scrape)
        engine.process.send_signal(signal.SIGTERM)
        await gateway.until(lambda: gateway.draining)
        refused = await gateway.submit(6, [1])
        await gateway.finished(5, 6)
        assert refused.rejected is not None
        assert live.finish == {0: FINISH_LENGTH}
        assert await engine.ended() == 0
    finally:
        engine.process.kill()
        engine.process.wait()
        await gateway.close()
    assert not exists(listen)

    labels = 'engine="engine",model_name="toy"'
    assert f"vllm:num_requests_running{{{labels}}} 1.0" in scraped
    assert f"vllm:prompt_tokens_total{{{labels}}} 6.0" in scraped
    assert re.search(
        r'triptych:engine_finished_choices_total{engine="engine",finished_reason="length",.*} 1.0', scraped
    )
    assert f"vllm:request_prefill_time_seconds_count{{{labels}}} 1.0" in scraped

    finished = [line for line in engine.lines() if line["event"] == "request finished"]
    assert [line["request_id"] for line in finished] == ["r4", "r5"]
    first = finished[0]
    assert first["trace_id"] == "0af7651916cd43dd8448eb211c80319c"
    assert (first["prompt_tokens"], first["cached_tokens"], first["output_tokens"]) == (3, 0, 8)
    assert first["finish"] == ["length"]
    assert first["queue_ms"] >= 0


async def test_a_second_signal_ends_it_at_once(worker: str, listen: str, tmp_path: Path) -> None:
    engine = EngineProcess(worker, listen, tmp_path / "log")
    gateway = Gateway(listen)
    try:
        await gateway.wait_until_served()
        await gateway.attach()
        live = await gateway.submit(1, [1], max_tokens=8000)
        await gateway.until(lambda: live.tokens)
        engine.process.send_signal(signal.SIGINT)
        await gateway.until(lambda: gateway.draining)
        engine.process.send_signal(signal.SIGINT)
        assert await engine.ended() == 1
    finally:
        engine.process.kill()
        engine.process.wait()
        await gateway.close()


async def test_the_time_to_drain_is_limited(worker: str, listen: str, tmp_path: Path) -> None:
    engine = EngineProcess(worker, listen, tmp_path / "log", "--drain-s", "0.2")
    gateway = Gateway(listen)
    try:
        await gateway.wait_until_served()
        await gateway.attach()
        live = await gateway.submit(1, [1], max_tokens=8000)
        await gateway.until(lambda: live.tokens)
        engine.process.send_signal(signal.SIGTERM)
        assert await engine.ended() == 0
    finally:
        engine.process.kill()
        engine.process.wait()
        await gateway.close()
    assert [line["left"] for line in engine.lines() if line["event"] == "drained"] == [1]


async def test_bad_settings_are_said_and_end_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert await main(["--max-num-seqz", "3"]) == 2
    assert await main(["--listen", "unix:/" + "x" * 200]) == 2
    assert await main(["--worker", "a:1,b:2"]) == 2
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert await main(["--listen", address]) == 2
        assert await main(["--listen", "unix:" + str(tmp_path / "e"), "--metrics-port", address.split(":")[1]]) == 2
    said = capsys.readouterr().err
    assert "--max-num-seqs" in said
    assert "107 bytes" in said
    assert f"--metrics-port: cannot listen on {address}" in said
    assert "rank" in said


async def test_an_idle_engine_needs_no_time(worker: str, listen: str, tmp_path: Path) -> None:
    engine = EngineProcess(worker, listen, tmp_path / "log")
    gateway = Gateway(listen)
    try:
        await gateway.wait_until_served()
        stat = Path(f"/proc/{engine.process.pid}/stat")

        def ticks() -> int:
            return sum(int(number) for number in stat.read_text().rsplit(")", 1)[1].split()[11:13])

        before = ticks()
        await asyncio.sleep(1.5)
        assert ticks() - before <= 5, "in hundredths of a second"
    finally:
        engine.process.kill()
        engine.process.wait()
        await gateway.close()
