"""How a graph is recorded: the seam between the logic of graphs and a GPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch

Tensor = torch.Tensor


class Graph(Protocol):
    """What was recorded."""

    def replay(self) -> None:
        """Does it again, on the same memory and on the current stream."""


class Capture(Protocol):
    """Records graphs. They share one pool of memory: what one leaves there is good until another is replayed."""

    def renew(self) -> None:
        """Another pool: all graphs of the one before are gone."""

    def session(self) -> AbstractContextManager[None]:
        """Surrounds the recording of some graphs: nothing else may use the device meanwhile."""

    def record(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Graph, Sequence[Tensor]]:
        """Runs it once, so that what is made on the first run is there, and records the second.

        Returns what that gave as well: where a replay leaves it.
        """

    def borrowed(self, x: Tensor) -> Tensor:
        """The same memory, which other graphs may use once nobody holds x."""

    def taken_bytes(self) -> int:
        """Memory of the device that is in use: its growth is what graphs take."""


class CudaCapture:
    """Of a CUDA GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def renew(self) -> None:
        """See Capture. A pool that has been let go of cannot be taken again."""
        self._pool = torch.cuda.graph_pool_handle()

    @contextmanager
    def session(self) -> Iterator[None]:
        """See Capture.

        The collector would free what a dead cycle holds of the GPU in the middle of a capture, which breaks it. What
        torch.cuda.graph does before each of its captures takes longer than the capture; once for all is enough.
        """
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()
        enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if enabled:
                gc.enable()
            torch.cuda.synchronize(self._device)

    def record(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Graph, Sequence[Tensor]]:
        """See Capture. Both runs are on a stream of their own, whose workspaces no other step uses."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            run()
            # Another thread may wait for an event meanwhile: only this one must not.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                made = run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return graph, made

    def borrowed(self, x: Tensor) -> Tensor:
        """See Capture. By the interface of arrays, which keeps no hold of the memory."""
        return torch.as_tensor(_Interface(x), device=x.device).view(x.dtype)

    def taken_bytes(self) -> int:
        """See Capture."""
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


class _Interface:
    """An array on the GPU as others describe it: of integers, because not all of torch's types have a name there."""

    def __init__(self, x: Tensor) -> None:
        size = x.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(x.shape),
            "strides": tuple(stride * size for stride in x.stride()),
            "typestr": f"<i{size}" if size > 1 else "|i1",
            "data": (x.data_ptr(), False),
            "version": 3,
        }


class Rerun:
    """Where there is no GPU: a replay runs the same function on the same memory again."""

    def renew(self) -> None:
        """See Capture: there is none."""

    def session(self) -> AbstractContextManager[None]:
        """See Capture."""
        return _nothing()

    def record(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Graph, Sequence[Tensor]]:
        """See Capture."""
        made = run()
        return _Again(run, made), made

    def borrowed(self, x: Tensor) -> Tensor:
        """See Capture: x itself."""
        return x

    def taken_bytes(self) -> int:
        """See Capture: nothing is kept."""
        return 0


@contextmanager
def _nothing() -> Iterator[None]:
    yield


class _Again:
    def __init__(self, run: Callable[[], Sequence[Tensor]], made: Sequence[Tensor]) -> None:
        self._run = run
        self._made = made

    def replay(self) -> None:
        """See Graph."""
        for before, now in zip(self._made, self._run(), strict=True):
            before.copy_(now)


def capture_of(device: torch.device) -> Capture:
    """The one for a device."""
    return CudaCapture(device) if device.type == "cuda" else Rerun()
