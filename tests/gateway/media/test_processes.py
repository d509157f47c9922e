"""Media processes: what kills one costs one request, and the next is served."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvloop
from PIL import Image

from services.common.errors import ResourceExhausted, TriptychError
from services.gateway.media.items import MediaOptions, MediaSettings
from services.gateway.media.processes import MediaProcesses, Refused, Room
from tests.gateway.media.files import IMAGE, NAME, VIDEO, counting, encoded, noise, png, read_blob, video

PICTURE = encoded(Image.fromarray(noise(64, 96)), "PNG")


@asynccontextmanager
async def running(folder: Path, **settings: Any) -> AsyncIterator[MediaProcesses]:
    processes = MediaProcesses(MediaSettings(str(folder), **{"processes": 1, **settings}))
    try:
        yield processes
    finally:
        await processes.close()


async def _ask(processes: MediaProcesses, data: bytes | Path, name: bytes = NAME) -> None:
    await processes.process(data, IMAGE, MediaOptions(), name)


def _endless(folder: Path) -> Path:
    """A file that never ends to be read: a pipe whose other end is open and silent."""
    path = folder / "pipe"
    os.mkfifo(path)
    os.open(path, os.O_RDWR)
    return path


async def _until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 (there is no event: that a child is at work is seen from outside)
        await asyncio.sleep(0.01)


async def test_items_become_blobs(tmp_path: Path) -> None:
    async with running(tmp_path) as processes:
        image = await processes.process(PICTURE, IMAGE, MediaOptions(), bytes(32))
        moving = await processes.process(video(counting(8)), VIDEO, MediaOptions(), b"v" * 32)
    assert (image.hash, image.grid, image.embeddings) == (bytes(32), (1, 4, 6), 6)
    assert (moving.modality, moving.grid[0]) == ("video", 2)
    assert moving.times == pytest.approx((0.1, 0.6))
    head, patches = read_blob((tmp_path / (b"v" * 32).hex()).read_bytes())
    assert head.modality == "video"
    assert len(patches) == moving.grid[0] * moving.grid[1] * moving.grid[2]


def test_under_the_loop_of_the_gateway(tmp_path: Path) -> None:
    async def one() -> None:
        async with running(tmp_path) as processes:
            await _ask(processes, encoded(Image.fromarray(noise(900, 1200)), "PNG"))
            with pytest.raises(Refused):
                await _ask(processes, b"")

    uvloop.run(one())


async def test_no_signal_to_their_group_ends_them(tmp_path: Path) -> None:
    """Ctrl-C and SIGTERM reach all of a terminal's or a container's processes; requests may still have to end."""
    async with running(tmp_path) as processes:
        await processes.start()
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(processes.pids[0], number)
        await _ask(processes, PICTURE)
        assert processes.started == 1


def test_they_end_where_the_gateway_is_killed(tmp_path: Path) -> None:
    """Even one that waits for its file without an end."""
    pipe = _endless(tmp_path)
    code = (
        "import asyncio, pathlib; from services.gateway.media.items import MediaSettings, MediaOptions;"
        "from services.gateway.media.processes import MediaProcesses; from tests.gateway.media.files import IMAGE\n"
        "async def main():\n"
        f"    processes = MediaProcesses(MediaSettings({str(tmp_path)!r}, processes=1)); await processes.start()\n"
        "    print(processes.pids[0], flush=True)\n"
        f"    await processes.process(pathlib.Path({str(pipe)!r}), IMAGE, MediaOptions(), bytes(32))\n"
        "asyncio.run(main())"
    )
    gateway = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert gateway.stdout is not None
    pid = int(gateway.stdout.readline())
    gateway.kill()
    gateway.communicate()
    while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        time.sleep(0.01)


def test_modules_of_the_folder_where_the_gateway_runs_are_not_run(tmp_path: Path) -> None:
    """`triptych serve` starts the gateway so that none are: its media processes neither."""
    (tmp_path / "json.py").write_text("raise SystemExit('not the library')")
    code = (
        "import asyncio; from services.gateway.media.items import MediaSettings\n"
        "from services.gateway.media.processes import MediaProcesses\n"
        "async def main():\n"
        "    processes = MediaProcesses(MediaSettings('.', processes=1)); await processes.start()\n"
        "    await processes.close()\n"
        "asyncio.run(main())"
    )
    ours = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    run = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, env=ours, capture_output=True, check=False)
    assert run.returncode == 0, run.stderr


async def test_a_killed_process_costs_one_request(tmp_path: Path) -> None:
    async with running(tmp_path) as processes:
        victim = asyncio.create_task(_ask(processes, _endless(tmp_path)))
        after = asyncio.create_task(_ask(processes, PICTURE))
        await _until(lambda: processes.pids)
        os.kill(processes.pids[0], signal.SIGKILL)
        with pytest.raises(Refused, match="a media process ended"):
            await victim
        await after
        assert processes.started == 2
        os.kill(processes.pids[0], signal.SIGKILL)  # which costs none where it has nothing to do
        await asyncio.sleep(0.1)
        await _ask(processes, PICTURE)
        assert processes.started == 3


async def test_time_is_limited(tmp_path: Path) -> None:
    async with running(tmp_path, seconds=0.5) as processes:
        with pytest.raises(Refused, match=r"within 0\.5 s"):
            await _ask(processes, _endless(tmp_path))
        await _ask(processes, PICTURE)


async def test_memory_is_limited(tmp_path: Path) -> None:
    """An image that its limits allow, and the process's memory does not."""
    large = encoded(Image.fromarray(noise(3000, 3000)), "JPEG")
    async with running(tmp_path, memory_bytes=32 << 20) as processes:
        with pytest.raises(Refused, match="memory"):
            await _ask(processes, large)
        await _ask(processes, PICTURE)
        assert processes.started == 1


async def test_what_is_wrong_is_told(tmp_path: Path) -> None:
    async with running(tmp_path) as processes:
        with pytest.raises(Refused, match="a broken image"):
            await _ask(processes, PICTURE[:-100])
        with pytest.raises(Refused, match="12000 x 12000") as told:
            await _ask(processes, png(12_000, 12_000, bytes(68)))
        assert told.value.reason == "MEDIA_TOO_LARGE"
        # And what is nobody's fault is an error of the server.
        with pytest.raises(TriptychError, match="could not be stored") as failed:
            await _ask(processes, tmp_path / "missing")
        assert failed.value.http_status == 500
        with pytest.raises(TriptychError):
            await processes.process(PICTURE, replace(IMAGE, resample="none"), MediaOptions(), NAME)  # type: ignore[arg-type]
        assert not os.listdir(tmp_path)
        await _ask(processes, PICTURE)
        assert processes.started == 1


async def test_the_queue_is_limited(tmp_path: Path) -> None:
    async with running(tmp_path, queue=1) as processes:
        pipe = _endless(tmp_path)
        first, second = (asyncio.create_task(_ask(processes, pipe)) for _ in range(2))
        await _until(lambda: processes.pids and processes.waiting == 1)
        with pytest.raises(ResourceExhausted, match="waiting"):
            await _ask(processes, PICTURE)
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert processes.waiting == 0
        os.kill(processes.pids[0], signal.SIGKILL)
        await asyncio.gather(first, return_exceptions=True)
        await _ask(processes, PICTURE)


async def test_one_that_goes_away_leaves_its_process(tmp_path: Path) -> None:
    async with running(tmp_path) as processes:
        gone = asyncio.create_task(_ask(processes, PICTURE, b"g" * 32))
        await _until(lambda: processes.started)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await _ask(processes, PICTURE)
        assert processes.started == 1
        assert (tmp_path / (b"g" * 32).hex()).exists()


async def test_large_items_wait_for_each_other(tmp_path: Path) -> None:
    """Two that together are more than may be taken: both are made."""
    pictures = [encoded(Image.fromarray(noise(400, 600, seed=seed)), "PNG") for seed in range(4)]
    async with running(tmp_path, processes=2, decode_bytes=1 << 20) as processes:
        await asyncio.gather(*(_ask(processes, data, bytes([seed]) * 32) for seed, data in enumerate(pictures)))
    assert len(os.listdir(tmp_path)) == 4


def _limits(pid: int) -> str:
    return Path(f"/proc/{pid}/limits").read_text()


async def test_room_is_given_in_the_order_of_asking() -> None:
    """What is larger than all of it gets all of it; one that goes away while it waits leaves its place."""
    room = Room(10)
    order: list[str] = []

    async def take(name: str, need: int, hold: asyncio.Event) -> None:
        async with room.taken(need):
            order.append(name)
            await hold.wait()

    open_now, later = asyncio.Event(), asyncio.Event()
    open_now.set()
    first = asyncio.create_task(take("first", 6, later))
    alone = asyncio.create_task(take("alone", 99, open_now))
    small = asyncio.create_task(take("small", 1, open_now))
    gone = asyncio.create_task(take("gone", 10, open_now))
    for _ in range(3):
        await asyncio.sleep(0)
    assert order == ["first"]
    gone.cancel()
    later.set()
    await asyncio.gather(first, alone, small)
    assert order == ["first", "alone", "small"]
    await asyncio.wait_for(take("again", 10, open_now), 1)


async def test_processes_run_behind_the_gateway_and_end_with_it(tmp_path: Path) -> None:
    async with running(tmp_path, nice=7, seconds=5) as processes:
        await _ask(processes, PICTURE)
        pid = processes.pids[0]
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, pid) == min(own + 7, 19)
        limits = _limits(pid)
        assert "Max core file size        0" in limits
        assert "Max open files            64" in limits
        spent = re.search(r"Max cpu time +(\d+) ", limits)  # should the gateway not end it: of its item, and 2 more
        assert spent is not None
        assert 7 <= int(spent[1]) <= 9
    assert not processes.pids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
