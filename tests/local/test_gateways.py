"""Several gateways on the same two ports, before one engine. Real processes and a simulated worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc.aio
import httpx
import pytest

from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from services.cli.top import command
from services.local import cluster as local
from services.local.cluster import Cluster, ClusterError, free_port
from tests.local.test_cluster import PATIENCE_S, children, serve, wait_for_line, wait_gone

NAMES = {"gateway-0", "gateway-1"}
SLOW = "a slow answer, " * 3
SCRIPT = {
    "requests": [
        {"contains": "endless", "random": True},
        {"contains": "slow", "text": SLOW, "delay_ms": 20},
    ],
    "otherwise": {"text": "hello"},
}


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gateways") / "script.json"
    path.write_text(json.dumps(SCRIPT))
    return path


@pytest.fixture(scope="module")
def cluster(script: Path) -> Iterator[Cluster]:
    with Cluster(gateways=2, worker={"simulated": True, "script": script, "simulated_step_us": 5000}) as running:
        yield running


def value(url: str, series: str) -> float:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    return float(next(line for line in lines if line.startswith(series)).rsplit(" ", 1)[1])


def who(client: httpx.Client) -> str:
    """The gateway at the other end of a connection that is kept open."""
    found = re.search(r'triptych:gateway_info{gateway="([^"]+)"', client.get("/metrics").text)
    assert found
    return found[1]


@contextlib.contextmanager
def connections(url: str) -> Iterator[dict[str, httpx.Client]]:
    """A kept connection to each gateway: the kernel chooses by the client's port, so some tries reach both."""
    with contextlib.ExitStack() as stack:
        reached: dict[str, httpx.Client] = {}
        for _ in range(100):
            client = stack.enter_context(httpx.Client(base_url=url, timeout=PATIENCE_S, verify=False))
            reached.setdefault(who(client), client)
            if reached.keys() == NAMES:
                break
        yield reached


def test_equal_ids_of_clients_do_not_mix_through_two_gateways(cluster: Cluster) -> None:
    def ask(client: httpx.Client, prompt: str) -> tuple[str, str]:
        body = {"prompt": prompt, "request_id": "same", "max_tokens": len(SLOW)}
        answer = client.post("/v1/completions", json=body).json()
        return answer["id"], answer["choices"][0]["text"]

    with connections(cluster.http_url) as reached, ThreadPoolExecutor(2) as pool:
        asked = [
            pool.submit(ask, reached[name], prompt) for name, prompt in zip(sorted(NAMES), ("slow", "x"), strict=True)
        ]
        assert [answer.result() for answer in asked] == [("cmpl-same", SLOW), ("cmpl-same", "hello")]
    for name in (*sorted(NAMES), "engine", "worker"):
        with urllib.request.urlopen(cluster.metrics_url(name), timeout=PATIENCE_S) as page:
            samples = [line for line in page.read().decode().splitlines() if not line.startswith("#")]
        assert samples
        assert not [line for line in samples if float(line.rsplit(" ", 1)[1]) < 0]


@dataclass
class Stream:
    """A live stream through a channel of its own."""

    channel: grpc.aio.Channel
    call: grpc.aio.UnaryStreamCall
    token: bytes

    @property
    def stub(self) -> gateway_pb2_grpc.GatewayServiceStub:
        return gateway_pb2_grpc.GatewayServiceStub(self.channel)


@contextlib.asynccontextmanager
async def streams(cluster: Cluster) -> AsyncIterator[dict[str, Stream]]:
    """An endless stream through each gateway, over gRPC."""
    async with contextlib.AsyncExitStack() as stack:
        reached: dict[str, Stream] = {}
        for _ in range(100):
            options = [("grpc.use_local_subchannel_pool", 1)]  # else all channels share one connection
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(cluster.grpc_address, options))
            before = live(cluster)
            call = gateway_pb2_grpc.GatewayServiceStub(channel).Generate(
                gateway_pb2.GenerateRequest(
                    text="endless",
                    sampling=gateway_pb2.SamplingOptions(max_tokens=2000),
                    options=gateway_pb2.RequestOptions(stream=True),
                )
            )
            first = await call.read()
            after = live(cluster)
            name = next(name for name in NAMES if after[name] > before[name])
            reached.setdefault(name, Stream(channel, call, first.started.token))
            if reached.keys() == NAMES:
                break
        yield reached


def wait_for_live(metrics: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not value(metrics, "triptych:gateway_live_requests"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def live(cluster: Cluster) -> dict[str, float]:
    return {name: value(cluster.metrics_url(name), "triptych:gateway_live_requests") for name in NAMES}


def test_both_ports_reach_both_gateways_and_each_has_a_private_one(cluster: Cluster) -> None:
    assert cluster.private_addresses.keys() == NAMES
    for name, address in cluster.private_addresses.items():
        with httpx.Client(base_url=f"http://{address}", verify=False) as client:
            assert who(client) == name
            assert client.get("/health/ready").json() == {"status": "ok"}
            assert client.get("/version").json().keys() == {"version"}
            assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 404
    with connections(cluster.http_url) as reached:
        for client in reached.values():
            answer = client.post("/v1/completions", json={"prompt": "x"}).json()
            assert answer["choices"][0]["text"] == "hello"
        assert reached.keys() == NAMES


async def test_a_request_is_explained_and_ended_through_any_gateway(cluster: Cluster) -> None:
    async with streams(cluster) as reached:
        for own, other in (("gateway-0", "gateway-1"), ("gateway-1", "gateway-0")):
            token, stub = reached[own].token, reached[other].stub
            assert (await stub.Explain(gateway_pb2.ExplainRequest(token=token))).state == "running"
            assert (await stub.Abort(gateway_pb2.AbortRequest(token=token))).found
            reason = common_pb2.FINISH_REASON_UNSPECIFIED
            while message := await reached[own].call.read():
                reason = message.finish.reason
            assert reason == common_pb2.FINISH_REASON_ABORT
            assert not (await stub.Abort(gateway_pb2.AbortRequest(token=token))).found
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await reached["gateway-0"].stub.Explain(gateway_pb2.ExplainRequest(token=bytes(16)))
        assert unknown.value.code() == grpc.StatusCode.NOT_FOUND


def test_a_gateway_that_hangs_holds_its_siblings_up_in_nothing(cluster: Cluster) -> None:
    with connections(cluster.http_url) as reached:
        os.kill(cluster.pid("gateway-0"), signal.SIGSTOP)
        try:
            client = reached["gateway-1"]
            for prompt, text in (("x", "hello"), ("slow", SLOW)):
                body = {"prompt": prompt, "max_tokens": 100}
                assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == text
        finally:
            os.kill(cluster.pid("gateway-0"), signal.SIGCONT)
        assert reached["gateway-0"].post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_top_shows_every_process(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    gateways = ",".join(cluster.private_addresses.values())
    metrics = {f"--{role}s": cluster.metrics_url(role).split("/")[2] for role in ("engine", "worker")}
    options = [f"--gateways={gateways}", "--interval=0.5", *(f"{name}={address}" for name, address in metrics.items())]
    with connections(cluster.http_url) as reached, ThreadPoolExecutor() as pool:
        asked = {"prompt": "slow", "max_tokens": 100}
        answers = [pool.submit(client.post, "/v1/completions", json=asked) for client in reached.values()]
        assert command.main("top", ["--once", "--json", *options]) == 0
        assert all(answer.result().status_code == 200 for answer in answers)
    seen = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["ready"] for row in seen["gateways"]} == dict.fromkeys(NAMES, True)
    assert seen["engines"][0]["model"] == "simulated"
    assert 0 < seen["engines"][0]["output_tokens_per_s"] < 1000
    assert seen["workers"][0]["step_p50_ms"] > 0
    assert command.main("top", ["--once", *options]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in (*NAMES, *cluster.private_addresses.values(), "simulated"))


async def test_top_looks_for_gateways_that_nobody_named(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    address = cluster.private_addresses["gateway-0"]
    monkeypatch.setattr(command, "PRIVATE_PORT", int(address.split(":")[1]))
    async with aiohttp.ClientSession() as session:
        assert address in (await command.find(session, command.TopSettings())).gateways
        monkeypatch.setattr(command, "_TRIED_PORTS", 0)
        assert (await command.find(session, command.TopSettings())).gateways == ["127.0.0.1:8000"]


@pytest.mark.parametrize("shared", [False, True])
def test_no_stranger_gets_the_ports(cluster: Cluster, shared: bool) -> None:
    for port in (cluster.http_port, cluster.grpc_port):
        with socket.socket() as stranger:
            stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with pytest.raises(OSError, match="in use"):
                stranger.bind(("127.0.0.1", port))
    with socket.socket() as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        stranger.bind(("127.0.0.1", 0))
        stranger.listen()
        taken = stranger.getsockname()[1]
        for knob in ("http_port", "grpc_port"):
            with pytest.raises(ClusterError, match=f"{taken} already"):
                Cluster(gateways=2, worker={"simulated": True}, **{knob: taken}).start()
        with pytest.raises(ClusterError, match=f"--private-port: something listens on 127.0.0.1:{taken}"):
            Cluster(gateways=2, worker={"simulated": True}, gateway={"private_port": taken}).start()


def test_worker_and_engine_are_started_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_SHORT_LIFE_S", 0.0)
    for role in ("worker", "engine"):
        cluster.kill(role)
        assert cluster.mend() == [f"the {role} ended by SIGKILL and is started again"]
        answer = httpx.post(f"{cluster.http_url}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE_S)
        assert answer.status_code == 200


def test_a_gateway_that_ends_is_started_again_while_the_other_serves(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.kill("gateway-1")
    assert httpx.post(f"{cluster.http_url}/v1/completions", json={"prompt": "x"}).status_code == 200
    monkeypatch.setattr(local, "_SHORT_LIFE_S", 1e9)
    with pytest.raises(ClusterError, match="the gateway-1 ended by SIGKILL"):
        cluster.mend()
    monkeypatch.setattr(local, "_SHORT_LIFE_S", 0.0)
    assert cluster.mend() == ["the gateway-1 ended by SIGKILL and is started again"]
    assert cluster.mend() == []
    deadline = time.monotonic() + PATIENCE_S
    while not cluster.is_ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with connections(cluster.http_url) as reached:
        assert reached.keys() == NAMES


async def test_serve_lists_the_gateways_and_all_of_them_drain(script: Path) -> None:
    ports = [free_port(), free_port()]
    process = serve("--gateways=2", "--private-port=0", f"--http-port={ports[0]}", f"--script={script}")
    pids: list[int] = []
    try:
        await asyncio.to_thread(wait_for_line, process, "Ready. ")
        lines = [await asyncio.to_thread(wait_for_line, process, f"{name}: ") for name in sorted(NAMES)]
        assert all(re.search(r"health and metrics at http://127\.0\.0\.1:\d+$", line) for line in lines)
        pids = children(process.pid)
        assert len(pids) == 4
        with connections(f"http://127.0.0.1:{ports[0]}") as reached:
            asked = {"prompt": "slow", "max_tokens": 100}
            answers = [
                asyncio.create_task(asyncio.to_thread(client.post, "/v1/completions", json=asked))
                for client in reached.values()
            ]
            for line in lines:
                metrics = line.split(" at ")[1].strip() + "/metrics"
                await asyncio.to_thread(wait_for_live, metrics)
            process.send_signal(signal.SIGTERM)
            for answer in await asyncio.gather(*answers):
                assert answer.json()["choices"][0]["text"] == SLOW
        assert await asyncio.to_thread(process.wait, PATIENCE_S) == 0
    finally:
        process.kill()
        process.communicate()
    wait_gone(pids)
