"""Plain data of media: what is asked of an item, how a model wants it, and what was made of it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

MODALITIES = ("image", "video")
Resample = Literal["nearest", "lanczos", "bilinear", "bicubic", "box", "hamming"]
"""Pillow's filters, in the order of its numbers."""

_VERSION = "triptych media 1"
"""Part of every hash: to be changed whenever equal input gives other patches."""


@dataclass(slots=True, frozen=True)
class MediaOptions:
    """What a request asks of one item; None means as the model's processor says."""

    fps: float | None = None  # frames taken per second of a video
    num_frames: int | None = None  # frames taken in all; excludes fps
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None  # bounds of what an item is resized to, counted as PixelSettings counts
    max_pixels: int | None = None


@dataclass(slots=True, frozen=True)
class PixelSettings:
    """How a model wants items of one modality. Names are those of the processor's file where it has one."""

    modality: str  # "image" or "video"
    patch_size: int  # pixels along a side of a patch
    merge_size: int  # patches along a side that become one embedding
    temporal_patch_size: int  # frames in a patch
    min_pixels: int
    max_pixels: int
    image_mean: tuple[float, ...]  # per channel, of bytes that were divided by 255
    image_std: tuple[float, ...]
    resample: Resample = "bicubic"

    # Of videos alone.
    counts_frames: bool = False  # the pixels of all frames together are bounded, not those of each
    sampling: Literal["even", "strided"] = "even"  # first to last frame, or steps of one length from the first
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    max_video_tokens: int | None = None  # with a cap of pixels per frame: embeddings of one frame at most

    @property
    def side(self) -> int:
        """Pixels that both sides are multiples of."""
        return self.patch_size * self.merge_size

    @property
    def patch_bytes(self) -> int:
        """Bytes of one patch: channels x frames x height x width."""
        return len(self.image_mean) * self.temporal_patch_size * self.patch_size**2


@dataclass(slots=True, frozen=True)
class MediaSettings:
    """Limits of the server, the same for every model. Sizes in bytes, times in seconds."""

    folder: str  # where blobs lie; made if it is missing
    store_bytes: int = 1 << 30  # of blobs in the folder that no request needs any more
    processes: int = 2
    memory_bytes: int = 1 << 30  # what a process may take beyond what it has when idle
    decode_bytes: int = 512 << 20  # what the processes take together for pixels; a larger item runs alone
    seconds: float = 60.0  # for one item, without its time in the queue
    nice: int = 10  # 0 (as the gateway) to 19 (last)
    queue: int = 1024  # items waiting; more are refused
    image_pixels: int = 64_000_000
    image_side: int = 32_768  # pixels along one side
    free_bytes: int = 64 << 20  # that decoding an image may take, whatever the size of its file
    expansion: int = 1024  # beyond them: bytes that decoding may take for each byte of the file
    video_pixels: int = 16_777_216  # of one frame
    video_frames: int = 36_000  # in the file: 20 minutes at 30 a second
    chosen_frames: int = 768  # taken from it


@dataclass(slots=True, frozen=True)
class Processed:
    """What was made of an item. Its blob is named by the hash."""

    hash: bytes  # SHA-256 over content, settings and options, 32 bytes
    modality: str
    grid: tuple[int, int, int]  # patches in time, height and width
    embeddings: int  # that the encoder makes of it
    times: tuple[float, ...] = ()  # of a video: seconds at the middle of each patch in time
    seconds_per_patch: float = 0.0  # of a video: from one patch in time to the next, on the average
    nbytes: int = 0  # of the blob


def item_hash(digest: bytes, pixels: PixelSettings, options: MediaOptions) -> bytes:
    """The hash of what an item becomes: over the SHA-256 of its content, settings and options."""
    asked = {name: value for name, value in asdict(options).items() if value is not None}
    key: list[Any] = [_VERSION, digest.hex(), asdict(pixels), asked]
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).digest()
