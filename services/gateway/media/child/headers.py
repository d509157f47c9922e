"""What an image file says of its size, and whether that is taken, before a pixel is decoded."""

from __future__ import annotations

from services.gateway.media.child.bad import BadMedia, TooLarge
from services.gateway.media.items import MediaSettings


def webp_size(data: bytes) -> tuple[int, int] | None:
    """Width and height of a WebP file; None where it is not one.

    Read here because Pillow's decoder makes room for all pixels as soon as a file is opened. Layout: RFC 9649.
    """
    if len(data) < 30 or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    kind, body = data[12:16], data[20:]
    if kind == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8L" and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    raise BadMedia("a broken WebP file")


def check_image(width: int, height: int, limits: MediaSettings) -> None:
    """Raises TooLarge where an image of this size is not taken."""
    size = f"{width} x {height} pixels"
    if width < 1 or height < 1:
        raise BadMedia(f"an image of {size}")
    if max(width, height) > limits.image_side:
        raise TooLarge(f"{size} are too large: a side may have {limits.image_side}")
    if width * height > limits.image_pixels:
        raise TooLarge(f"{size} are too many: at most {limits.image_pixels} are taken")


def room_for(pixels: int, each: int, nbytes: int, limits: MediaSettings) -> int:
    """Bytes to ask for, before so many pixels are decoded at so many bytes each, from a file of `nbytes`.

    A file that unpacks far beyond its size is decoded alone: it is a blank page, or made to harm. Raises TooLarge
    where it goes so far that it can only be the latter, or costs as much.
    """
    need = pixels * each
    if need > max(limits.free_bytes, nbytes * limits.expansion):
        raise TooLarge(f"{pixels} pixels from {nbytes} bytes: a file of so few may hold {limits.free_bytes // each}")
    suspicious = need > max(limits.free_bytes // 4, nbytes * limits.expansion // 4)
    return limits.decode_bytes if suspicious else need
