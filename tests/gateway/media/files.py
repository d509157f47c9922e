"""Images and videos that tests make, and how blobs are read back."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protos import common_pb2
from services.gateway.media.child.images import open_image, pixels_of
from services.gateway.media.child.make import Job, make
from services.gateway.media.child.videos import Clip, read_video
from services.gateway.media.items import MediaOptions, MediaSettings, PixelSettings, Processed

Bytes = NDArray[np.uint8]
IMAGE = PixelSettings("image", 16, 2, 2, 1024, 1 << 20, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
VIDEO = replace(IMAGE, modality="video", max_pixels=131_072, min_pixels=4096, counts_frames=True, fps=2.0)
NAME = bytes(32)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    """The image as a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(height: int, width: int, *, seed: int = 0, channels: int = 3) -> Bytes:
    """Random pixels."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def seen(data: bytes) -> Bytes:
    """What an image file looks like, [H, W, C]."""
    return np.asarray(pixels_of(open_image(data, MediaSettings("."))).convert("RGB"))


def png(width: int, height: int, body: bytes, *, depth: int = 8, colour: int = 2, extra: bytes = b"") -> bytes:
    """A PNG file of any header and any body."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + extra + chunk(b"IDAT", zlib.compress(body, 9)) + chunk(b"IEND")
    )


def chunk(kind: bytes, body: bytes = b"") -> bytes:
    """One chunk of a PNG file."""
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def video(
    pictures: Iterable[Bytes],
    *,
    rate: Fraction | int = 10,
    kind: str = "mp4",
    codec: str = "mpeg4",
    pixels: str = "yuv420p",
    at: Sequence[int] | None = None,
    options: dict[str, str] | None = None,
    tags: dict[str, str] | None = None,
) -> bytes:
    """The pictures as a video, nearly without loss; `at` are time stamps in milliseconds."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = None
        for index, picture in enumerate(pictures):
            if stream is None:
                stream = container.add_stream(codec, rate=rate, options=options or {"qscale": "1"})
                stream.height, stream.width = picture.shape[:2]
                stream.pix_fmt = pixels
                stream.metadata.update(tags or {})
                stream.bit_rate = 8_000_000
                if at is not None:
                    stream.codec_context.time_base = Fraction(1, 1000)
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
            frame.pts = index if at is None else at[index]
            frame.time_base = Fraction(1, 1000) if at is not None else 1 / Fraction(rate)
            container.mux(stream.encode(frame))
        assert stream is not None
        container.mux(stream.encode(None))
    return file.getvalue()


def counting(count: int, height: int = 32, width: int = 32) -> list[Bytes]:
    """Pictures whose green channel is their number."""
    return [np.full((height, width, 3), (0, index, 0), np.uint8) for index in range(count)]


def greens(clip: Clip) -> list[int]:
    """The green of each frame, as `counting` wrote it: YUV with 8 bits moves it by up to 2."""
    return [round(float(frame[..., 1].mean())) for frame in clip.frames]


def turned(data: bytes, matrix: tuple[int, int, int, int]) -> bytes:
    """An MP4 file with another display matrix (a, b, c, d; ISO/IEC 14496-12, tkhd) in its only track."""
    place = data.index(b"tkhd") + 4 + 4 + 20 + 8 + 8
    a, b, c, d = (value << 16 for value in matrix)
    return data[:place] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[place + 36 :]


def frames_of(data: bytes, choose: Callable[[Sequence[Fraction]], list[int]], **limits: Any) -> Clip:
    """The chosen frames of a video, as they are."""
    return read_video(
        io.BytesIO(data),
        MediaSettings(".", **limits),
        choose,
        lambda count, header, need: None,
        lambda count, whole, image: np.asarray(image),
    )


def every(times: Sequence[Fraction]) -> list[int]:
    """Chooses all frames."""
    return list(range(len(times)))


def made(data: bytes, pixels: PixelSettings, folder: Path, **options: Any) -> tuple[Processed, Bytes]:
    """An item made here, in this process: what is said of it, and its patches, [N, patch_bytes]."""
    processed = make(Job(data, pixels, MediaOptions(**options), NAME), MediaSettings(str(folder)), lambda _: None)
    _, patches = read_blob((folder / NAME.hex()).read_bytes())
    (folder / NAME.hex()).unlink()
    return processed, patches


def read_blob(data: bytes) -> tuple[common_pb2.MediaBlob, Bytes]:
    """Head and patches of a blob."""
    (length,) = struct.unpack_from("<I", data)
    head = common_pb2.MediaBlob.FromString(data[4 : 4 + length])
    return head, np.frombuffer(data, np.uint8, offset=4 + length).reshape(-1, head.patch_bytes)
