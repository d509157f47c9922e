"""The worker as a process: without torch, with wrong settings, ended by a signal, killed by a script."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from protos import worker_pb2, worker_pb2_grpc
from services.common.channel import backoff, connect
from services.common.server import LOOK_S
from services.common.settings import SettingsError
from services.worker.__main__ import build_blobs, build_runner
from services.worker.config import WorkerSettings
from services.worker.step import Runner
from tests.worker.columns import frame, new_row
from tests.worker.harness import Worker, texts

WITHOUT_TORCH = "import asyncio, sys; sys.modules['torch'] = None; import services.worker.__main__ as m; "
RUN = WITHOUT_TORCH + "sys.exit(asyncio.run(m.main(sys.argv[1:])))"


@contextmanager
def process(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", RUN, "--listen", f"unix:{folder}/w.sock", "--metrics-port", "0", *arguments]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            if running.poll() is None:
                running.kill()


async def ready(channel: grpc.aio.Channel, wanted: bool = True) -> None:
    status = health_pb2.HealthCheckResponse.SERVING if wanted else health_pb2.HealthCheckResponse.NOT_SERVING
    stub = health_pb2_grpc.HealthStub(channel)
    async for _ in backoff():
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest())
        except grpc.aio.AioRpcError:
            continue
        if answer.status == status:
            return


def logged(running: subprocess.Popen[str]) -> list[dict[str, Any]]:
    assert running.stderr is not None
    return [json.loads(line) for line in running.stderr.read().splitlines()]


async def test_without_torch_until_sigterm(tmp_path: Path) -> None:
    with process(tmp_path, "--simulated", "--simulated-step-us", "0") as running:
        async with connect(f"unix:{tmp_path}/w.sock") as channel:
            await ready(channel)
            worker = Worker(None, None, worker_pb2_grpc.WorkerServiceStub(channel))  # type: ignore[arg-type]
            await worker.prepare()
            stream = await worker.open()
            row = new_row(0, b"abc")
            row.traceparent = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
            assert (await stream.run(frame(1, [(0, 0, 3)], [row]))).status == worker_pb2.STEP_STATUS_OK
            await stream.call.done_writing()
            assert await stream.call.read() is grpc.aio.EOF
        running.send_signal(signal.SIGTERM)
        assert running.wait(10) == 0
        lines = logged(running)
    (freed,) = [line for line in lines if line["event"] == "row freed"]
    assert freed["request_id"] == "request-0"
    assert freed["trace_id"] == "0123456789abcdef0123456789abcdef"
    assert (freed["prompt_tokens"], freed["computed_tokens"], freed["sampled_tokens"]) == (3, 3, 1)
    assert not (tmp_path / "w.sock").exists()


async def test_a_worker_that_idles_sees_that_its_readiness_has_changed(tmp_path: Path) -> None:
    with process(tmp_path, "--simulated") as running:
        async with connect(f"unix:{tmp_path}/w.sock") as channel:
            await ready(channel)
            worker = Worker(None, None, worker_pb2_grpc.WorkerServiceStub(channel))  # type: ignore[arg-type]
            await worker.prepare()
            await asyncio.sleep(1.2 * LOOK_S[True])  # nobody looks any more
            await worker.stub.Sleep(worker_pb2.WorkerServiceSleepRequest(level=2, engine_incarnation=5))
            await ready(channel, False)
            await worker.stub.WakeUp(worker_pb2.WorkerServiceWakeUpRequest(engine_incarnation=5))
            await ready(channel)
        running.terminate()
        assert running.wait(10) == 0


async def test_a_script_may_kill_it_after_the_results_before(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"otherwise": {"text": "abc", "die_at": 2}}))
    with process(tmp_path, "--simulated", "--script", str(script)) as running:
        async with connect(f"unix:{tmp_path}/w.sock") as channel:
            await ready(channel)
            worker = Worker(None, None, worker_pb2_grpc.WorkerServiceStub(channel))  # type: ignore[arg-type]
            await worker.prepare()
            stream = await worker.open()
            await stream.send(step=frame(1, [(0, 0, 1)], [new_row(0, b"x")]))
            await stream.send(step=frame(2, [(0, 1, 1)]))
            await stream.send(step=frame(3, [(0, 2, 1)]))
            assert texts([await stream.result(), await stream.result()]) == b"ab"
            with pytest.raises(grpc.aio.AioRpcError):
                await stream.result()
        assert running.wait(10) == 1


def test_a_wrong_setting_is_named(tmp_path: Path) -> None:
    with process(tmp_path, "--simulate") as running:
        assert running.wait(20) == 2
        assert running.stderr is not None
        assert "unknown option '--simulate'; did you mean '--simulated'?" in running.stderr.read()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with process(tmp_path, "--simulated", f"--metrics-port={port}") as running:
            assert running.wait(20) == 2
            assert running.stderr is not None
            assert f"--metrics-port: cannot listen on 127.0.0.1:{port}" in running.stderr.read()


def a_runner(settings: WorkerSettings) -> Runner:
    return build_runner(settings, build_blobs(settings))


@pytest.mark.parametrize("windows", ["", "0,", "0,x", "-1", "0;128"])
def test_kv_windows_that_are_none(windows: str) -> None:
    with pytest.raises(SettingsError, match="--simulated-kv-windows"):
        a_runner(WorkerSettings.build(simulated=True, simulated_kv_windows=windows))


def test_kv_windows_are_groups() -> None:
    loaded = a_runner(WorkerSettings.build(simulated=True, simulated_kv_windows="0, 128")).load("", None)
    assert [group.sliding_window for group in loaded.kv_groups] == [None, 128]


def test_a_script_needs_a_simulated_worker() -> None:
    with pytest.raises(SettingsError, match="add --simulated"):
        a_runner(WorkerSettings.build(script="x.json"))
