"""BlobService: blobs in pieces from a real store, pinned or not, and put back where a worker finds them."""

from __future__ import annotations

import asyncio
import hashlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from protos import gateway_pb2, gateway_pb2_grpc
from services.common.channel import CHUNK_BYTES, connect
from services.common.errors import FailedPrecondition
from services.common.server import error_of
from services.gateway.media.store import BlobStore, writing
from services.gateway.service.blobs import BlobDoor

BLOB = bytes(range(256)) * 10_000  # 2.4 pieces
NAME = hashlib.sha256(BLOB).digest()


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    store = BlobStore(tmp_path / "blobs", 1 << 30)
    with writing(store.folder, NAME) as file:
        file.write(BLOB)
    return store


@asynccontextmanager
async def opened(store: BlobStore | None) -> AsyncIterator[Any]:
    door = BlobDoor(lambda: store, "127.0.0.1", 0)
    await door.start()
    try:
        async with connect(door.address) as channel:
            yield gateway_pb2_grpc.BlobServiceStub(channel)
    finally:
        await door.stop()


async def fetched(stub: Any, name: bytes = NAME) -> list[Any]:
    return [answer async for answer in stub.GetBlob(gateway_pb2.GetBlobRequest(hash=name))]


async def test_a_blob_in_pieces(store: BlobStore) -> None:
    async with opened(store) as stub:
        answers = await fetched(stub)
    assert [len(answer.data) for answer in answers] == [CHUNK_BYTES, CHUNK_BYTES, len(BLOB) - 2 * CHUNK_BYTES]
    assert b"".join(answer.data for answer in answers) == BLOB
    assert [answer.size if answer.HasField("size") else None for answer in answers] == [len(BLOB), None, None]


async def test_many_at_once(store: BlobStore) -> None:
    async with opened(store) as stub:
        for answers in await asyncio.gather(*(fetched(stub) for _ in range(8))):
            assert b"".join(answer.data for answer in answers) == BLOB


async def test_what_is_pinned_outlives_its_name(store: BlobStore) -> None:
    pin = store.pin(NAME)
    assert pin is not None
    store.path(NAME).unlink()
    async with opened(store) as stub:
        assert b"".join(answer.data for answer in await fetched(stub)) == BLOB
        pin.release()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fetched(stub)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    ("name", "code"),
    [(bytes(32), grpc.StatusCode.NOT_FOUND), (b"short", grpc.StatusCode.INVALID_ARGUMENT)],
)
async def test_what_is_not_there(store: BlobStore, name: bytes, code: grpc.StatusCode) -> None:
    async with opened(store) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fetched(stub, name)
    assert caught.value.code() is code
    assert error_of(caught.value).field == "hash"


async def test_a_process_without_a_model_that_takes_media_has_no_blobs() -> None:
    async with opened(None) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await fetched(stub)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_the_address_that_workers_are_told() -> None:
    for host, announce, told in (
        ("127.0.0.1", "", "127.0.0.1"),
        ("127.0.0.1", "gateway-7", "gateway-7"),
        ("0.0.0.0", "", socket.gethostname()),
        ("0.0.0.0", "::1", "[::1]"),
    ):
        door = BlobDoor(lambda: None, host, 0, announce)
        await door.start()
        assert door.address.rpartition(":")[0] == told
        assert int(door.address.rpartition(":")[2]) > 0
        await door.stop()


@pytest.mark.parametrize("left", [None, b"", b"something else"])
async def test_a_blob_is_put_back_from_its_pin(store: BlobStore, left: bytes | None) -> None:
    pin = store.pin(NAME)
    assert pin is not None
    store.path(NAME).unlink()
    if left is not None:
        store.path(NAME).write_bytes(left)
    door = BlobDoor(lambda: store, "127.0.0.1", 0)
    await asyncio.gather(door.put_back([NAME]), door.put_back([NAME, NAME]))
    assert store.path(NAME).read_bytes() == BLOB
    assert [path.name for path in store.folder.iterdir()] == [NAME.hex()], "no half of it is left"
    BlobStore(store.folder, 0).make_room()
    assert store.path(NAME).read_bytes() == BLOB, "the pin holds the copy"
    pin.release()
    assert store.pinned == 0


async def test_what_lies_where_it_should_is_left_alone(store: BlobStore) -> None:
    pin = store.pin(NAME)
    assert pin is not None
    before = store.path(NAME).stat().st_ino
    await BlobDoor(lambda: store, "127.0.0.1", 0).put_back([NAME])
    assert store.path(NAME).stat().st_ino == before
    pin.release()


async def test_what_nobody_holds_is_gone(store: BlobStore) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        await BlobDoor(lambda: store, "127.0.0.1", 0).put_back([bytes(32)])
    assert caught.value.reason == "MEDIA_MISSING"
    with pytest.raises(FailedPrecondition):
        await BlobDoor(lambda: None, "127.0.0.1", 0).put_back([NAME])
