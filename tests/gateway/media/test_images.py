"""Image files to pixels: each kind with the colours it stands for, and what is refused."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from services.gateway.media.child.bad import BadMedia, TooLarge
from services.gateway.media.child.headers import webp_size
from services.gateway.media.child.images import decode_bytes, open_image, pixels_of
from services.gateway.media.items import MediaSettings
from tests.gateway.media.files import chunk, encoded, noise, png, seen


def _refused(data: bytes, **limits: Any) -> str:
    with pytest.raises(BadMedia) as told:
        pixels_of(open_image(data, MediaSettings(".", **limits)))
    return str(told.value)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_images_are_turned_as_exif_says(kind: str, orientation: int) -> None:
    """C124: the corner that is red in the file stands where the tag puts it."""
    picture = Image.fromarray(noise(16, 24))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture, kind, exif=exif, **({"quality": 95} if kind == "JPEG" else {}))
    plain = Image.fromarray(seen(encoded(picture, kind, **({"quality": 95} if kind == "JPEG" else {}))))
    plain.getexif()[0x0112] = orientation
    found = seen(data)
    assert found.shape == ((16, 24, 3) if orientation < 5 else (24, 16, 3))
    assert (found == np.asarray(ImageOps.exif_transpose(plain))).all()


@pytest.mark.filterwarnings("ignore")  # Pillow's word for it, which a media process does not print
def test_exif_that_is_broken_costs_nothing() -> None:
    data = encoded(Image.new("RGB", (8, 8), "red"), "PNG")
    broken = chunk(b"eXIf", b"II*\0" + struct.pack("<I", 8) + b"\xff" * 9)
    assert (seen(data[:33] + broken + data[33:]) == (255, 0, 0)).all()


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_transparent_pixels_are_white(kind: str) -> None:
    """C125: whatever colours hide in them; half transparent black is half way to white."""
    pixels = np.concatenate([noise(16, 16), np.zeros((16, 16, 1), np.uint8)], axis=2)
    pixels[8:, :, :] = (0, 0, 0, 128)
    found = seen(encoded(Image.fromarray(pixels, "RGBA"), kind, **({"lossless": True} if kind == "WEBP" else {})))
    assert (found[:8] == 255).all()
    assert (np.abs(found[8:].astype(int) - 127) <= 1).all()


def test_transparent_grey_and_palettes_are_white() -> None:
    grey = Image.fromarray(np.dstack([noise(8, 8, channels=1), np.zeros((8, 8, 1), np.uint8)]), "LA")
    assert (seen(encoded(grey, "PNG")) == 255).all()
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 255, 255, 0, 0])
    palette.putpixel((0, 0), 0)
    assert seen(encoded(palette, "PNG"))[0, :2].tolist() == [[0, 0, 255], [255, 0, 0]]
    assert seen(encoded(palette, "PNG", transparency=1))[0, :2].tolist() == [[0, 0, 255], [255, 255, 255]]
    assert seen(encoded(palette, "GIF", transparency=1))[0, :2].tolist() == [[0, 0, 255], [255, 255, 255]]


def test_one_colour_may_be_transparent() -> None:
    """A tRNS chunk of a PNG without an alpha channel."""
    colours = Image.new("RGB", (4, 4), (1, 2, 3))
    colours.putpixel((0, 0), (9, 9, 9))
    assert seen(encoded(colours, "PNG", transparency=(1, 2, 3)))[0, :2].tolist() == [[9, 9, 9], [255, 255, 255]]


def test_inks_become_colours() -> None:
    """C149: CMYK as Adobe stores it, inverted and marked so."""
    inks = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    inverted = encoded(inks, "JPEG", quality=100)
    assert b"Adobe" in inverted
    assert (np.abs(seen(inverted).astype(int) - (255, 0, 0)) <= 2).all()


def test_sixteen_bits_become_eight() -> None:
    """C149: scaled, not cut off: 32768 is the middle, 200 is nearly black."""
    deep = np.array([[0, 200, 257, 32768, 65535]], np.uint16)
    found = seen(encoded(Image.fromarray(deep), "PNG"))
    assert found[0].tolist() == [[value] * 3 for value in (0, 1, 1, 128, 255)]
    assert found.dtype == np.uint8


def test_bits_grey_and_palettes_keep_their_colours() -> None:
    bits = Image.new("1", (8, 8), 0)
    bits.putpixel((1, 0), 1)
    assert seen(encoded(bits, "PNG"))[0, :2].tolist() == [[0] * 3, [255] * 3]
    grey = Image.new("L", (8, 8), 77)
    assert (seen(encoded(grey, "PNG")) == 77).all()
    assert (seen(encoded(grey, "BMP")) == 77).all()


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_of_moving_images_the_first_is_taken(kind: str) -> None:
    """C150."""
    pictures = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue", "lime", "white", "black")]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(pictures[0], kind, save_all=True, append_images=pictures[1:], duration=100, **options)
    assert (seen(data) == (255, 0, 0)).all()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
def test_files_that_break_off_are_refused(kind: str) -> None:
    """C127."""
    whole = encoded(Image.fromarray(noise(64, 64)), kind)
    assert "broken" in _refused(whole[:-128])
    assert "broken" in _refused(whole[: len(whole) // 2])


def test_a_palette_that_is_not_there_is_told() -> None:
    """The pixels of such a file load; what goes wrong is asking for their colours."""
    assert "broken" in _refused(png(2, 1, b"\0\0\1", colour=3))


@pytest.mark.parametrize(
    "data", [b"", b"not an image", b"<html>404</html>", b"%PDF-1.4", b"RIFF" + bytes(40), b"\x89PNG\r\n\x1a\n"]
)
def test_what_is_no_image_is_refused(data: bytes) -> None:
    assert _refused(data)


@pytest.mark.parametrize("kind", ["TIFF", "ICO", "PPM", "TGA"])
def test_other_kinds_are_refused(kind: str) -> None:
    assert "JPEG, PNG" in _refused(encoded(Image.new("RGB", (16, 16)), kind))


def test_sizes_are_read_before_pixels() -> None:
    """C126: a file of a few bytes may claim any size."""
    assert "12000 x 12000" in _refused(png(12_000, 12_000, bytes(68)))
    assert "10000 x 10000" in _refused(png(10_000, 10_000, bytes(12_500_000), depth=1, colour=0))
    assert "a side" in _refused(png(40_000, 10, bytes(100)))
    gif = bytearray(encoded(Image.new("RGB", (8, 8)), "GIF"))
    gif[6:10] = struct.pack("<HH", 65_535, 65_535)
    assert "65535 x 65535" in _refused(bytes(gif))
    webp = b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + b"\xff\x3e\0" * 2
    assert "16128 x 16128" in _refused(webp)


def test_large_images_must_be_worth_their_size() -> None:
    """14 million pixels in 42 kB are a blank page at best; a photograph of that size is taken."""
    white = png(3750, 3750, (b"\0" + b"\xff" * 11_250) * 3750)
    limits = MediaSettings(".")
    image = open_image(white, limits)
    with pytest.raises(TooLarge, match="may hold"):
        decode_bytes(image, len(white), limits)
    assert decode_bytes(image, 5_000_000, limits) == 3750 * 3750 * 5
    # What may still be a blank page, and may still be made to harm, is decoded with nothing beside it.
    blank = open_image(png(2000, 2000, (b"\0" + b"\xff" * 6000) * 2000), limits)
    assert decode_bytes(blank, 12_000, limits) == limits.decode_bytes


def test_texts_of_files_are_not_unpacked_without_end() -> None:
    text = chunk(b"zTXt", b"note\0\0" + zlib.compress(bytes(20_000_000), 9))
    assert "broken" in _refused(png(8, 8, bytes(200), extra=text))


@pytest.mark.parametrize("options", [{"lossless": True}, {"lossless": False}, {"lossless": True, "alpha": True}])
def test_sizes_of_webp_files(options: dict[str, bool]) -> None:
    alpha = options.pop("alpha", False)
    picture = Image.fromarray(noise(30, 50, channels=4 if alpha else 3))
    assert webp_size(encoded(picture, "WEBP", **options)) == (50, 30)
    assert webp_size(encoded(picture, "WEBP", exif=Image.Exif(), **options)) == (50, 30)
    assert webp_size(encoded(picture.convert("RGB"), "PNG")) is None
    moving = encoded(picture, "WEBP", save_all=True, append_images=[picture.transpose(Image.Transpose.ROTATE_180)])
    assert webp_size(moving) == (50, 30)
