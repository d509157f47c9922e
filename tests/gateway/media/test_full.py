"""A small file system in memory that gets full, and a folder that is taken away under a running server."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest

from services.common.errors import InvalidArgument
from services.gateway.media.items import MediaOptions, MediaSettings
from services.gateway.media.prepare import MediaSide
from services.gateway.media.store import BlobStore
from services.gateway.media.uploads import Uploads
from tests.gateway.media.files import IMAGE, encoded, noise

SIZE = 8 << 20
"""Of the file system; 7.5 MB are for use, since a sixteenth stays free."""
FOLDER = Path("/tmp")
"""Where it is mounted, for the child process alone."""


def picture(seed: int, side: int = 256) -> bytes:
    """A picture whose blob takes side * side * 6 bytes."""
    from PIL import Image

    return encoded(Image.fromarray(noise(side, side, seed=seed)), "PNG")


async def blobs_that_nobody_needs_make_room() -> None:
    """19 blobs of 393 KB fill the file system to its reserve of 512 KB; one of 3.1 MB does not fit beside them."""
    async with MediaSide(MediaSettings(str(FOLDER / "blobs"), processes=1)) as side:
        for seed in range(30):
            (await side.prepare(picture(seed), IMAGE, MediaOptions(), "it")).pin.release()
        large = await side.prepare(picture(30, 736), IMAGE, MediaOptions(), "it")
        assert large.processed.nbytes > 736 * 736 * 6
        with pytest.raises(InvalidArgument, match="can't hold") as refused:
            await side.prepare(picture(31, 1184), IMAGE, MediaOptions(max_pixels=2_000_000), "messages[0].content[1]")
        assert refused.value.field == "messages[0].content[1]"
        (await side.prepare(picture(32), IMAGE, MediaOptions(), "it")).pin.release()


async def uploads_take_their_share() -> None:
    """A quarter, 2 MB, whatever the limit says; blobs go for them."""
    async with MediaSide(MediaSettings(str(FOLDER / "blobs"), processes=1)) as side:
        uploads = Uploads(FOLDER / "uploads", 1 << 30, 1 << 20, side.store.make_room)
        for seed in range(30):
            (await side.prepare(picture(seed), IMAGE, MediaOptions(), "it")).pin.release()
        for seed in range(20):
            uploads.name(np.random.default_rng(seed).bytes(1_000_000), "", "image", f"picture {seed}")
        assert uploads.named("", "image", "picture 19") is not None
        assert sum(path.stat().st_size for path in (FOLDER / "uploads").glob("[!n]*")) <= 2 << 20
        (await side.prepare(picture(40), IMAGE, MediaOptions(), "it")).pin.release()


async def names_of_files_may_be_what_is_lacking() -> None:
    """The file system of 64 files and folders."""
    async with MediaSide(MediaSettings(str(FOLDER / "blobs"), processes=1)) as side:
        uploads = Uploads(FOLDER / "uploads", 1 << 30, 1 << 20, side.store.make_room)
        for seed in range(70):
            (await side.prepare(picture(seed, 32), IMAGE, MediaOptions(), "it")).pin.release()
            uploads.name(b"%d" % seed, "", "image", f"picture {seed}")
        assert uploads.named("", "image", "picture 69") is not None


@pytest.mark.parametrize(
    ("case", "files"),
    [
        (blobs_that_nobody_needs_make_room, 0),
        (uploads_take_their_share, 0),
        (names_of_files_may_be_what_is_lacking, 64),
    ],
)
def test_a_full_file_system(case: Callable[[], Awaitable[None]], files: int) -> None:
    mounted = f"mount -t tmpfs -o size={SIZE},nr_inodes={files} none {FOLDER}"
    if subprocess.run(["unshare", "-rm", "sh", "-c", mounted], capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    code = f"import asyncio; from {__name__} import *; asyncio.run({case.__name__}())"
    run = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f'{mounted} && exec "$0" -c "$1"', sys.executable, code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


async def test_a_folder_that_is_taken_away_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "blobs"
    async with MediaSide(MediaSettings(str(folder), processes=1)) as side:
        first = await side.prepare(picture(0, 32), IMAGE, MediaOptions(), "it")
        shutil.rmtree(folder)
        again = await side.prepare(picture(1, 32), IMAGE, MediaOptions(), "it")
        assert side.store.path(again.processed.hash).exists()
        await asyncio.to_thread(side.store.put_back, first.processed.hash)
        shutil.rmtree(folder)
        await asyncio.to_thread(side.store.put_back, first.processed.hash)
        assert BlobStore(folder, 0).pin(first.processed.hash) is not None
