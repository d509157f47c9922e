"""Video files to chosen frames: the right ones, at the right times, whatever the file is like."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from services.gateway.media.child.bad import BadMedia
from services.gateway.media.items import MediaOptions
from services.gateway.media.sizes import choose_frames
from tests.gateway.media.files import (
    VIDEO,
    counting,
    encoded,
    every,
    frames_of,
    greens,
    noise,
    turned,
    video,
)

ONE_KEY = {"g": "1000", "sc_threshold": "0", "preset": "ultrafast", "qp": "0"}
QUARTERS = np.zeros((48, 64, 3), np.uint8)
QUARTERS[:24, :32] = (255, 0, 0)
"""Red at the top left."""


NOTHING = MediaOptions()


def _eight(times: Sequence[Fraction]) -> list[int]:
    return choose_frames(times, VIDEO, MediaOptions(num_frames=8))


def _refused(data: bytes, **limits: int) -> str:
    with pytest.raises(BadMedia) as told:
        frames_of(data, every, **limits)
    return str(told.value)


@pytest.mark.parametrize("bframes", ["0", "3"])
def test_frames_are_those_that_were_asked_for(bframes: str) -> None:
    """C134: one key frame for 200 frames; a seek would give others."""
    data = video(counting(200), rate=25, codec="libx264", options={**ONE_KEY, "bf": bframes})
    clip = frames_of(data, _eight)
    wanted = [0, 28, 57, 85, 114, 142, 171, 199]
    assert all(abs(green - index) <= 2 for green, index in zip(greens(clip), wanted, strict=True))
    assert clip.times == [index / 25 for index in wanted]


def test_times_are_those_of_the_frames() -> None:
    """C136: four frames of ten seconds and one step: the first and the last are among them."""
    clip = frames_of(video(counting(31), rate=3), lambda times: choose_frames(times, VIDEO, MediaOptions(num_frames=4)))
    assert clip.times == pytest.approx([0, 10 / 3, 20 / 3, 10])
    assert clip.seconds == pytest.approx(31 / 3 / 4)


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("mp4", "mpeg4"), ("matroska", "libx264"), ("webm", "libvpx-vp9"), ("avi", "mpeg4"), ("mpegts", "mpeg2video")],
)
def test_containers(kind: str, codec: str) -> None:
    """C140: MPEG-TS begins at 1.4 s and says no number of frames, Matroska rounds to milliseconds."""
    options = {"qp": "0"} if codec == "libx264" else {"lossless": "1"} if "vp9" in codec else {"qscale": "1"}
    clip = frames_of(video(counting(20), kind=kind, codec=codec, options=options), every)
    assert all(abs(green - index) <= 2 for index, green in enumerate(greens(clip)))
    assert clip.times == pytest.approx([index / 10 for index in range(20)], abs=1e-3)


def test_rates_that_are_no_decimal_fraction() -> None:
    """C140: 30000/1001."""
    clip = frames_of(video(counting(60), rate=Fraction(30_000, 1001)), every)
    assert clip.times == [index * 1001 / 30_000 for index in range(60)]


@pytest.mark.parametrize("kind", ["mp4", "avi", "matroska"])
def test_a_low_rate(kind: str) -> None:
    """C137: of 0.4 frames a second, two a second are wanted: all there are, and no more."""
    clip = frames_of(video(counting(6), rate=Fraction(2, 5), kind=kind), lambda at: choose_frames(at, VIDEO, NOTHING))
    assert clip.times == [index * 2.5 for index in range(6)]
    assert greens(clip) == pytest.approx(range(6), abs=2)


def test_no_rate() -> None:
    """C137: the headers of an AVI file say 0 frames a second, which FFmpeg takes for 25: the fewest are taken."""
    file = bytearray(video(counting(6), kind="avi"))
    rate, period = file.index(b"strh") + 8 + 20, file.index(b"avih") + 8
    file[rate : rate + 8] = bytes(8)
    file[period : period + 4] = bytes(4)
    clip = frames_of(bytes(file), lambda at: choose_frames(at, VIDEO, NOTHING))
    assert clip.times == [index / 25 for index in (0, 2, 3, 5)]


def test_a_varying_rate() -> None:
    stamps = [0, 100, 200, 300, 1000, 2000, 3000, 4000]
    data = video(counting(8), kind="matroska", codec="libx264", options={"qp": "0"}, at=stamps)
    clip = frames_of(data, lambda times: choose_frames(times, VIDEO, MediaOptions(num_frames=5)))
    assert clip.times == [0, 1, 2, 3, 4]
    assert greens(clip) == pytest.approx([0, 4, 5, 6, 7], abs=2)


def test_files_that_break_off_give_what_they_hold() -> None:
    """C139: the header of the AVI file still says 32 frames; the last ones are not there."""
    whole = video(counting(32), kind="avi", options={"qscale": "1", "g": "4"})
    clip = frames_of(whole[: len(whole) * 9 // 10], every)
    assert 20 < len(clip.frames) < 32
    assert clip.times == [index / 10 for index in range(len(clip.times))]
    assert all(abs(green - index) <= 2 for index, green in enumerate(greens(clip)[:-1]))


def test_frames_that_cannot_be_decoded_are_chosen_anew() -> None:
    """C139: packets are there, and one of them is rubbish: 31 frames, each with its own time."""
    file = bytearray(video(counting(32), kind="avi", codec="mjpeg", pixels="yuvj420p"))
    places = [found.start() for found in re.finditer(rb"00dc....\xff\xd8", file, re.DOTALL)]
    assert len(places) == 32
    file[places[12] + 8 : places[13]] = bytes(places[13] - places[12] - 8)
    clip = frames_of(bytes(file), every)
    assert clip.times == [index / 10 for index in range(32) if index != 12]
    assert greens(clip) == pytest.approx([index for index in range(32) if index != 12], abs=2)


@pytest.mark.parametrize(
    ("matrix", "corner"),
    [((1, 0, 0, 1), (0, 0)), ((0, 1, -1, 0), (0, -1)), ((-1, 0, 0, -1), (-1, -1)), ((0, -1, 1, 0), (-1, 0))],
)
def test_frames_are_turned(matrix: tuple[int, int, int, int], corner: tuple[int, int]) -> None:
    """C146: by the display matrix; a quarter turn clockwise (0, 1, -1, 0) brings the top left to the top right."""
    clip = frames_of(turned(video([QUARTERS] * 4), matrix), every)
    picture = clip.frames[0]
    assert picture.shape == ((48, 64, 3) if matrix[1] == 0 else (64, 48, 3))
    reds = {(y, x): int(picture[y, x, 0]) > 200 for y in (0, -1) for x in (0, -1)}
    assert reds == {place: place == corner for place in reds}


def test_frames_are_turned_by_the_old_tag() -> None:
    clip = frames_of(video([QUARTERS] * 4, kind="matroska", tags={"rotate": "90"}), every)
    assert clip.frames[0].shape == (64, 48, 3)
    assert clip.frames[0][0, -1, 0] > 200
    for odd in ("9" * 5000, "--5", "-", "east"):
        clip = frames_of(video([QUARTERS] * 4, kind="matroska", tags={"rotate": odd}), every)
        assert clip.frames[0].shape == (48, 64, 3)


def test_one_frame() -> None:
    """C138."""
    clip = frames_of(video(counting(1)), every)
    assert (clip.times, clip.seconds) == ([0.0], 0.0)


def test_a_moving_gif_is_a_video() -> None:
    pictures = [Image.new("RGB", (8, 8), (0, green, 0)) for green in (0, 100, 200)]
    clip = frames_of(
        encoded(pictures[0], "GIF", save_all=True, append_images=pictures[1:], duration=[100, 400, 100]), every
    )
    assert clip.times == [0, 0.1, 0.5]
    assert greens(clip) == pytest.approx([0, 100, 200], abs=2)


def test_what_is_no_video_is_refused() -> None:
    """C138."""
    whole = video(counting(20))
    assert "not a video" in _refused(b"")
    assert "not a video" in _refused(b"rubbish" * 100)
    assert _refused(whole[: len(whole) // 2])
    assert "not a video" in _refused(encoded(Image.fromarray(noise(16, 16)), "PNG"))


def test_sound_alone_is_refused() -> None:
    """C138: such a file opens, and has no video stream."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16_000)
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 16_000), np.float32), format="fltp", layout="mono")
        sound.sample_rate = 16_000
        container.mux(stream.encode(sound))
        container.mux(stream.encode(None))
    assert _refused(file.getvalue()) == "the file has no video in it"


def test_playlists_are_no_videos(tmp_path: object) -> None:
    """They would have the decoder open files and addresses of the sender's choice."""
    for text in ("#EXTM3U\n#EXTINF:1,\n/etc/passwd\n", "ffconcat version 1.0\nfile /etc/passwd\n"):
        assert "not a video" in _refused(text.encode())


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "codec"), [("mpegts", "libx264"), ("mp4", "libx264"), ("mov", "png")])
def test_frames_that_are_too_large_are_not_decoded_even_to_look(kind: str, codec: str, tmp_path: Path) -> None:
    """Opening a file decodes its beginning where the header leaves something open: 100 MB and more for these."""
    options = {"preset": "ultrafast"} if codec == "libx264" else {}
    black = [np.zeros((6400, 6400, 3), np.uint8)] * 2
    path = tmp_path / "video"
    path.write_bytes(
        video(black, kind=kind, codec=codec, options=options, pixels="rgb24" if codec == "png" else "yuv420p")
    )
    code = (
        "import resource, pathlib; from tests.gateway.media.files import every, frames_of\n"
        "from services.gateway.media.child.bad import BadMedia\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"try: frames_of(pathlib.Path({str(path)!r}).read_bytes(), every)\n"
        "except BadMedia: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    grown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert int(grown) < 60_000  # kB


def test_limits() -> None:
    data = video(counting(20, 64, 96))
    assert "at most 6143 " in _refused(data, video_pixels=64 * 96 - 1)
    assert "20 frames" in _refused(data, video_frames=19)
    assert "at most 19" in _refused(data, chosen_frames=19)
    long = video(
        [np.zeros((32_769, 2, 3), np.uint8)], kind="mov", codec="png", pixels="rgb24", options={"pred": "none"}
    )
    assert "2 x 32769 pixels are too large: a side may have 32768" in _refused(long)
    stream = video(counting(20, 64, 96), kind="mpegts", codec="mpeg2video")
    assert "more than 19" in _refused(stream, video_frames=19)
