"""Sizes and chosen frames against the processors of transformers: golden values, and what they refuse."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.media.items import MediaOptions
from services.gateway.media.sizes import choose_frames, frames_wanted, image_size, patch_times, video_size
from tests.gateway.media.files import IMAGE, VIDEO

GOLDENS = json.loads(Path(__file__).with_name("goldens").joinpath("goldens.json").read_text())
NOTHING = MediaOptions()


def test_images_have_the_sizes_of_transformers() -> None:
    for height, width, side, least, most, *expected in GOLDENS["images"]:
        pixels = replace(IMAGE, patch_size=side // 2, min_pixels=least, max_pixels=most)
        assert image_size(height, width, pixels, NOTHING) == tuple(expected), (height, width, side, least, most)


def test_videos_have_the_sizes_of_transformers() -> None:
    for frames, height, width, least, most, *expected in GOLDENS["videos"]:
        pixels = replace(VIDEO, min_pixels=least, max_pixels=most)
        assert video_size(frames, height, width, pixels, NOTHING) == tuple(expected), (frames, height, width)


def _sampled(indices: list[int]) -> list[Any]:
    if len(indices) <= 16:
        return indices
    return [len(indices), hashlib.sha256(json.dumps(indices).encode()).hexdigest()[:16]]


@pytest.mark.parametrize(("table", "pixels"), [("even", VIDEO), ("strided", replace(VIDEO, sampling="strided"))])
def test_frames_are_those_of_transformers(table: str, pixels: Any) -> None:
    for total, fps, asked, expected in GOLDENS[table]:
        step = 1 / (Fraction(fps).limit_denominator(1001))
        options = MediaOptions(**asked)
        found = choose_frames([index * step for index in range(total)], pixels, options)
        assert _sampled(found) == expected, (total, fps, asked)


@pytest.mark.parametrize(("height", "width"), [(4, 10_000), (1, 4096), (3, 8000), (1, 1), (10_000, 4), (1, 32_768)])
def test_no_shape_is_too_long(height: int, width: int) -> None:
    """C131: at least a patch on each side, at most the bound, and the long side stays the long one."""
    high, wide = image_size(height, width, replace(IMAGE, min_pixels=65_536, max_pixels=1 << 24), NOTHING)
    assert high % 32 == 0
    assert wide % 32 == 0
    assert min(high, wide) >= 32
    assert high * wide <= 1 << 24
    assert (high >= wide) == (height >= width)


@given(st.integers(1, 40_000), st.integers(1, 40_000), st.integers(1, 768), st.sampled_from([1, 4096, 1 << 17]))
def test_sizes_are_whole_and_bounded(height: int, width: int, frames: int, least: int) -> None:
    pixels = replace(VIDEO, min_pixels=least, max_pixels=1 << 22)
    for high, wide in (image_size(height, width, pixels, NOTHING), video_size(frames, height, width, pixels, NOTHING)):
        assert high % 32 == wide % 32 == 0
        assert high >= 32
        assert wide >= 32
        assert high * wide <= (1 << 22) * 2


def test_pixels_of_a_frame_may_be_capped() -> None:
    """The cap of both processors, by their formulas: embeddings per frame, or an even share, but the least."""
    capped = replace(VIDEO, min_pixels=1024, max_pixels=32 * 32 * 64, max_video_tokens=9)
    assert video_size(4, 1000, 1000, capped, NOTHING) == (96, 96)  # 9 embeddings
    assert video_size(32, 1000, 1000, capped, NOTHING) == (32, 32)  # 2 for each, which is one square
    each = replace(capped, counts_frames=False, max_video_tokens=40)
    assert video_size(4, 1000, 1000, each, NOTHING) == (128, 128)  # 0.9 * 40 * 2 / 4 = 18 embeddings, 16 as a square


def test_requests_change_bounds() -> None:
    assert image_size(1000, 1000, IMAGE, MediaOptions(max_pixels=65_536)) == (256, 256)
    assert image_size(64, 64, IMAGE, MediaOptions(min_pixels=65_536)) == (256, 256)


def test_a_video_without_times_is_taken_whole() -> None:
    """C137: a rate of 0 says nothing; one of 0.4 asks for more frames than there are."""
    assert frames_wanted(10, None, VIDEO, NOTHING) == 10
    assert frames_wanted(1000, None, VIDEO, NOTHING) == 768
    assert choose_frames([Fraction(0)] * 10, VIDEO, NOTHING) == list(range(10))
    assert choose_frames([index / Fraction(2, 5) for index in range(10)], VIDEO, NOTHING) == list(range(10))


def test_frames_at_an_uneven_rate_are_chosen_by_time() -> None:
    """Ten frames in the first second, then one a second: by index the first second would get most of them."""
    times = [Fraction(index, 10) for index in range(10)] + [Fraction(second) for second in range(1, 11)]
    chosen = choose_frames(times, VIDEO, MediaOptions(num_frames=6))
    assert [float(times[index]) for index in chosen] == [0, 2, 4, 6, 8, 10]


def test_stamps_in_whole_milliseconds_are_a_constant_rate() -> None:
    exact = [Fraction(index, 30) for index in range(90)]
    rounded = [Fraction(round(at * 1000), 1000) for at in exact]
    assert choose_frames(rounded, VIDEO, NOTHING) == choose_frames(exact, VIDEO, NOTHING)


def test_a_patch_stands_in_the_middle_of_its_frames() -> None:
    """C136: what is said of a frame is when it is shown; the last one fills up its patch."""
    assert patch_times([0.0, 3.5, 7.0, 10.5], 2) == (1.75, 8.75)
    assert patch_times([0.0, 1.0, 5.0], 2) == (0.5, 5.0)
    assert patch_times([], 2) == ()
