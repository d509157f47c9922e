"""Media on their way through all roles with a simulated worker: decoded once, encoded once, found again, never lost."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from protos import gateway_pb2
from services.local.cluster import Cluster
from tests.e2e.client import connected
from tests.e2e.media import a_cluster, chat_body, film, image_part, metric, picture, video_part
from tests.tiny_qwen3_vl import tiny_qwen3_vl

ANSWER = "It scatters."
PATIENCE_S = 30.0
SIMULATED: dict[str, Any] = {"simulated": True, "simulated_step_us": 0, "simulated_token_us": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_vl(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those who ask for time get it: 20 ms for each token."""
    file = tmp_path_factory.mktemp("script") / "script.json"
    slow = {"contains": "slowly", "text": ANSWER, "delay_ms": 20}
    file.write_text(json.dumps({"requests": [slow], "otherwise": {"text": ANSWER}}))
    return file


@pytest.fixture(scope="module")
def cluster(model: Path, script: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with a_cluster(model, tmp_path_factory.mktemp("c"), worker={**SIMULATED, "script": script}) as running:
        yield running


@pytest.fixture(scope="module")
def strangers(model: Path, script: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A worker that shares no folder with the gateway, as on another host."""
    folder = tmp_path_factory.mktemp("s")
    worker = {**SIMULATED, "script": script, "media_dir": folder / "elsewhere"}
    with a_cluster(model, folder, worker=worker) as running:
        yield running


async def asked(cluster: Cluster, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
    """All at once."""
    async with httpx.AsyncClient(base_url=cluster.http_url, timeout=60, verify=False) as http:
        answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for body in bodies))
    for answer in answers:
        assert answer.status_code == 200, answer.text
    return [answer.json() for answer in answers]


def texts(answers: list[dict[str, Any]]) -> list[str]:
    return [answer["choices"][0]["message"]["content"] for answer in answers]


def counts(cluster: Cluster) -> tuple[float, float, float]:
    """Items decoded, encoded, and missed."""
    return (
        metric(cluster, "gateway", "triptych:media_made"),
        metric(cluster, "worker", "triptych:worker_encoded_media_total"),
        metric(cluster, "worker", "triptych:worker_missing_media_total"),
    )


async def until(condition: Callable[[], bool]) -> None:
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "waited in vain"
        await asyncio.sleep(0.02)


def blobs_in(cluster_folder: Path) -> list[Path]:
    return [path for path in cluster_folder.iterdir() if not path.name.startswith(".")]


def folder_of(cluster: Cluster) -> Path:
    return Path(cluster._knobs["gateway"]["media_dir"])


async def test_an_image_in_eight_requests_is_decoded_once_and_encoded_once(cluster: Cluster) -> None:
    before = counts(cluster)
    image = picture(1)
    bodies = [chat_body(f"{number}: what is", image_part(image), "here?", max_tokens=20) for number in range(8)]
    answers = await asked(cluster, *bodies)
    assert texts(answers) == [ANSWER] * 8
    made, encoded, missing = (now - then for now, then in zip(counts(cluster), before, strict=True))
    assert (made, encoded, missing) == (1, 1, 0)
    # 96x64 with patches of 16, merged by 2: 6 embeddings, counted as tokens of the prompt.
    text = await asked(cluster, chat_body("0: what ishere?", max_tokens=20))
    marks = 2  # vision_start, vision_end
    assert answers[0]["usage"]["prompt_tokens"] - text[0]["usage"]["prompt_tokens"] == 6 + marks


async def test_a_video_that_was_uploaded(cluster: Cluster) -> None:
    before = counts(cluster)
    data = film(2)
    async with connected(cluster.grpc_address) as stub:

        async def pieces() -> Any:
            for start in range(0, len(data), 1000):
                yield gateway_pb2.UploadMediaRequest(data=data[start : start + 1000])

        stored = await stub.UploadMedia(pieces())
        assert stored.sha256 == hashlib.sha256(data).digest()
        request = gateway_pb2.ChatRequest(sampling=gateway_pb2.SamplingOptions(max_tokens=20, temperature=0))
        message = request.messages.add(role="user")
        message.content.add(video_hash=stored.sha256)
        message.content.add(text="What moves?")
        text = "".join([answer.content async for answer in stub.Chat(request)])
    assert text == ANSWER
    (same,) = await asked(cluster, chat_body(video_part(data), "What moves?", max_tokens=20))
    assert texts([same]) == [ANSWER]
    made, encoded, missing = (now - then for now, then in zip(counts(cluster), before, strict=True))
    assert (made, encoded, missing) == (1, 1, 0), "by whichever way it came"


@pytest.mark.slow
async def test_a_worker_elsewhere_fetches_what_it_encodes(strangers: Cluster) -> None:
    bodies = [chat_body("What is", image_part(picture(number)), "?", max_tokens=20) for number in (3, 3, 4)]
    assert texts(await asked(strangers, *bodies)) == [ANSWER] * 3
    assert counts(strangers) == (2, 2, 0)


@pytest.mark.parametrize("left", [None, b"", b"nonsense of another kind"])
async def test_a_blob_that_vanishes_between_submit_and_step(cluster: Cluster, left: bytes | None) -> None:
    """The worker is stopped meanwhile, so it has not seen the file when that goes."""
    made, encoded, missing = counts(cluster)
    image = picture(100 if left is None else 101 + len(left))
    known = set(blobs_in(folder_of(cluster)))
    os.kill(cluster.pid("worker"), signal.SIGSTOP)
    try:
        asking = asyncio.create_task(asked(cluster, chat_body("What is", image_part(image), "?", max_tokens=20)))
        await until(lambda: metric(cluster, "gateway", "triptych:gateway_live_requests") == 1)
        (blob,) = set(blobs_in(folder_of(cluster))) - known
        blob.unlink()
        if left is not None:
            blob.write_bytes(left)
    finally:
        os.kill(cluster.pid("worker"), signal.SIGCONT)
    assert texts(await asking) == [ANSWER]
    assert counts(cluster) == (made + 1, encoded + 1, missing), "its gateway still had it"


@pytest.mark.slow
async def test_a_miss_is_put_back_and_the_client_sees_a_pause(model: Path, script: Path, tmp_path: Path) -> None:
    """The worker can't fetch here: the gateway announces an address at which nobody answers."""
    worker = {**SIMULATED, "script": script}
    with a_cluster(model, tmp_path, worker=worker, gateway={"blob_announce": "127.255.255.254"}) as cluster:
        os.kill(cluster.pid("worker"), signal.SIGSTOP)
        try:
            bodies = [chat_body("What is", image_part(picture(5)), "?", max_tokens=20, n=2), chat_body("Hi")]
            asking = asyncio.create_task(asked(cluster, *bodies))
            await until(lambda: metric(cluster, "gateway", "triptych:gateway_live_requests") == 2)
            (blob,) = blobs_in(folder_of(cluster))
            content = blob.read_bytes()
            blob.unlink()
        finally:
            os.kill(cluster.pid("worker"), signal.SIGCONT)
        first, second = await asking
        assert [choice["message"]["content"] for choice in first["choices"]] == [ANSWER] * 2
        assert texts([second]) == [ANSWER[:8]]
        assert blob.read_bytes() == content
        made, encoded, missing = counts(cluster)
        assert (made, encoded) == (1, 1)
        assert missing >= 1
        assert metric(cluster, "worker", "triptych:worker_encoded_media_total") == 1


@pytest.mark.slow
async def test_a_second_miss_is_a_clear_error(model: Path, script: Path, tmp_path: Path) -> None:
    worker = {**SIMULATED, "script": script, "media_dir": tmp_path / "elsewhere"}
    with a_cluster(model, tmp_path, worker=worker, gateway={"blob_announce": "127.255.255.254"}) as cluster:
        body = chat_body("What is", image_part(picture(6)), "?")
        async with httpx.AsyncClient(base_url=cluster.http_url, timeout=60, verify=False) as http:
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 503
            assert "the content of the image at prompt token" in answer.json()["error"]["message"]
            assert "was not found by the worker" in answer.json()["error"]["message"]
            fine = await http.post("/v1/chat/completions", json=chat_body("Hi"))
            assert fine.status_code == 200
        assert counts(cluster) == (1, 0, 2)
        assert metric(cluster, "gateway", "triptych:gateway_live_requests") == 0


@pytest.mark.parametrize("role", ["worker", "engine"])
async def test_a_role_that_is_killed_under_media_costs_no_answer(cluster: Cluster, role: str) -> None:
    bodies = [
        chat_body("slowly", image_part(picture(7)), video_part(film(8)), f"and {number}", max_tokens=20)
        for number in range(4)
    ]
    asking = asyncio.create_task(asked(cluster, *bodies))
    generated = metric(cluster, "worker", "triptych:worker_sampled_tokens_total")
    await until(lambda: metric(cluster, "worker", "triptych:worker_sampled_tokens_total") >= generated + 8)
    cluster.kill(role)
    cluster.start_role(role)
    assert texts(await asking) == [ANSWER] * 4
