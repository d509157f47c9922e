"""Images and videos through the whole system with a tiny Qwen3-VL, against the greedy tokens of transformers.

What the oracle reads is made here: the prompt by hand, pixels of images by transformers' own processor. Those of videos
are the blob's (tests/gateway/media has the golden values for them): its processor needs torchvision.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from services.local.cluster import Cluster
from services.worker.wire import decode_blob
from tests.e2e.media import a_cluster, chat_body, film, image_part, metric, picture, video_part
from tests.tiny_qwen3_vl import FRAMES, IDS, IMAGES, MERGE, PATCH, tiny_qwen3_vl
from tests.worker.media import oracle

COUNT = 8
RATE = 4
"""Frames of a second of film; the model's processor takes 2, and no fewer than 4 of all."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3_vl(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cluster")


@pytest.fixture(scope="module")
def cluster(model: Path, folder: Path) -> Iterator[Cluster]:
    """Steps of 16 tokens, so that videos are read in several, and blocks that run out under those who answer."""
    engine = {
        "max_num_batched_tokens": 16,
        "block_size": 4,
        "num_blocks": 64,
        "max_num_seqs": 8,
        "output_reserve_blocks": 0,
    }
    with a_cluster(model, folder, worker={"dtype": "float32", "threads": 1}, engine=engine) as running:
        yield running


@dataclass
class Still:
    data: bytes

    def part(self) -> dict[str, Any]:
        return image_part(self.data)

    def text(self) -> str:
        _, height, width = self.grid()
        return "<|vision_start|>" + "<|image_pad|>" * (height * width // MERGE**2) + "<|vision_end|>"

    def grid(self) -> tuple[int, ...]:
        return tuple(self.read()["image_grid_thw"][0].tolist())

    def read(self) -> Any:
        from transformers import Qwen2VLImageProcessorPil

        kept = {name: IMAGES[name] for name in ("size", "patch_size", "temporal_patch_size", "merge_size")}
        reader = Qwen2VLImageProcessorPil(**kept, image_mean=IMAGES["image_mean"], image_std=IMAGES["image_std"])
        return reader(Image.open(io.BytesIO(self.data)).convert("RGB"), return_tensors="pt")


@dataclass
class Film:
    """A film whose frames are all taken: 4 of 2 seconds of film at 2 a second."""

    seed: int
    blobs: Path

    def part(self) -> dict[str, Any]:
        return video_part(film(self.seed, 8, 64, 32, RATE))

    def text(self) -> str:
        """4 of 8 frames, evenly from the first to the last: numbers 0, 2, 5, 7, two in a patch."""
        times = [(0 / RATE + 2 / RATE) / 2, (5 / RATE + 7 / RATE) / 2]
        pads = "<|video_pad|>" * (64 * 32 // (PATCH * MERGE) ** 2)
        frames = "".join(f"<{at:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for at in times)
        return f"<|vision_start|>{frames}<|vision_end|>"


Parts = Sequence[str | Still | Film]


def prompt_of(parts: Parts) -> list[int]:
    """Bytes are ids, special tokens too; the template of tiny_qwen3_vl by hand."""
    inner = "".join(part if isinstance(part, str) else part.text() for part in parts)
    text = f"<|im_start|>user\n{inner}<|im_end|>\n<|im_start|>assistant\n"
    ids: list[int] = []
    while text:
        name = next((name for name in IDS if text.startswith(name)), None)
        ids += [IDS[name]] if name else text[0].encode()
        text = text[len(name or text[0]) :]
    return ids


def pixels_of_films(parts: Parts, folder: Path) -> dict[str, Any]:
    films = [part for part in parts if isinstance(part, Film)]
    if not films:
        return {}
    blobs = [decode_blob(path.read_bytes())[1] for path in folder.iterdir() if not path.name.startswith(".")]
    (blob,) = [blob for blob in blobs if blob.modality == "video"]
    assert blob.grid == (8 // 2 // FRAMES, 2, 4)
    values = (blob.patches / 255 - 0.5) / 0.5
    return {
        "pixel_values_videos": torch.from_numpy(values.astype(np.float32)),
        "video_grid_thw": torch.tensor([blob.grid]),
    }


@torch.inference_mode()
def expected(model: Path, parts: Parts, folder: Path, count: int = COUNT) -> list[int]:
    """The greedy answer of transformers."""
    ids = torch.tensor([prompt_of(parts)])
    kinds = (ids == IDS["<|image_pad|>"]).int() + 2 * (ids == IDS["<|video_pad|>"]).int()
    inputs: dict[str, Any] = {"input_ids": ids, "mm_token_type_ids": kinds, **pixels_of_films(parts, folder)}
    stills = [part.read() for part in parts if isinstance(part, Still)]
    if stills:
        inputs["pixel_values"] = torch.cat([still["pixel_values"] for still in stills])
        inputs["image_grid_thw"] = torch.cat([still["image_grid_thw"] for still in stills])
    made = oracle(model)
    made.model.rope_deltas = None
    answer = made.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    ids_made: list[int] = answer[0, ids.shape[1] :].tolist()
    return ids_made


async def ask(cluster: Cluster, *requests: Parts, count: int = COUNT, **fields: Any) -> list[dict[str, Any]]:
    """All at once, as many tokens as the oracle gives."""
    bodies = [
        chat_body(
            *(part if isinstance(part, str) else part.part() for part in parts),
            max_tokens=count,
            ignore_eos=True,
            **fields,
        )
        for parts in requests
    ]
    async with httpx.AsyncClient(base_url=cluster.http_url, timeout=240, verify=False) as http:
        answers = await asyncio.gather(*(http.post("/v1/chat/completions", json=body) for body in bodies))
    for answer in answers:
        assert answer.status_code == 200, answer.text
    return [answer.json() for answer in answers]


def ids_of(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


async def test_answers_are_those_of_transformers_in_a_mixed_batch(cluster: Cluster, model: Path, folder: Path) -> None:
    blobs = folder / "blobs"
    requests: list[Parts] = [
        ["What is ", Still(picture(1)), "?"],
        [
            Still(picture(2, 64, 64)),
            " beside ",
            Still(picture(3, 128, 32)),
            " and ",
            Still(picture(4, 40, 90)),
            " here",
        ],
        ["Who moves in ", Film(5, blobs), "?"],
        [Still(picture(6)), "is it in ", Film(5, blobs), "?"],
        ["No picture at all"],
        [Still(picture(1)), "again"],
    ]
    answers = await ask(cluster, *requests)
    for parts, answer in zip(requests, answers, strict=True):
        assert answer["usage"]["prompt_tokens"] == len(prompt_of(parts))
        assert ids_of(answer) == expected(model, parts, blobs), parts
    # Of 8 items two are there twice. A preempted request may be encoded again, where its output had to go.
    assert metric(cluster, "gateway", "triptych:media_made") == 6
    assert metric(cluster, "worker", "triptych:worker_missing_media_total") == 0


async def test_preempted_requests_give_the_same_answers(cluster: Cluster, model: Path, folder: Path) -> None:
    """Four whose prompts take most of the 64 blocks; each grows by 10 more."""
    blobs = folder / "blobs"
    requests: list[Parts] = [
        ["Who moves in ", Film(5, blobs), "?"],
        [Still(picture(6)), "is it in ", Film(5, blobs), "?"],
        [Still(picture(2, 64, 64)), " beside ", Still(picture(3, 128, 32)), " and ", Still(picture(4, 40, 90)), "?"],
        ["No picture at all"],
    ]
    preempted = metric(cluster, "engine", "vllm:num_preemptions_total")
    for _ in range(5):  # on a busy machine one may end before the next has its media
        answers = await ask(cluster, *requests, count=40)
        for parts, answer in zip(requests, answers, strict=True):
            assert ids_of(answer) == expected(model, parts, blobs, 40), parts
        if metric(cluster, "engine", "vllm:num_preemptions_total") > preempted:
            return
    pytest.fail("nothing was preempted")


async def test_the_same_image_in_eight_requests(cluster: Cluster, model: Path, folder: Path) -> None:
    made = metric(cluster, "gateway", "triptych:media_made")
    encoded = metric(cluster, "worker", "triptych:worker_encoded_media_total")
    still = Still(picture(20))
    requests: list[Parts] = [[f"{number}. ", still, " in a word"] for number in range(8)]
    answers = await ask(cluster, *requests)
    for parts, answer in zip(requests, answers, strict=True):
        assert ids_of(answer) == expected(model, parts, folder)
    assert metric(cluster, "gateway", "triptych:media_made") - made == 1
    assert metric(cluster, "worker", "triptych:worker_encoded_media_total") - encoded == 1


@pytest.mark.parametrize("count", [8, pytest.param(64, marks=pytest.mark.slow)])
async def test_many_videos_at_once(cluster: Cluster, count: int) -> None:
    """16 frames each, all taken: each is decoded once; two of them are asked about twice."""
    made = metric(cluster, "gateway", "triptych:media_made")

    @dataclass
    class Sixteen:
        seed: int

        def part(self) -> dict[str, Any]:
            return video_part(film(1000 * count + self.seed, 16, 64, 32, RATE))

    io_kwargs = {"video": {"num_frames": 16}}
    requests: list[Any] = [["What moves in ", Sixteen(seed % count), "?"] for seed in range(count + 2)]
    answers = await ask(cluster, *requests, media_io_kwargs=io_kwargs)
    assert [len(ids_of(answer)) for answer in answers] == [COUNT] * (count + 2)
    assert len({tuple(ids_of(answer)) for answer in answers}) > 1, "they differ"
    assert [ids_of(answer) for answer in answers[count:]] == [ids_of(answer) for answer in answers[:2]]
    assert metric(cluster, "gateway", "triptych:media_made") - made == count
