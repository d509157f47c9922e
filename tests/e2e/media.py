"""Images and videos that tests make, and a cluster with a model that takes them."""

from __future__ import annotations

import base64
import io
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from services.local.cluster import Cluster


def picture(seed: int, width: int = 96, height: int = 64) -> bytes:
    """A PNG of soft colours, another for each seed."""
    noise = np.random.default_rng(seed).integers(0, 256, (4, 6, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(file, "PNG")
    return file.getvalue()


def film(seed: int, frames: int = 8, width: int = 96, height: int = 64, rate: int = 4) -> bytes:
    """An MP4 (H.264) of so many frames, another for each seed."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate, options={"preset": "ultrafast", "threads": "1"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        random = np.random.default_rng(seed)
        first, last = (random.integers(0, 256, (4, 6, 3)).astype(np.float32) for _ in range(2))
        for number in range(frames):
            share = number / max(1, frames - 1)
            still = Image.fromarray((first * (1 - share) + last * share).astype(np.uint8))
            frame = av.VideoFrame.from_image(still.resize((width, height), Image.Resampling.BICUBIC))
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(data: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(data)}}


def video_part(data: bytes) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4")}}


def chat_body(*parts: str | dict[str, Any], max_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """A greedy request of one turn, texts and media in order."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "temperature": 0,
        "return_token_ids": True,
        **fields,
    }


@contextmanager
def a_cluster(
    model: Path,
    folder: Path,
    *,
    worker: Mapping[str, Any] | None = None,
    engine: Mapping[str, Any] | None = None,
    gateway: Mapping[str, Any] | None = None,
) -> Iterator[Cluster]:
    """The roles with a folder for blobs that both ends share, unless one is told another."""
    shared = {"media_dir": folder / "blobs"}
    with (
        (folder / "log").open("ab") as log,
        Cluster(
            model=model,
            worker={**shared, **(worker or {})},
            engine=engine,
            gateway={**shared, "media_processes": 1, **(gateway or {})},
            log=log,
        ) as running,
    ):
        yield running


def metric(cluster: Cluster, role: str, name: str) -> float:
    """The sum of a metric over its labels."""
    with urllib.request.urlopen(cluster.metrics_url(role), timeout=5) as answer:
        lines = answer.read().decode().splitlines()
    values = [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    return sum(values)
