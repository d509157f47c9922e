"""An item made: its file read, decoded, resized, and written as a blob."""

from __future__ import annotations

import errno
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from services.gateway.media.child.bad import NoRoom, TooLarge
from services.gateway.media.child.images import decode_bytes, open_image, pixels_of
from services.gateway.media.child.patches import write_patches
from services.gateway.media.child.videos import Clip, Pixels, Size, read_video
from services.gateway.media.items import MediaOptions, MediaSettings, PixelSettings, Processed
from services.gateway.media.sizes import choose_frames, image_size, patch_times, video_size
from services.gateway.media.store import writing
from services.gateway.media.wire import blob_head

Ask = Callable[[int], None]
"""Waits until so many bytes may be taken."""


@dataclass(slots=True, frozen=True)
class Job:
    """One item. `data` is its content, or the file where that lies."""

    data: bytes | Path
    pixels: PixelSettings
    options: MediaOptions
    name: bytes  # its hash


def make(job: Job, limits: MediaSettings, ask: Ask) -> Processed:
    """Writes the blob. Raises BadMedia, and whatever a decoder raises over a broken file."""
    if job.pixels.modality == "image":
        return _written(job, Clip([_image(job, limits, ask)]), limits)
    with _opened(job.data) as file:
        return _written(job, _video(file, job, limits, ask), limits)


def _opened(data: bytes | Path) -> BinaryIO:
    return io.BytesIO(data) if isinstance(data, bytes) else data.open("rb")


def _image(job: Job, limits: MediaSettings, ask: Ask) -> Pixels:
    data = job.data if isinstance(job.data, bytes) else job.data.read_bytes()
    image = open_image(data, limits)
    need = decode_bytes(image, len(data), limits)
    ask(need + _result(1, image_size(image.height, image.width, job.pixels, job.options), job, limits))
    whole = pixels_of(image)
    return _resized(whole, image_size(whole.height, whole.width, job.pixels, job.options), job.pixels)


def _video(file: BinaryIO, job: Job, limits: MediaSettings, ask: Ask) -> Clip:
    def choose(times: Sequence[Fraction]) -> list[int]:
        return choose_frames(times, job.pixels, job.options)

    def admit(count: int, header: Size, decoding: int) -> None:
        ask(decoding + _result(count, video_size(count, *header, job.pixels, job.options), job, limits))

    def resize(count: int, whole: Size, picture: Image.Image) -> Pixels:
        return _resized(picture, video_size(count, *whole, job.pixels, job.options), job.pixels)

    return read_video(file, limits, choose, admit, resize)


def _result(frames: int, size: Size, job: Job, limits: MediaSettings) -> int:
    """Bytes in memory of so many resized frames. Raises TooLarge where their patches are more than the store keeps."""
    pixels = frames * size[0] * size[1]
    patches = -(-frames // job.pixels.temporal_patch_size) * job.pixels.temporal_patch_size * size[0] * size[1] * 3
    if patches > limits.store_bytes:
        raise TooLarge(f"{frames} x {size[1]} x {size[0]} pixels to encode: {limits.store_bytes} bytes are kept")
    return pixels * 4


def _resized(image: Image.Image, size: Size, pixels: PixelSettings) -> Pixels:
    """[H, W, C] of that size.

    Images are resized as Pillow does it. Videos always along the width first: so does torchvision, with which the
    models' own processors resize them, while Pillow takes the cheaper order. The orders differ by up to 30 of 255
    where sharp edges are cut off at black and white between the passes; in one order Pillow and torchvision differ
    by at most 1, in less than 1 % of all bytes.
    """
    height, width = size
    method = Image.Resampling[pixels.resample.upper()]
    if pixels.modality == "video":
        image = image.resize((width, image.height), method)
    return np.asarray(image.resize((width, height), method).convert("RGB"))


def _written(job: Job, clip: Clip, limits: MediaSettings) -> Processed:
    """The blob of the frames; the last patch in time is filled up by the last frame. Raises NoRoom."""
    pixels, frames = job.pixels, clip.frames
    high, wide = (side // pixels.patch_size for side in frames[0].shape[:2])
    temporal = pixels.temporal_patch_size
    grid = (-(-len(frames) // temporal), high, wide)
    head = blob_head(job.name, pixels, grid)
    try:
        with writing(Path(limits.folder), job.name) as file:
            file.write(head)
            for first in range(0, len(frames), temporal):
                together = frames[first : first + temporal]
                write_patches(file, np.stack([*together, *together[-1:] * (temporal - len(together))]), pixels)
            nbytes = file.tell()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NoRoom(len(head) + grid[0] * high * wide * pixels.patch_bytes) from None
    embeddings = grid[0] * high * wide // pixels.merge_size**2
    times = patch_times(clip.times, temporal)
    return Processed(job.name, pixels.modality, grid, embeddings, times, temporal * clip.seconds, nbytes)
