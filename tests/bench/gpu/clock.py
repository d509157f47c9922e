"""Time on the device, and what the device can do at most: bandwidth of a copy, rate of a matrix product.

A kernel takes microseconds and starting one from Python takes as long: so runs are recorded as a CUDA graph, over
several sets of inputs that together do not fit in the cache, and the graph is timed by events. What cannot be recorded
is timed run by run. Without a GPU, which only tests the script, it is the time of the interpreter.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_GRAPH_S = 4e-3  # about what one graph takes
_MOST_RUNS = 64
_REPLAYS = 7
SETS = 8
"""Sets of inputs, at most."""


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What was measured."""

    bandwidth: float  # bytes a second, read and written, of a copy on the device
    rate: float  # operations a second of a product of 16 bit matrices; a multiply-add is two
    cache: int  # bytes that runs over the same inputs would find there

    def floor_s(self, moved: int, operations: int, bits: int = 16) -> float:
        """The least time: of the bytes, or of the operations, of which 8 bits take half as long."""
        return max(moved / self.bandwidth, operations * bits / 16 / self.rate)


class Clock:
    """Times what is started on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"

    def seconds(self, run: Callable[[int], object], *, recorded: bool = True) -> tuple[float, str]:
        """The median time of a run, which is given its number, and how it was measured."""
        if not self.on_gpu:
            begin = time.perf_counter()
            run(0)
            return time.perf_counter() - begin, "host"
        run(0)  # compiles
        once = self._between(lambda: run(1))
        if recorded:
            try:
                return self._recorded(run, once), "graph"
            except RuntimeError:  # something waits for the device, or uploads
                torch.cuda.synchronize(self.device)
        times = [self._between(lambda index=index: run(index)) for index in range(max(5, min(30, int(0.05 / once))))]
        return statistics.median(times), "events"

    def _recorded(self, run: Callable[[int], object], once: float) -> float:
        runs = max(1, min(_MOST_RUNS, int(_GRAPH_S / once)))
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for index in range(min(runs, SETS)):  # what a set uploads when it first runs cannot be recorded
                run(index)
            torch.cuda.synchronize(self.device)
            with torch.cuda.graph(graph, stream=stream):
                for index in range(runs):
                    run(index)
        graph.replay()
        return statistics.median(self._between(graph.replay) / runs for _ in range(_REPLAYS))

    def _between(self, run: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize(self.device)
        return max(begin.elapsed_time(end) / 1e3, 1e-7)

    def wall(self, run: Callable[[], object]) -> float:
        """Seconds until the host has started it and the device has done it."""
        self.wait()
        begin = time.perf_counter()
        run()
        self.wait()
        return time.perf_counter() - begin

    def wait(self) -> None:
        """Until the device has done what was started."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def ceilings(self) -> Ceilings:
        """Measured on random numbers: zeros are multiplied faster."""
        size, width = (1 << 30, 8192) if self.on_gpu else (1 << 16, 64)
        dtype = torch.bfloat16 if self.on_gpu else torch.float32
        source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        copy_s, _ = self.seconds(lambda _: target.copy_(source))
        a, b = (torch.randn(width, width, device=self.device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        product_s, _ = self.seconds(lambda _: torch.mm(a, b, out=out))
        cache = torch.cuda.get_device_properties(self.device).L2_cache_size if self.on_gpu else 0
        return Ceilings(2 * size / copy_s, 2 * width**3 / product_s, cache)
