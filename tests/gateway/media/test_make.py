"""Items made: patches against transformers, live for images and by golden values for videos; blobs as they lie."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from services.gateway.media.child.bad import BadMedia, TooLarge
from services.gateway.media.child.make import Job, make
from services.gateway.media.items import MediaOptions, MediaSettings
from services.gateway.processors.rules import MediaRules
from tests.gateway.media.files import (
    IMAGE,
    NAME,
    VIDEO,
    Bytes,
    counting,
    encoded,
    made,
    noise,
    read_blob,
    turned,
    video,
)
from tests.gateway.media.goldens.clips import CLIPS, clip_of, sampled_bytes

GOLDENS = json.loads(Path(__file__).with_name("goldens").joinpath("goldens.json").read_text())["clips"]
TIMED = MediaRules({"video": VIDEO}, {"video": "P"}, "[", "]", "timed")
PICTURES = {
    "colours": Image.fromarray(noise(70, 110)),
    "grey": Image.fromarray(noise(90, 50, channels=1)[..., 0]),
    "bits": Image.fromarray(noise(64, 64, channels=1)[..., 0]).convert("1"),
    "palette": Image.fromarray(noise(50, 60)).quantize(16),
    "large": Image.fromarray(noise(700, 900)),
    "nearly the size": Image.fromarray(noise(332, 516)),  # where the order of Pillow's passes is the other one
    "long": Image.fromarray(noise(8, 1500)),
    "one pixel": Image.fromarray(noise(1, 1)),
    "whole": Image.fromarray(noise(64, 96)),
}


@pytest.mark.parametrize("picture", PICTURES.values(), ids=PICTURES.keys())
@pytest.mark.parametrize(("patch", "least", "most"), [(16, 1024, 1 << 18), (14, 3136, 65_536), (16, 65_536, 1 << 20)])
def test_images_are_those_of_transformers(
    picture: Image.Image, patch: int, least: int, most: int, tmp_path: Path
) -> None:
    """Every byte: the oracle's numbers, brought back from -1..1, are ours."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # takes seconds

    pixels = replace(IMAGE, patch_size=patch, min_pixels=least, max_pixels=most)
    oracle = Qwen2VLImageProcessorPil(
        patch_size=patch, size={"shortest_edge": least, "longest_edge": most}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    expected = oracle(picture.convert("RGB"), return_tensors="np")
    processed, patches = made(encoded(picture, "PNG"), pixels, tmp_path)
    assert list(processed.grid) == expected["image_grid_thw"][0].tolist()
    assert processed.embeddings == len(patches) // 4
    assert (patches == np.rint((expected["pixel_values"] * 0.5 + 0.5) * 255)).all()


@pytest.mark.parametrize("number", range(len(CLIPS)))
def test_videos_are_those_of_transformers(number: int, tmp_path: Path) -> None:
    """Sizes, frames, times and text are equal; bytes differ by at most 1, in few places.

    Pillow and torchvision round differently. Measured over sizes from 48 x 64 to 1080 x 1920: at most 1 of 255, in
    0.1 to 0.8 % of all bytes, as long as both resize the width first.
    """
    case: dict[str, Any] = CLIPS[number]
    data = video(clip_of(case), rate=case["fps"], kind="mov", codec="png", pixels="rgb24", options={})
    processed, patches = made(data, VIDEO, tmp_path, **case["asked"])
    golden = GOLDENS[number]
    assert list(processed.grid) == golden["grid"]
    assert TIMED.expand(processed) == golden["text"]
    assert patches.size == golden["bytes"]
    difference = np.abs(sampled_bytes(patches).astype(int) - golden["sample"])
    assert difference.max() <= 1
    assert np.count_nonzero(difference) <= 0.02 * difference.size


@pytest.mark.parametrize(
    ("width", "height", "grid"),
    [(4, 10_000, (1, 100, 2)), (1, 4096, (1, 128, 2)), (8000, 3, (1, 2, 104)), (1, 1, (1, 2, 2))],
)
def test_images_of_any_shape_have_a_patch_on_each_side(
    width: int, height: int, grid: tuple[int, ...], tmp_path: Path
) -> None:
    """C131. A short side becomes 32 pixels, the long one its share of the least area, 1024, up to the next 32."""
    processed, patches = made(encoded(Image.fromarray(noise(height, width)), "PNG"), IMAGE, tmp_path)
    assert processed.grid == grid
    assert len(patches) == grid[1] * grid[2]
    assert patches.std() > 10


@pytest.mark.parametrize(("matrix", "grid"), [((1, 0, 0, 1), (1, 2, 6)), ((0, 1, -1, 0), (1, 6, 2))])
def test_turned_videos_have_the_size_they_are_shown_in(
    matrix: tuple[int, int, int, int], grid: tuple[int, ...], tmp_path: Path
) -> None:
    """C146."""
    data = turned(video(counting(2, 32, 96)), matrix)
    processed, _ = made(data, replace(VIDEO, min_pixels=1024), tmp_path)
    assert processed.grid == grid


def test_the_last_patch_in_time_is_filled_up(tmp_path: Path) -> None:
    """Five frames are three patches: the last one holds the last frame twice."""
    data = video(counting(5), kind="mov", codec="png", pixels="rgb24", options={})
    processed, patches = made(data, VIDEO, tmp_path, num_frames=5)
    assert processed.grid[0] == 3
    assert processed.times == pytest.approx((0.05, 0.25, 0.4))
    per_frame = patches.reshape(3, -1, 3, 2, 16, 16)[:, :, 1].mean(axis=(1, 3, 4))
    assert per_frame.tolist() == [[0, 1], [2, 3], [4, 4]]


def test_frames_of_other_sizes_are_brought_to_the_first(tmp_path: Path) -> None:
    """A stream of MPEG-TS may change its size; the encoder takes one."""
    first = video(counting(5, 64, 64), kind="mpegts", codec="mpeg2video")
    second = video(counting(5, 32, 96), kind="mpegts", codec="mpeg2video")
    processed, patches = made(first + second, VIDEO, tmp_path, max_frames=16)
    assert processed.grid[1:] == (4, 4)
    assert len(patches) == processed.grid[0] * 16


def test_what_a_blob_begins_with(tmp_path: Path) -> None:
    pixels = replace(IMAGE, image_mean=(0.1, 0.2, 0.3), image_std=(0.4, 0.5, 0.6))
    job = Job(encoded(Image.fromarray(noise(64, 96)), "PNG"), pixels, MediaOptions(), bytes(range(32)))
    processed = make(job, MediaSettings(str(tmp_path)), lambda _: None)
    data = (tmp_path / bytes(range(32)).hex()).read_bytes()
    head, patches = read_blob(data)
    assert len(data) == processed.nbytes
    assert (head.hash, head.modality, list(head.grid)) == (bytes(range(32)), "image", [1, 4, 6])
    assert patches.shape == (24, 3 * 2 * 16 * 16)
    assert list(head.mean) == pytest.approx([0.1, 0.2, 0.3])
    assert list(head.std) == pytest.approx([0.4, 0.5, 0.6])
    assert [path.name for path in tmp_path.iterdir()] == [bytes(range(32)).hex()]


def test_a_file_is_read_from_where_it_lies(tmp_path: Path) -> None:
    data = encoded(Image.fromarray(noise(64, 96)), "PNG")
    path = tmp_path / "upload"
    path.write_bytes(data)
    assert (_patches(path, tmp_path) == _patches(data, tmp_path)).all()


def _patches(data: bytes | Path, folder: Path) -> Bytes:
    make(Job(data, IMAGE, MediaOptions(), NAME), MediaSettings(str(folder)), lambda _: None)
    _, patches = read_blob((folder / NAME.hex()).read_bytes())
    return patches


def test_room_is_asked_for_before_pixels_are_made(tmp_path: Path) -> None:
    """By the header: what would be refused then is never decoded."""

    class Full(Exception):
        pass

    def refuse(need: int) -> None:
        raise Full(need)

    for data, pixels in (
        (encoded(Image.fromarray(noise(64, 96)), "PNG")[:60] + bytes(100), IMAGE),
        (video(counting(3, 64, 96)), VIDEO),
    ):
        with pytest.raises(Full) as told:
            make(Job(data, pixels, MediaOptions(), NAME), MediaSettings(str(tmp_path)), refuse)
        assert told.value.args[0] >= 64 * 96 * 3
    assert not list(tmp_path.iterdir())


def test_more_patches_than_are_kept_are_refused(tmp_path: Path) -> None:
    limits = MediaSettings(str(tmp_path), store_bytes=36_863)
    for data, pixels, told in (
        (encoded(Image.fromarray(noise(64, 96)), "PNG"), IMAGE, "1 x 96 x 64 pixels"),
        (video(counting(8, 64, 96), rate=1), VIDEO, "8 x 96 x 64 pixels"),
    ):
        with pytest.raises(TooLarge, match=told):
            make(Job(data, pixels, MediaOptions(), NAME), limits, lambda _: None)


def test_nothing_is_left_of_an_item_that_fails(tmp_path: Path) -> None:
    with pytest.raises(BadMedia):
        made(encoded(Image.fromarray(noise(64, 96)), "PNG")[:-200], IMAGE, tmp_path)
    assert not list(tmp_path.iterdir())


def test_seconds_of_a_patch(tmp_path: Path) -> None:
    """As Qwen2.5-VL wants it: 20 frames at 10 a second, of which 4 are taken, are a second for each two."""
    processed, _ = made(video(counting(20), rate=Fraction(10)), VIDEO, tmp_path)
    assert processed.grid[0] == 2
    assert processed.seconds_per_patch == pytest.approx(1.0)
