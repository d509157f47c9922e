"""Blobs: found in the folder of the host or fetched from a gateway, checked, and explicitly missing otherwise."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protos import common_pb2, gateway_pb2, gateway_pb2_grpc
from services.common.errors import DataLoss, NotFound
from services.common.server import Server
from services.worker import wire
from services.worker.blobs import Blobs
from services.worker.simulated import Cost, SimulatedRunner
from services.worker.step import Blob, MediaItem
from tests.worker.columns import SHAPE, frame, new_row
from tests.worker.harness import serving

HASH = hashlib.sha256(b"a picture").digest()
GRID = (1, 4, 6)
PATCH = 12
PATCHES = np.arange(24 * PATCH, dtype=np.uint8).reshape(24, PATCH)
ITEM = MediaItem(HASH, "image", 0, 6, 6, GRID)


def a_blob(patches: bytes = PATCHES.tobytes(), **changes: Any) -> bytes:
    fields: dict[str, Any] = {
        "hash": HASH,
        "modality": "image",
        "grid": GRID,
        "patch_bytes": PATCH,
        "mean": [0.5, 0.25, 0.125],
        "std": [0.5, 1, 2],
    }
    head = common_pb2.MediaBlob(**(fields | changes)).SerializeToString()
    return len(head).to_bytes(4, "little") + head + patches


def same(blob: Blob | None) -> bool:
    return blob is not None and np.array_equal(blob.patches, PATCHES) and blob.std == (0.5, 1.0, 2.0)


class Source(gateway_pb2_grpc.BlobServiceServicer):  # type: ignore[misc]
    """A gateway that has one blob, in pieces of so many bytes."""

    def __init__(self, data: bytes, piece: int = 100, size: int | None = None, pause: float = 0.0) -> None:
        self.data, self.piece, self.pause = data, piece, pause
        self.size = len(data) if size is None else size
        self.asked = 0

    async def GetBlob(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.asked += 1
        if request.hash != HASH:
            raise NotFound("no such blob", field="hash")
        for start in range(0, len(self.data), self.piece):
            await asyncio.sleep(self.pause)
            size = None if start else self.size
            yield gateway_pb2.GetBlobResponse(data=self.data[start : start + self.piece], size=size)


@asynccontextmanager
async def a_gateway(source: Source) -> AsyncIterator[MediaItem]:
    """The item, to be had from a server with that source."""
    server = Server(["127.0.0.1:0"])
    gateway_pb2_grpc.add_BlobServiceServicer_to_server(source, server.grpc)
    await server.start("triptych.v1.BlobService")
    try:
        yield MediaItem(HASH, "image", 0, 6, 6, GRID, f"127.0.0.1:{server.ports[0]}")
    finally:
        await server.stop(0)


def blobs_of(folder: Path, **limits: Any) -> Blobs:
    return Blobs(folder, wire.decode_blob, wire.fetch_blob, **limits)


async def took(blobs: Blobs, item: MediaItem) -> Blob | None:
    """What the step thread gets."""
    blobs.want([item])
    blob = await asyncio.to_thread(blobs.take, item.hash)
    blobs.done([item])
    assert blobs.held_bytes == 0
    return blob


async def test_a_blob_of_the_host_is_mapped(tmp_path: Path) -> None:
    (tmp_path / HASH.hex()).write_bytes(a_blob())
    blob = await took(blobs_of(tmp_path), ITEM)
    assert blob is not None
    assert same(blob)
    assert (blob.modality, blob.grid, blob.mean) == ("image", GRID, (0.5, 0.25, 0.125))
    assert not blob.patches.flags.owndata
    (tmp_path / HASH.hex()).unlink()
    assert same(blob), "what is mapped outlives its name"


async def test_what_the_host_lacks_is_fetched_in_pieces(tmp_path: Path) -> None:
    source = Source(a_blob())
    async with a_gateway(source) as item:
        assert same(await took(blobs_of(tmp_path), item))
        (tmp_path / HASH.hex()).write_bytes(a_blob())
        assert same(await took(blobs_of(tmp_path), item))
    assert source.asked == 1, "the folder comes first"


async def test_it_is_fetched_once_for_two_steps_on_their_way(tmp_path: Path) -> None:
    source = Source(a_blob(), pause=0.01)
    async with a_gateway(source) as item:
        blobs = blobs_of(tmp_path)
        blobs.want([item])
        blobs.want([item])
        assert same(await asyncio.to_thread(blobs.take, item.hash))
        blobs.done([item])
        assert same(blobs.take(item.hash))
        assert blobs.held_bytes == len(a_blob())
        blobs.done([item])
        assert blobs.held_bytes == 0
        assert blobs.take(item.hash) is None, "nobody wants it any more"
    assert source.asked == 1


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "no head"),
        (b"\5\0\0\0abc", "a head of 5 bytes"),
        (b"\xff\xff\xff\xff" + bytes(5000), "a head of"),
        (b"\2\0\0\0\xff\xff", "no MediaBlob"),
        (a_blob(patches=bytes(287)), "287 bytes for 24 patches of 12"),
        (a_blob(patches=bytes(289)), "289 bytes for 24"),
        (a_blob(grid=[4, 6]), "grid"),
        (a_blob(grid=[1, 0, 6], patches=b""), "grid"),
        (a_blob(patch_bytes=0, patches=b""), "patches of 0"),
        (a_blob(mean=[0.5, 0.5]), "2 means and 3 deviations"),
        (a_blob(mean=[], std=[]), "0 means"),
        (a_blob(std=[1, 0, 1]), "std"),
        (a_blob(mean=[0, 0, float("nan")]), "finite"),
        (a_blob(mean=[0.5] * 5, std=[1] * 5), "5 means"),
    ],
)
def test_what_is_no_blob_is_refused_by_name(data: bytes, named: str) -> None:
    with pytest.raises(DataLoss, match=named):
        wire.decode_blob(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"junk",
        a_blob()[:-1],
        a_blob(hash=bytes(32)),
        a_blob(modality="video"),
        a_blob(grid=[1, 6, 4]),
    ],
)
async def test_a_wrong_file_is_a_miss_and_then_fetched(tmp_path: Path, data: bytes) -> None:
    (tmp_path / HASH.hex()).write_bytes(data)
    assert await took(blobs_of(tmp_path), ITEM) is None
    async with a_gateway(Source(a_blob())) as item:
        assert same(await took(blobs_of(tmp_path), item))


async def test_missing_everywhere(tmp_path: Path) -> None:
    blobs = blobs_of(tmp_path / "not there")
    assert await took(blobs, ITEM) is None
    assert blobs.take(HASH) is None, "it was never wanted"
    async with a_gateway(Source(a_blob())) as item:
        other = MediaItem(bytes(32), "image", 0, 6, 6, GRID, item.source)
        assert await took(blobs, other) is None
    assert await took(blobs, MediaItem(HASH, "image", 0, 6, 6, GRID, "127.0.0.1:1")) is None


@pytest.mark.parametrize(
    "source",
    [
        Source(a_blob(), size=10),
        Source(a_blob(), size=len(a_blob()) + 1),
        Source(a_blob(hash=bytes(32))),
        Source(b""),
        Source(a_blob()[:40]),
    ],
)
async def test_a_gateway_that_sends_nonsense(tmp_path: Path, source: Source) -> None:
    async with a_gateway(source) as item:
        assert await took(blobs_of(tmp_path), item) is None


async def test_limits_of_bytes_and_time(tmp_path: Path) -> None:
    async with a_gateway(Source(a_blob(), piece=10)) as item:
        assert same(await took(blobs_of(tmp_path, limit_bytes=len(a_blob())), item))
        assert await took(blobs_of(tmp_path, limit_bytes=len(a_blob()) - 1), item) is None
    async with a_gateway(Source(a_blob(), pause=60.0)) as item:
        assert await took(blobs_of(tmp_path, limit_s=0.05), item) is None


async def test_a_fetch_that_no_step_waits_for_ends(tmp_path: Path) -> None:
    async with a_gateway(Source(a_blob(), pause=60.0)) as item:
        blobs = blobs_of(tmp_path)
        before = asyncio.all_tasks()
        blobs.want([item])
        (fetching,) = asyncio.all_tasks() - before
        blobs.done([item])
        await asyncio.wait([fetching])
        assert fetching.cancelled()


async def test_take_waits_for_what_is_on_its_way(tmp_path: Path) -> None:
    begun, go_on = threading.Event(), asyncio.Event()

    async def fetch(address: str, name: bytes, hear_size: Callable[[int], None]) -> bytearray:
        assert (address, name) == ("there", HASH)
        begun.set()
        await go_on.wait()
        return bytearray(a_blob())

    blobs = Blobs(tmp_path, wire.decode_blob, fetch)
    item = MediaItem(HASH, "image", 0, 6, 6, GRID, "there")
    blobs.want([item])
    taking = asyncio.create_task(asyncio.to_thread(blobs.take, item.hash))
    await asyncio.to_thread(begun.wait)
    assert not taking.done()
    go_on.set()
    assert same(await taking)
    blobs.done([item])


@pytest.mark.parametrize("fetching", [False, True])
async def test_a_step_that_comes_after_a_miss_looks_again(tmp_path: Path, fetching: bool) -> None:
    """The step before it, which missed or still fetches, has not been answered yet."""
    async with a_gateway(Source(a_blob(), pause=60.0)) as item:
        wanted = item if fetching else ITEM
        blobs = blobs_of(tmp_path)
        blobs.want([wanted])
        (tmp_path / HASH.hex()).write_bytes(a_blob())
        blobs.want([wanted])
        assert same(blobs.take(HASH))
        blobs.done([wanted])
        assert same(blobs.take(HASH))
        blobs.done([wanted])
        assert blobs.take(HASH) is None


async def test_a_step_that_comes_after_a_miss_fetches_again(tmp_path: Path) -> None:
    blobs = blobs_of(tmp_path)
    blobs.want([ITEM])
    assert blobs.take(HASH) is None
    async with a_gateway(Source(a_blob())) as item:
        blobs.want([item])
        blobs.done([ITEM])
        assert same(await asyncio.to_thread(blobs.take, HASH))
        blobs.done([item])


class TestSteps:
    """The service and a simulated runner, with the blobs of a folder."""

    def the_step(self, number: int, row: int, *, encodes: bool = True) -> Any:
        message = frame(number, [(row, 0, 8)], [new_row(row, b"abcdefgh", row + 1)])
        media = common_pb2.MediaRef(hash=HASH, modality="image", offset=1, length=6, embeddings=6, grid=GRID)
        message.new_rows[0].media.append(media)
        if encodes:
            message.encode.add(media=media)
        return message

    async def test_a_row_reads_what_was_encoded_and_a_miss_is_told(self, tmp_path: Path) -> None:
        blobs = blobs_of(tmp_path)
        runner = SimulatedRunner("", Cost(), SHAPE.max_model_len, blobs=blobs)
        async with serving(runner, tmp_path, blobs=blobs) as worker:
            await worker.prepare()
            stream = await worker.open()
            first = await stream.run(self.the_step(1, 0))
            assert (first.row_status_u8, list(first.missing_media)) == (b"\3", [HASH])
            (tmp_path / HASH.hex()).write_bytes(a_blob())
            second = await stream.run(self.the_step(2, 1))
            assert (second.row_status_u8, list(second.missing_media)) == (b"\0", [])
            third = await stream.run(self.the_step(3, 2, encodes=False))
            assert (third.row_status_u8, list(third.missing_media)) == (b"\0", []), "it is encoded once"
            assert worker.metric("triptych:worker_encoded_media_total", modality="image") == 1
            assert worker.metric("triptych:worker_missing_media_total") == 1
            assert blobs.held_bytes == 0
            assert blobs.take(HASH) is None, "nothing of it is kept"
