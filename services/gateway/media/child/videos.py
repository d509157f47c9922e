"""Video files to chosen frames, by their time stamps.

    packets ──times of all frames──▶ choice ──decode forward──▶ frames of those times, resized one by one

Packets are read without decoding, so that the choice is made from what the file holds and not from what its header
says. Only decoding forward gives the frame that was asked for: a seek lands on a key frame, and many files have one.
Where a frame turns out not to be decodable, it is chosen once more among those that are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import BinaryIO

import av
import numpy as np
from av.container import InputContainer
from av.video.frame import VideoFrame
from av.video.stream import VideoStream
from numpy.typing import NDArray
from PIL import Image

from services.gateway.media.child.bad import BROKEN, BadMedia, TooLarge
from services.gateway.media.items import MediaSettings

_FORMATS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpegts,mpeg,flv,ogg,gif,asf"
"""Containers that hold their own frames; playlists and image sequences name other files."""

Size = tuple[int, int]
Choose = Callable[[Sequence[Fraction]], list[int]]
"""Times of all frames to indices of those to take."""
Pixels = NDArray[np.uint8]
"""[H, W, C]"""
Resize = Callable[[int, Size, Image.Image], Pixels]
"""Frames that are taken, height and width of the first as it is to be seen, a frame: the frame resized."""
Admit = Callable[[int, Size, int], None]
"""Frames that are taken, their size by the header, bytes that decoding takes: waits for room, or raises BadMedia."""

_BYTES_A_PIXEL = 32
"""What a decoder keeps: up to 16 frames to refer to, at 1.5 bytes, and the frame in colours."""


@dataclass(slots=True)
class Clip:
    """The frames that were taken, and the seconds at which they stand, from the first frame of the video on."""

    frames: list[Pixels] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    seconds: float = 0.0  # of the video, for each frame that was taken


def read_video(file: BinaryIO, limits: MediaSettings, choose: Choose, admit: Admit, resize: Resize) -> Clip:
    """The chosen frames. Raises BadMedia."""
    try:
        header, expected = _packet_times(file, limits)
        chosen = [expected[index] for index in choose(expected)]
        _check_chosen(chosen, limits)
        admit(len(chosen), header, header[0] * header[1] * _BYTES_A_PIXEL)
        clip, decoded = _decode(file, limits, expected, chosen, resize)
        if decoded is not None:
            if not decoded:
                raise BadMedia(f"no frame of at most {limits.video_pixels} pixels can be decoded")
            chosen = [decoded[index] for index in choose(decoded)]
            _check_chosen(chosen, limits)
            clip, _ = _decode(file, limits, expected, chosen, resize)
    except av.FFmpegError as error:
        raise BadMedia(f"not a video that is taken, or a broken one ({error.strerror})") from None
    except BROKEN as error:
        raise BadMedia(f"a broken video ({error or type(error).__name__})") from None
    if not clip.frames:
        raise BadMedia(f"no frame of at most {limits.video_pixels} pixels can be decoded")
    if len(expected) > 1:
        lasts = (expected[-1] - expected[0]) * len(expected) / (len(expected) - 1)
        clip.seconds = float(lasts / len(clip.frames))
    return clip


def _check_chosen(chosen: Sequence[Fraction], limits: MediaSettings) -> None:
    if len(chosen) > limits.chosen_frames:
        raise TooLarge(f"{len(chosen)} frames are too many: at most {limits.chosen_frames} are taken")


def _open(file: BinaryIO, limits: MediaSettings) -> tuple[InputContainer, VideoStream]:
    """The container and its first moving picture, both within the limits."""
    file.seek(0)
    most = {"max_pixels": str(limits.video_pixels)}  # for the decoder too: opening a file may decode its beginning
    options = {"format_whitelist": _FORMATS, "protocol_whitelist": "", **most}
    container = av.open(file, "r", options=options, metadata_errors="ignore")
    streams = [stream for stream in container.streams.video if not stream.disposition & _COVER]
    if not streams:
        container.close()
        raise BadMedia("the file has no video in it")
    stream = streams[0]
    context = stream.codec_context
    if context is None:
        container.close()
        raise BadMedia("the video's codec is unknown")
    _check_size(context.width, context.height, limits)
    context.options = most
    context.thread_count = 1  # processes are what runs side by side
    return container, stream


_COVER = av.stream.Disposition.attached_pic


def _check_size(width: int, height: int, limits: MediaSettings) -> None:
    size = f"frames of {width} x {height} pixels"
    if max(width, height) > limits.image_side:  # resizing along the one side first would make a long one a large one
        raise TooLarge(f"{size} are too large: a side may have {limits.image_side}")
    if width * height > limits.video_pixels:
        raise TooLarge(f"{size}: at most {limits.video_pixels} are taken")


def _packet_times(file: BinaryIO, limits: MediaSettings) -> tuple[Size, list[Fraction]]:
    """Height and width by the header, and the times of all frames, in order, by the packets; nothing is decoded."""
    container, stream = _open(file, limits)
    header = (max(1, stream.codec_context.height), max(1, stream.codec_context.width))
    step = 1 / stream.average_rate if stream.average_rate else Fraction(1, 25)
    times: list[Fraction] = []
    with container:
        if stream.frames > limits.video_frames:
            raise TooLarge(f"{stream.frames} frames in the file: at most {limits.video_frames} are taken")
        for packet in _packets(container, stream):
            stamp = packet.pts if packet.pts is not None else packet.dts
            base = packet.time_base or stream.time_base
            if packet.is_discard:
                continue
            times.append(stamp * base if stamp is not None and base else (times[-1] + step if times else Fraction(0)))
            if len(times) > limits.video_frames:
                raise TooLarge(f"more than {limits.video_frames} frames in the file: so many are taken")
    if not times:
        raise BadMedia("the video has no frames")
    return header, sorted(set(times))


def _packets(container: InputContainer, stream: VideoStream) -> Iterator[av.Packet[VideoStream]]:
    """Packets up to the end, or up to where the file breaks off."""
    try:
        yield from (packet for packet in container.demux(stream) if packet.size)
    except av.FFmpegError:
        return


def _frames(container: InputContainer, stream: VideoStream) -> Iterator[VideoFrame]:
    """Frames in the order of their times. What cannot be decoded is left out."""
    for packet in _packets(container, stream):
        try:
            yield from stream.decode(packet)
        except av.FFmpegError:
            continue
    try:
        yield from stream.decode(None)
    except av.FFmpegError:
        return


def _decode(
    file: BinaryIO, limits: MediaSettings, expected: Sequence[Fraction], chosen: Sequence[Fraction], resize: Resize
) -> tuple[Clip, list[Fraction] | None]:
    """The chosen frames; with them, where one of them did not come, the times of all that came, instead."""
    container, stream = _open(file, limits)
    clip, seen, wanted = Clip(), list[Fraction](), 0
    turn = _legacy_turn(stream)
    whole: Size | None = None
    missing = False
    with container:
        for frame in _frames(container, stream):
            at = _time_of(frame, stream, expected, len(seen))
            seen.append(at)
            if missing or at < chosen[wanted]:
                continue
            if at > chosen[wanted]:
                missing = True
                continue
            _check_size(frame.width, frame.height, limits)
            picture = _upright(frame, turn)
            whole = whole or (picture.height, picture.width)
            clip.frames.append(resize(len(chosen), whole, picture))
            clip.times.append(float(max(at - expected[0], Fraction(0))))
            wanted += 1
            if wanted == len(chosen):
                return clip, None
    return clip, sorted(set(seen))


def _time_of(frame: VideoFrame, stream: VideoStream, expected: Sequence[Fraction], index: int) -> Fraction:
    """Where the frame stands; one without a time stamp stands where the packets say that the next one does."""
    base = frame.time_base or stream.time_base
    if frame.pts is not None and base:
        return frame.pts * base
    return expected[min(index, len(expected) - 1)]


def _legacy_turn(stream: VideoStream) -> int:
    """Degrees to turn counter-clockwise, of files that say it in a tag ("rotate", clockwise)."""
    tag = next((value for key, value in stream.metadata.items() if key.lower() == "rotate"), "")
    return -int(tag) if len(tag) < 5 and tag.removeprefix("-").isdecimal() else 0


def _upright(frame: VideoFrame, turn: int) -> Image.Image:
    """The picture as it is to be seen: the display matrix counts, the tag where there is none."""
    picture = Image.fromarray(frame.to_ndarray(format="rgb24"))
    method = _TURNS.get((frame.rotation or turn) % 360)
    return picture if method is None else picture.transpose(method)


_TURNS = {90: Image.Transpose.ROTATE_90, 180: Image.Transpose.ROTATE_180, 270: Image.Transpose.ROTATE_270}
