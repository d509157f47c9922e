"""A media file that a gRPC client sends in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from protos import gateway_pb2
from services.common.channel import CHUNK_BYTES
from services.common.errors import DeadlineExceeded, InvalidArgument
from services.gateway.media.uploads import Uploads

_SILENCE_S = 60.0
"""Longest wait for the next piece."""


async def upload(uploads: Uploads, pieces: AsyncIterator[gateway_pb2.UploadMediaRequest]) -> bytes:
    """Keeps the file; its SHA-256. Nothing of it is left where that fails."""
    expected: bytes | None = None
    first = True
    with uploads.begin() as file:
        while (piece := await _next(pieces)) is not None:
            if piece.HasField("sha256"):
                expected = _expected(piece.sha256, first)
            if len(piece.data) > CHUNK_BYTES:
                raise InvalidArgument(f"data: a piece has at most {CHUNK_BYTES} bytes", field="data")
            await asyncio.to_thread(file.add, piece.data)
            first = False
        return await asyncio.to_thread(file.finish, expected)


async def _next(pieces: AsyncIterator[gateway_pb2.UploadMediaRequest]) -> gateway_pb2.UploadMediaRequest | None:
    try:
        async with asyncio.timeout(_SILENCE_S):
            return await anext(pieces, None)
    except TimeoutError:
        raise DeadlineExceeded(f"no piece of the file for {_SILENCE_S:g} s") from None


def _expected(digest: bytes, first: bool) -> bytes:
    if not first or len(digest) != 32:
        raise InvalidArgument("sha256: 32 bytes, on the first message only", field="sha256")
    return digest
