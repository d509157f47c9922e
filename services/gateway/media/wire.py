"""The head of a blob as a message (common.proto, MediaBlob)."""

from __future__ import annotations

import struct

from protos import common_pb2
from services.gateway.media.items import PixelSettings


def blob_head(name: bytes, pixels: PixelSettings, grid: tuple[int, int, int]) -> bytes:
    """What a blob begins with: four bytes of length, then the message; patches follow."""
    message = common_pb2.MediaBlob(
        hash=name,
        modality=pixels.modality,
        grid=grid,
        patch_bytes=pixels.patch_bytes,
        mean=pixels.image_mean,
        std=pixels.image_std,
    ).SerializeToString()
    return struct.pack("<I", len(message)) + message
