"""Items for requests: made once however many ask, found again, pinned, and nothing left of those that failed."""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import struct
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image

from services.common.errors import InvalidArgument
from services.gateway.media.items import MediaOptions, MediaSettings, item_hash
from services.gateway.media.prepare import MediaSide, Prepared
from tests.gateway.media.files import IMAGE, VIDEO, chunk, counting, encoded, noise, png, video

WHERE = "messages[0].content[1]"
NOTHING = MediaOptions()


def _side(folder: Path, **settings: Any) -> MediaSide:
    return MediaSide(MediaSettings(str(folder), **{"processes": 1, **settings}))


def _picture(seed: int = 0) -> bytes:
    return encoded(Image.fromarray(noise(64, 96, seed=seed)), "PNG")


def _blobs(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


async def test_the_same_item_at_once_is_made_once(tmp_path: Path) -> None:
    """C133."""
    async with _side(tmp_path, processes=2) as side:
        all_of_them = await asyncio.gather(*(side.prepare(_picture(), IMAGE, NOTHING, WHERE) for _ in range(8)))
        assert side.made == 1
        assert len({prepared.processed.hash for prepared in all_of_them}) == 1
        assert side.store.pinned == 1
        for prepared in all_of_them:
            prepared.pin.release()
        assert side.store.pinned == 0
        again = await side.prepare(_picture(), IMAGE, NOTHING, WHERE)
        assert (side.made, again.processed) == (1, all_of_them[0].processed)


async def test_64_videos_of_16_frames_are_decoded_once_each(tmp_path: Path) -> None:
    """The seed of this project; each comes twice."""
    videos = [video([(picture + seed) for picture in counting(16, 64, 64)], rate=2) for seed in range(64)]
    async with _side(tmp_path, processes=2) as side:
        made = await asyncio.gather(*(side.prepare(data, VIDEO, NOTHING, WHERE) for data in videos * 2))
        assert side.made == 64
        assert side.processes.started == 2
        assert {prepared.processed.grid for prepared in made} == {(8, 4, 4)}
        assert len({prepared.processed.hash for prepared in made}) == 64


async def test_options_and_settings_make_other_items(tmp_path: Path) -> None:
    async with _side(tmp_path) as side:
        plain = await side.prepare(_picture(), IMAGE, NOTHING, WHERE)
        large = await side.prepare(_picture(), IMAGE, MediaOptions(min_pixels=65_536), WHERE)
    assert plain.processed.hash != large.processed.hash
    assert large.processed.embeddings == 70
    digest = hashlib.sha256(_picture()).digest()
    assert plain.processed.hash == item_hash(digest, IMAGE, NOTHING)
    assert item_hash(digest, VIDEO, NOTHING) != item_hash(digest, IMAGE, NOTHING)


async def test_items_are_found_by_the_hash_of_their_content(tmp_path: Path) -> None:
    digest = hashlib.sha256(_picture()).digest()
    path = tmp_path / "upload"
    path.write_bytes(_picture())
    async with _side(tmp_path / "blobs") as side:
        assert side.find(digest, IMAGE, NOTHING) is None
        first = await side.prepare(path, IMAGE, NOTHING, WHERE)
        found = side.find(digest, IMAGE, NOTHING)
        assert found is not None
        assert found.processed == first.processed
        third = await side.prepare(path, IMAGE, NOTHING, WHERE, digest=digest)
        assert side.made == 1
        for prepared in (first, found, third):
            prepared.pin.release()
        (tmp_path / "blobs" / first.processed.hash.hex()).unlink()
        assert side.find(digest, IMAGE, NOTHING) is None


async def test_an_item_that_was_evicted_is_made_again(tmp_path: Path) -> None:
    async with _side(tmp_path, store_bytes=40_000) as side:  # one has 37,000 and may be one too many
        for seed in (0, 1, 2, 0):
            (await side.prepare(_picture(seed), IMAGE, NOTHING, WHERE)).pin.release()
        assert side.made == 4
        assert len(_blobs(tmp_path)) == 2


async def test_a_failure_is_told_to_each_at_its_own_place(tmp_path: Path) -> None:
    places = [f"messages[{index}].content[0]" for index in range(3)]
    async with _side(tmp_path) as side:
        told = await asyncio.gather(
            *(side.prepare(_picture()[:-90], IMAGE, NOTHING, place) for place in places), return_exceptions=True
        )
        for error, place in zip(told, places, strict=True):
            assert isinstance(error, InvalidArgument)
            assert error.field == place
            assert str(error).startswith(f"{place}: a broken image")
        assert (side.made, side.store.pinned, side.processes.waiting) == (0, 0, 0)
        assert not _blobs(tmp_path)
        assert isinstance(await side.prepare(_picture(), IMAGE, NOTHING, WHERE), Prepared)


async def test_those_who_go_away_leave_nothing(tmp_path: Path) -> None:
    """One of two that wait goes: the other is served. Both go: the item is not made, if it was not begun."""
    async with _side(tmp_path) as side:
        first, second = (asyncio.create_task(side.prepare(_picture(), IMAGE, NOTHING, WHERE)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        (await second).pin.release()
        busy = asyncio.create_task(side.prepare(_picture(1), IMAGE, NOTHING, WHERE))
        for _ in range(50):
            await asyncio.sleep(0)
        gone = [asyncio.create_task(side.prepare(_picture(2), IMAGE, NOTHING, WHERE)) for _ in range(2)]
        await asyncio.sleep(0)
        for task in gone:
            task.cancel()
        await asyncio.gather(*gone, return_exceptions=True)
        (await busy).pin.release()
        assert not side._flights
        assert (side.store.pinned, side.processes.waiting) == (0, 0)


def _bombs() -> list[bytes]:
    """32 files that would take gigabytes if they were believed, or as much as is allowed where they are taken."""
    screen = bytearray(encoded(Image.new("P", (64, 64)), "GIF"))
    screen[6:10] = struct.pack("<HH", 60_000, 60_000)
    unpacked = zlib.compress(bytes(20_000_000), 9)
    small = bytes(64 * 193)
    refused = [
        png(12_000, 12_000, bytes(68)),
        png(10_000, 10_000, bytes(12_510_000), depth=1, colour=0),
        png(64, 64, small, extra=chunk(b"zTXt", b"note\0\0" + unpacked)),
        png(64, 64, small, extra=chunk(b"iCCP", b"p\0\0" + unpacked)),
    ]
    taken = [
        png(2600, 2600, (b"\0" + bytes(2600 * 4)) * 2600, colour=6),  # all transparent
        png(5500, 5500, bytes(5501 * 5500), colour=0),  # grey needs little
    ]
    marks = [chunk(b"tEXt", b"n\0" + bytes([65 + number])) for number in range(5)]
    return [
        *(kind[:33] + mark + kind[33:] for kind in refused for mark in marks),
        *(kind[:33] + mark + kind[33:] for kind in taken for mark in marks[:2]),
        *(bytes(screen) + bytes([number]) for number in range(4)),
        *(encoded(Image.new("RGB", (1800 + number, 1800)), "WEBP") for number in range(4)),  # taken
    ]


def _resident(pids: list[int]) -> int:
    """Bytes of memory that these processes have."""
    pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
    return sum(pages) * resource.getpagesize()


async def test_bombs_take_no_memory(tmp_path: Path) -> None:
    """Of the gateway and its processes together, looked at every two milliseconds, and of the folder."""
    bombs, pixels = _bombs(), replace(IMAGE, max_pixels=65_536)
    assert len(set(bombs)) == 32
    async with _side(tmp_path, processes=2) as side:
        await asyncio.gather(*(side.prepare(_picture(seed), pixels, NOTHING, WHERE) for seed in range(4)))
        pids = [os.getpid(), *side.processes.pids]
        before = peak = _resident(pids)
        told = asyncio.gather(*(side.prepare(data, pixels, NOTHING, WHERE) for data in bombs), return_exceptions=True)
        while not told.done():
            await asyncio.sleep(0.002)
            peak = max(peak, _resident(pids))
        assert pids == [os.getpid(), *side.processes.pids]
    refused = [isinstance(answer, InvalidArgument) for answer in told.result()]
    assert refused == [True] * 20 + [False] * 4 + [True] * 4 + [False] * 4
    blobs = sum(entry.stat().st_size for entry in os.scandir(tmp_path))
    assert peak - before + blobs < 100_000_000
