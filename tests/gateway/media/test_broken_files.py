"""Files with bytes changed, cut off and put in: each is an item or an error that its sender is told, nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from services.gateway.media.child.bad import BadMedia
from tests.gateway.media.files import IMAGE, VIDEO, counting, encoded, made, noise, video

PICTURE = Image.fromarray(noise(40, 56))
FRAMES = counting(12, 32, 48)
X264 = {"qp": "10"}
FILES: dict[str, Callable[[], tuple[bytes, Any]]] = {
    "png": lambda: (encoded(PICTURE, "PNG"), IMAGE),
    "png with a transparent colour": lambda: (encoded(PICTURE.quantize(8), "PNG", transparency=1), IMAGE),
    "jpeg": lambda: (encoded(PICTURE, "JPEG"), IMAGE),
    "progressive jpeg": lambda: (encoded(PICTURE, "JPEG", progressive=True), IMAGE),
    "gif": lambda: (encoded(PICTURE, "GIF"), IMAGE),
    "webp": lambda: (encoded(PICTURE, "WEBP"), IMAGE),
    "lossless webp": lambda: (encoded(PICTURE.convert("RGBA"), "WEBP", lossless=True), IMAGE),
    "bmp": lambda: (encoded(PICTURE, "BMP"), IMAGE),
    "mp4": lambda: (video(FRAMES), VIDEO),
    "mp4 with h264": lambda: (video(FRAMES, codec="libx264", options=X264), VIDEO),
    "matroska": lambda: (video(FRAMES, kind="matroska", codec="libx264", options=X264), VIDEO),
    "webm": lambda: (video(FRAMES, kind="webm", codec="libvpx-vp9", options={"lossless": "1"}), VIDEO),
    "avi": lambda: (video(FRAMES, kind="avi"), VIDEO),
    "mpeg-ts": lambda: (video(FRAMES, kind="mpegts", codec="mpeg2video"), VIDEO),
}


def _changed(data: bytes, chance: random.Random) -> bytes:
    """Mostly near the beginning, where headers are."""
    changed = bytearray(data)
    for _ in range(chance.choice((1, 1, 2, 4, 16))):
        place = chance.randrange(min(len(changed), 400) if chance.random() < 0.6 else len(changed))
        changed[place] = chance.choice((0, 255, chance.randrange(256), changed[place] ^ 1 << chance.randrange(8)))
    if chance.random() < 0.2:
        changed = changed[: chance.randrange(len(changed))]
    if chance.random() < 0.1 and changed:
        place = chance.randrange(len(changed))
        changed[place:place] = chance.randbytes(chance.randrange(40))
    return bytes(changed)


def _try(kind: str, times: int, folder: Path) -> None:
    data, pixels = FILES[kind]()
    chance = random.Random(kind)
    for _ in range(times):
        try:
            processed, patches = made(_changed(data, chance), pixels, folder)
        except BadMedia:
            continue
        time, high, wide = processed.grid
        assert len(patches) == time * high * wide == processed.embeddings * 4
        assert len(processed.times) == (time if pixels is VIDEO else 0)
        assert list(processed.times) == sorted(processed.times)


@pytest.mark.filterwarnings("ignore")  # Pillow's words for what is odd about a file
@pytest.mark.parametrize("kind", FILES)
def test_broken_files(kind: str, tmp_path: Path) -> None:
    _try(kind, 25, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FILES)
def test_many_broken_files(kind: str, tmp_path: Path) -> None:
    _try(kind, 2000, tmp_path)
