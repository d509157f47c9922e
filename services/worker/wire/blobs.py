"""Blobs: the bytes of one into its parts, and its bytes from the gateway that made it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import grpc.aio
import numpy as np
from google.protobuf.message import DecodeError

from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from services.common.channel import CHUNK_BYTES, connect
from services.common.errors import DataLoss
from services.common.server import error_of
from services.worker.blobs import Data
from services.worker.step import Blob

_HEAD_LIMIT = 4096


def decode_blob(data: Data) -> tuple[bytes, Blob]:
    """The hash of a whole blob and its parts; its patches stay where they are. Raises DataLoss for what is none."""
    view = memoryview(data)
    if len(view) < 4:
        raise DataLoss(f"a blob of {len(view)} bytes has no head")
    length = int.from_bytes(view[:4], "little")
    if length > min(_HEAD_LIMIT, len(view) - 4):
        raise DataLoss(f"a head of {length} bytes in a blob of {len(view)}")
    try:
        head = common_pb2.MediaBlob.FromString(bytes(view[4 : 4 + length]))
    except DecodeError:
        raise DataLoss("the head is no MediaBlob") from None
    grid, mean, std = tuple(head.grid), tuple(head.mean), tuple(head.std)
    if len(grid) != 3 or 0 in grid:
        raise DataLoss(f"grid is {list(grid)}", field="grid")
    if not mean or len(std) != len(mean) or head.patch_bytes % len(mean) or not head.patch_bytes:
        raise DataLoss(
            f"{len(mean)} means and {len(std)} deviations for patches of {head.patch_bytes} bytes", field="mean"
        )
    if not all(map(math.isfinite, (*mean, *std))) or min(std) <= 0:
        raise DataLoss("mean or std is no finite number, or std not above 0", field="std")
    count, found = math.prod(grid), len(view) - 4 - length
    if found != count * head.patch_bytes:
        raise DataLoss(f"{found} bytes for {count} patches of {head.patch_bytes}", field="patch_bytes")
    patches = np.frombuffer(data, np.uint8, offset=4 + length).reshape(count, head.patch_bytes)
    return head.hash, Blob(head.modality, grid, patches, mean, std)


async def fetch_blob(address: str, name: bytes, hear_size: Callable[[int], None]) -> bytearray:
    """A whole blob by its hash. Raises what the gateway answers, and DataLoss where pieces do not add up.

    `hear_size` gets the size before any of it is kept. A gateway's address is used once and forgotten: a channel
    costs about a millisecond, and gateways come and go.
    """
    try:
        async with connect(address) as channel:
            stub = gateway_pb2_grpc.BlobServiceStub(channel)
            return await _collect(stub.GetBlob(gateway_pb2.GetBlobRequest(hash=name)), hear_size)
    except grpc.aio.AioRpcError as error:
        raise error_of(error) from None


async def _collect(call: Any, hear_size: Callable[[int], None]) -> bytearray:
    data, size = bytearray(), None
    async for answer in call:
        if size is None:
            size = int(answer.size)
            hear_size(size)
        if len(answer.data) > CHUNK_BYTES or len(data) + len(answer.data) > size:
            raise DataLoss(f"more than the {size} bytes that were announced, or more than {CHUNK_BYTES} in a piece")
        data += answer.data
    if size is None or len(data) != size:
        raise DataLoss(f"{len(data)} of {size} bytes came")
    return data
