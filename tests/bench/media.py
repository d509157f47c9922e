"""What media cost those beside them: 64 videos of 16 frames at once, and a stream of short text requests.

python -m tests.bench.media [--videos 64] [--processes 1,2] [--seconds 8] [--rounds 3]

    text alone      short chats at a steady rate: time to first token
    text beside     the same chats while the videos are decoded, asked about and answered
    videos alone    frames a second, from the first request to the last answer, for each number of processes: medians
                    of rounds, in which the numbers take turns

The worker is simulated and takes no time for a token or an embedding, so that what is seen is the gateway.
Processes of media have their usual niceness and limits. Clients, gateway, engine, worker and media share this
machine, with whatever else runs on it: `others` says how many cores that took. The longest that the gateway's loop
ran without a pause is in CPU time of its thread; a timer may be late for want of a core too. Prints a table, then
one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
import uvloop

from tests.bench.proc import TICKS_PER_S, cpu_s
from tests.e2e.media import chat_body, film, video_part
from tests.engine.cluster import ROOT

FRAMES, LENGTH, WIDTH, HEIGHT = 16, 48, 480, 272
"""Frames taken and in the file, and pixels of a video."""
RATE = 20.0
"""Chats a second."""
TICK_S = 0.001
PATIENCE_S = 120.0


@dataclass(slots=True)
class Beats:
    """How the event loop of the gateway went since it was last asked, in milliseconds."""

    block_ms: float = 0.0  # the most that its thread ran between two timers
    late_ms: float = 0.0  # the most that a timer was late
    late_for_core_ms: float = 0.0  # of that, while other processes had the cores


@dataclass(slots=True)
class Texts:
    """Times to first token of the chats, in milliseconds."""

    count: int
    p50_ms: float
    p90_ms: float
    max_ms: float


# The gateway's process.


async def _beat(beats: Beats) -> None:
    with open("/proc/thread-self/schedstat", "rb", 0) as schedstat:  # noqa: ASYNC230 - no file, and never waits

        def queued_ms() -> float:
            """How long this thread has waited for a core so far."""
            return int(os.pread(schedstat.fileno(), 99, 0).split()[1]) / 1e6

        while True:
            due, spent, queued = time.perf_counter() + TICK_S, time.thread_time(), queued_ms()
            await asyncio.sleep(TICK_S)
            late = (time.perf_counter() - due) * 1e3
            beats.block_ms = max(beats.block_ms, (time.thread_time() - spent) * 1e3)
            if late > beats.late_ms:
                beats.late_ms, beats.late_for_core_ms = late, queued_ms() - queued


async def gateway(out: Path, argv: Sequence[str]) -> int:
    """The gateway, with a timer in its loop; at SIGUSR1 it writes what the timer saw and begins again."""
    from services.gateway.__main__ import main as serve

    beats = Beats()

    def tell() -> None:
        half = out.with_suffix(".half")
        half.write_text(json.dumps(asdict(beats)))
        half.rename(out)
        beats.late_ms = beats.late_for_core_ms = beats.block_ms = 0.0

    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, tell)
    beating = asyncio.create_task(_beat(beats))
    try:
        return await serve(argv)
    finally:
        beating.cancel()


# The bench's own.


@dataclass(slots=True)
class Stack:
    """All roles, with so many processes for media."""

    url: str
    process: subprocess.Popen[bytes]
    out: Path

    def beats(self) -> Beats:
        """What the gateway's loop saw since the last time."""
        self.out.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        ends = time.monotonic() + PATIENCE_S
        while not self.out.exists():
            assert time.monotonic() < ends
            time.sleep(0.005)
        return Beats(**json.loads(self.out.read_text()))

    def metric(self, name: str) -> float:
        """A figure of the gateway's."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def _model(folder: Path) -> Path:
    """The text side of a Qwen3-VL: real limits of pixels, no weights that anybody reads."""
    from tests.tiny_qwen3_vl import tiny_qwen3_vl

    model = tiny_qwen3_vl(folder)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        values = json.loads((model / name).read_text())
        values["size"] = {"shortest_edge": 4096, "longest_edge": 25_165_824}
        (model / name).write_text(json.dumps(values))
    return model


@contextmanager
def _stack(folder: Path, model: Path, processes: int) -> Iterator[Stack]:
    from tests.bench.gateway import _free_port

    port, out, started = _free_port(), folder / "beats", []
    quiet = ("--metrics-port=0", "--log-level=warning")
    media = f"--media-dir={folder}/blobs-{processes}"
    free = ("--simulated-token-us=0", "--simulated-row-us=0", "--simulated-embedding-us=0")
    listen, work = f"unix:{folder}/e{processes}", f"unix:{folder}/w{processes}"
    clients = (f"--http-port={port}", f"--grpc-port={_free_port()}", "--log-level=warning")
    commands = (
        ("services.worker", "--simulated", f"--model={model}", f"--listen={work}", media, *free, *quiet),
        (
            *("services.engine", f"--listen={listen}", f"--worker={work}", *quiet),
            *("--max-num-seqs=256", "--max-num-batched-tokens=8192", "--num-blocks=20000"),
        ),
        (
            *("tests.bench.media", "gateway", str(out), f"--engine={listen}", *clients, media),
            f"--media-processes={processes}",
        ),
    )
    try:
        started += [subprocess.Popen([sys.executable, "-m", *command], cwd=ROOT) for command in commands]
        url, ends = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE_S
        while subprocess.run(["curl", "-sf", f"{url}/health/ready"], capture_output=True, check=False).returncode:
            assert time.monotonic() < ends, "not ready"
            assert all(process.poll() is None for process in started), "a role ended"
            time.sleep(0.1)
        yield Stack(url, started[-1], out)
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(30)


def _cpu() -> float:
    """Seconds of CPU that processes of others have used on this machine."""
    user, nice, system = (int(word) for word in Path("/proc/stat").read_text().split()[1:4])
    ours, waiting = 0.0, [os.getpid()]
    while waiting:
        with suppress(OSError):
            pid = waiting.pop()
            ours += cpu_s(pid)
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += [int(word) for word in (task / "children").read_text().split()]
    return (user + nice + system) / TICKS_PER_S - ours


async def _chat(http: httpx.AsyncClient, number: int) -> float:
    """Milliseconds to the first token of a short chat."""
    begun = time.perf_counter()
    body = {"messages": [{"role": "user", "content": f"Hello {number}"}], "max_tokens": 4, "stream": True}
    async with http.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.status_code == 200, await answer.aread()
        first = 0.0
        async for line in answer.aiter_lines():
            if not first and '"content":"' in line and '"content":""' not in line:
                first = (time.perf_counter() - begun) * 1e3
    return first


async def _chats(http: httpx.AsyncClient, enough: asyncio.Event) -> list[float]:
    """Chats at the rate, whatever becomes of those before, until there are enough."""
    tasks, begun = [], time.perf_counter()
    while not enough.is_set():
        tasks.append(asyncio.create_task(_chat(http, len(tasks))))
        await asyncio.sleep(max(0.0, begun + len(tasks) / RATE - time.perf_counter()))
    return list(await asyncio.gather(*tasks))


async def ask(url: str, bodies: Sequence[bytes]) -> int:
    """A process of clients: sends the bodies at once when it is told to, and says how long they took."""

    async def one(body: bytes) -> None:
        answer = await http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 200, answer.text

    async with _client(url) as http:
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        begun = time.perf_counter()
        await asyncio.gather(*(one(body) for body in bodies))
        print(time.perf_counter() - begun, flush=True)
    return 0


def _client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=httpx.Limits(max_connections=None), verify=False)


def _write(bodies: Sequence[bytes], folder: Path) -> None:
    for number, body in enumerate(bodies):
        (folder / str(number)).write_bytes(body)


@asynccontextmanager
async def _asker(stack: Stack, bodies: Sequence[bytes], folder: Path) -> AsyncIterator[Callable[[], Awaitable[float]]]:
    """Sends the bodies from a process that stands ready: seconds from the first request to the last answer."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        _write(bodies, Path(place))
        command = (sys.executable, "-m", "tests.bench.media", "ask", stack.url, place)
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=pipe, stdout=pipe)
        assert child.stdin is not None
        assert child.stdout is not None
        ends, begins = child.stdout, child.stdin
        assert await ends.readline() == b"ready\n"

        async def send() -> float:
            begins.write(b"\n")
            return float(await ends.readline())

        yield send
        await child.wait()


def _bodies(first: int, count: int) -> list[bytes]:
    """Requests about videos that nobody has sent yet."""
    options = {"video": {"num_frames": FRAMES}}
    films = (film(seed, LENGTH, WIDTH, HEIGHT, 16) for seed in range(first, first + count))
    bodies = (chat_body("What moves?", video_part(data), max_tokens=4, media_io_kwargs=options) for data in films)
    return [json.dumps(body).encode() for body in bodies]


def _texts(found: Sequence[float]) -> Texts:
    ordered = sorted(found)
    return Texts(len(ordered), statistics.median(ordered), ordered[int(len(ordered) * 0.9)], ordered[-1])


async def _beside(stack: Stack, send: Callable[[], Awaitable[float]], seconds: float) -> dict[str, Any]:
    """Chats alone, then beside the videos."""
    async with _client(stack.url) as http:
        return await _compared(stack, http, send, seconds)


async def _compared(
    stack: Stack, http: httpx.AsyncClient, send: Callable[[], Awaitable[float]], seconds: float
) -> dict[str, Any]:
    enough = asyncio.Event()
    asyncio.get_running_loop().call_later(seconds, enough.set)
    stack.beats()
    alone = _texts(await _chats(http, enough))
    before = stack.beats()
    enough = asyncio.Event()
    chats = asyncio.create_task(_chats(http, enough))
    took = await send()
    enough.set()
    beside = _texts(await chats)
    return {
        "text_alone": asdict(alone),
        "text_beside": asdict(beside),
        "ttft_ratio_p50": beside.p50_ms / alone.p50_ms,
        "ttft_ratio_p90": beside.p90_ms / alone.p90_ms,
        "loop_alone": asdict(before),
        "loop_beside": asdict(stack.beats()),
        "videos_s": took,
    }


async def measure(videos: int, processes: Sequence[int], seconds: float, rounds: int) -> dict[str, Any]:
    """All figures. Chats are measured in the first round, beside the last number of processes."""
    found: dict[str, Any] = {"cores": os.cpu_count(), "videos": videos, "frames": FRAMES, "pixels": [WIDTH, HEIGHT]}
    first, rest = _bodies(0, videos), _bodies(videos, videos)
    rates: dict[int, list[float]] = {number: [] for number in processes}
    others: dict[int, list[float]] = {number: [] for number in processes}
    with tempfile.TemporaryDirectory() as name:
        model = _model(Path(name) / "model")
        for turn in range(rounds):
            folder = Path(name) / str(turn)
            folder.mkdir()
            for number in processes if turn % 2 == 0 else reversed(processes):
                with _stack(folder, model, number) as stack:
                    async with _asker(stack, _bodies(2 * videos, number), folder) as send:
                        await send()  # the processes begin with the first items
                    async with _asker(stack, first, folder) as send:
                        begun = _cpu()
                        rates[number].append(videos * FRAMES / (took := await send()))
                        others[number].append((_cpu() - begun) / took)
                    if turn == 0 and number == processes[-1]:
                        async with _asker(stack, rest, folder) as send:
                            found |= await _beside(stack, send, seconds)
                        found["decoded"] = stack.metric("triptych:media_made")
    found["rounds"] = {"frames_per_s": rates, "others_cores": others}
    found["frames_per_s"] = {number: statistics.median(each) for number, each in rates.items()}
    found["others_cores"] = {number: statistics.median(each) for number, each in others.items()}
    found["speedup"] = found["frames_per_s"][processes[-1]] / found["frames_per_s"][processes[0]]
    return found


def show(found: dict[str, Any]) -> None:
    """The table."""
    print(f"{found['videos']} videos of {FRAMES} frames of {WIDTH}x{HEIGHT} on {found['cores']} cores\n")
    print("| | text alone | beside the videos | |")
    print("|---|---|---|---|")
    alone, beside = found["text_alone"], found["text_beside"]
    for what in ("p50", "p90", "max"):
        one, two = alone[f"{what}_ms"], beside[f"{what}_ms"]
        print(f"| time to first token {what}, ms | {one:.1f} | {two:.1f} | {two / one:.2f} times |")
    for name, what in (
        ("block_ms", "longest that the gateway's loop ran without a pause, ms"),
        ("late_ms", "latest timer of the loop, ms"),
        ("late_for_core_ms", "of that without a core, ms"),
    ):
        print(f"| {what} | {found['loop_alone'][name]:.1f} | {found['loop_beside'][name]:.1f} | |")
    rates = ", ".join(f"{number}: {rate:.0f}" for number, rate in found["frames_per_s"].items())
    others = ", ".join(f"{cores:.2f}" for cores in found["others_cores"].values())
    print(f"\nframes a second by processes: {rates} ({found['speedup']:.2f} times); others: {others} cores\n")
    print(json.dumps(found))


def main() -> int:
    """The bench, or a process of it: `gateway OUT OPTION…`, `ask URL FOLDER`."""
    if sys.argv[1:2] == ["gateway"]:
        return int(uvloop.run(gateway(Path(sys.argv[2]), sys.argv[3:])))
    if sys.argv[1:2] == ["ask"]:
        return asyncio.run(ask(sys.argv[2], [path.read_bytes() for path in Path(sys.argv[3]).iterdir()]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--videos", type=int, default=64)
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--seconds", type=float, default=8.0, help="of chats alone")
    parser.add_argument("--rounds", type=int, default=3, help="of frames a second; medians are told")
    options = parser.parse_args()
    numbers = [int(word) for word in options.processes.split(",")]
    show(asyncio.run(measure(options.videos, numbers, options.seconds, options.rounds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
