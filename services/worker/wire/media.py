"""References to media: hash, size and place."""

from __future__ import annotations

from protos import common_pb2
from services.common.errors import InvalidArgument
from services.worker.step import MediaItem

HASH_BYTES = 32


def decode_hash(data: bytes, name: str) -> bytes:
    """The SHA-256 that names an item."""
    if len(data) != HASH_BYTES:
        raise InvalidArgument(f"{name} has {len(data)} bytes, not {HASH_BYTES}", field=name)
    return data


def decode_media(message: common_pb2.MediaRef, name: str, source: str = "") -> MediaItem:
    """The item. Raises InvalidArgument for one without embeddings, or with more of them than placeholder tokens,
    and for a grid that is not three numbers of at least 1 (audio has none)."""
    if not 1 <= message.embeddings <= message.length:
        raise InvalidArgument(
            f"{name} has {message.embeddings} embeddings for {message.length} placeholder tokens", field=name
        )
    grid = tuple(message.grid)
    if len(grid) != (0 if message.modality == "audio" else 3) or 0 in grid:
        raise InvalidArgument(f"{name}.grid is {list(grid)} for {message.modality}", field=f"{name}.grid")
    return MediaItem(
        hash=decode_hash(message.hash, f"{name}.hash"),
        modality=message.modality,
        offset=message.offset,
        length=message.length,
        embeddings=message.embeddings,
        grid=grid,
        source=source,
    )
