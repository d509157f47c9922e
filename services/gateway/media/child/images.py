"""Image files to pixels: JPEG, PNG, WebP, GIF, BMP; of an animated one the first picture.

Turned as EXIF says, laid on white where it is transparent, 8 bits a channel. A grey image stays one channel: each
channel is resized by itself, so that it becomes the same three, at a third of the memory.
"""

from __future__ import annotations

import contextlib
import io

import numpy as np
from PIL import (
    BmpImagePlugin,
    GifImagePlugin,
    Image,
    ImageOps,
    JpegImagePlugin,
    PngImagePlugin,
    UnidentifiedImageError,
    WebPImagePlugin,
)

from services.gateway.media.child.bad import BROKEN, BadMedia
from services.gateway.media.child.headers import check_image, room_for, webp_size
from services.gateway.media.items import MediaSettings

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
"""Few decoders are few ways in."""
_DECODERS = (JpegImagePlugin, PngImagePlugin, WebPImagePlugin, GifImagePlugin, BmpImagePlugin)
"""Named here, they are there when a file is opened, and Pillow loads no others."""

Image.MAX_IMAGE_PIXELS = None  # the limits are ours, and lower
PngImagePlugin.MAX_TEXT_CHUNK = 4 << 20  # unpacked texts and colour profiles of PNG files
PngImagePlugin.MAX_TEXT_MEMORY = 8 << 20


def open_image(data: bytes, limits: MediaSettings) -> Image.Image:
    """An image of which only the header was read, within the limits. Raises BadMedia."""
    if not data:
        raise BadMedia("no bytes")
    size = webp_size(data)
    if size is not None:
        check_image(*size, limits)
        room_for(size[0] * size[1], _WEBP_BYTES, len(data), limits)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadMedia("not an image that is taken (JPEG, PNG, WebP, GIF, BMP)") from None
    except BROKEN as error:
        raise _broken(error) from None
    check_image(image.width, image.height, limits)
    return image


def _broken(error: Exception) -> BadMedia:
    return BadMedia(f"a broken image ({error or type(error).__name__})")


def decode_bytes(image: Image.Image, nbytes: int, limits: MediaSettings) -> int:
    """Bytes to ask for before its pixels are made. Raises TooLarge where its file is too small for them."""
    each = _EACH.get(image.mode, 9)
    if image.format == "WEBP":
        each = _WEBP_BYTES
    elif image.format in (
        "JPEG",
        "MPO",
    ):  # may be turned, a second copy, or progressive: all coefficients at once
        each = 4 * each if image.mode == "L" else 11
    return room_for(image.width * image.height, each, nbytes, limits)


_WEBP_BYTES = 20
"""Two canvases of the decoder, its answer, and Pillow's own copy, which may become a second one."""
_EACH = {"1": 2, "L": 2, "I;16": 5, "I;16B": 5, "RGB": 5, "P": 6}
"""Bytes a pixel in Pillow's memory, and in the copies that bringing it into form makes; more for the others."""


def pixels_of(image: Image.Image) -> Image.Image:
    """All of the image, as it is to be seen: mode L or RGB. Raises BadMedia."""
    try:
        image.load()
    except BROKEN as error:
        raise _broken(error) from None
    # Nobody's pixels are wrong because of a broken note beside them.
    with contextlib.suppress(*BROKEN):
        ImageOps.exif_transpose(image, in_place=True)
    try:
        return _opaque(image)
    except BROKEN as error:  # say a palette that is not there
        raise _broken(error) from None


def _opaque(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _eight_bits(image)
    if image.has_transparency_data:
        return _on_white(image)
    if image.mode in ("L", "RGB"):
        return image
    if image.mode in ("1", "P", "CMYK", "YCbCr"):
        return image.convert("L" if image.mode == "1" else "RGB")
    raise BadMedia(f"an image of mode {image.mode}")


def _on_white(image: Image.Image) -> Image.Image:
    """Laid on white paper, a few rows at a time: no third copy of it."""
    paper = Image.new("RGB", image.size, "white")
    for top in range(0, image.height, _ROWS):
        strip = image.crop((0, top, image.width, min(top + _ROWS, image.height))).convert("RGBA")
        paper.paste(strip, (0, top), mask=strip.getchannel("A"))
    return paper


_ROWS = 64


def _eight_bits(image: Image.Image) -> Image.Image:
    """16 bits of grey to 8: 65535 is white, and 65535 / 257 is 255. (Pillow's own conversion cuts off at 255.)"""
    deep = np.asarray(image)
    grey = np.empty(deep.shape, np.uint8)
    for top in range(0, len(deep), _ROWS):  # 32-bit sums of a few rows at a time
        grey[top : top + _ROWS] = (deep[top : top + _ROWS].astype(np.uint32) + 128) // 257
    return Image.fromarray(grey, "L")
