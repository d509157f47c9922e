"""Image files to pixels: JPEG, PNG, WebP, GIF, BMP; of an animated one the first picture.

Turned as EXIF says, laid on white where it is transparent, 8 bits a channel. A grey image stays one channel: each
channel is resized by itself, so that it becomes the same three, at a third of the memory.
"""

from __future__ import annotations

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
from services.gateway.media.child.headers import check_image, webp_size
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
        check_image(*size, len(data), limits)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise BadMedia("not an image that is taken (JPEG, PNG, WebP, GIF, BMP)") from None
    except BROKEN as error:
        raise broken(error) from None
    check_image(image.width, image.height, len(data), limits)
    return image


def broken(error: Exception) -> BadMedia:
    """What Pillow says of a broken file."""
    return BadMedia(f"a broken image ({error or type(error).__name__})")


def decode_bytes(image: Image.Image) -> int:
    """About how many bytes it takes to decode it and to bring it into form."""
    each = {"1": 2, "L": 3, "I;16": 8}.get(image.mode, 12)
    return image.width * image.height * (each if image.format != "WEBP" else 20)


def pixels_of(image: Image.Image) -> Image.Image:
    """All of the image, as it is to be seen: mode L or RGB. Raises BadMedia."""
    try:
        image.load()
    except BROKEN as error:
        raise broken(error) from None
    try:
        turned = ImageOps.exif_transpose(image)
    except BROKEN:  # nobody's pixels are wrong because of a broken note beside them
        turned = image
    return _opaque(turned)


def _opaque(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I;16"):
        return _eight_bits(image)
    if image.has_transparency_data:
        coloured = image if image.mode == "RGBA" else image.convert("RGBA")
        paper = Image.new("RGB", image.size, "white")
        paper.paste(coloured, mask=coloured.getchannel("A"))
        return paper
    if image.mode in ("1", "L"):
        return image.convert("L")
    if image.mode in ("P", "RGB", "CMYK", "YCbCr", "RGBX"):
        return image.convert("RGB")
    raise BadMedia(f"an image of mode {image.mode}")


def _eight_bits(image: Image.Image) -> Image.Image:
    """16 bits of grey to 8: 65535 is white, and 65535 / 257 is 255. (Pillow's own conversion cuts off at 255.)"""
    deep = np.asarray(image)
    grey = np.empty(deep.shape, np.uint8)
    for top in range(0, len(deep), 256):  # 32-bit sums of a few rows at a time
        grey[top : top + 256] = (deep[top : top + 256].astype(np.uint32) + 128) // 257
    return Image.fromarray(grey, "L")
