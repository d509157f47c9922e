"""The way to a device and back: one copy up and one copy down for a step, neither of which the step waits for.

    host    fill pinned ──┐                                  ┌──▶ wait, on another thread
    stream                └─ copy up ─ kernels of the step ──┤
    stream of its own                                        └─ copy down ─┘

Pinned memory is torch's: it hands a piece out again once the copies that were started with it are done, so that as many
pieces are in use as steps are in flight. On a CPU nothing is copied, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNED = 16
"""Bytes: Triton compiles a kernel anew for pointers that are multiples of less."""
_DTYPES = {np.dtype(np.int32): torch.int32, np.dtype(np.int64): torch.int64, np.dtype(np.float64): torch.float64}


class Event(Protocol):
    """A moment in a stream of the device."""

    def synchronize(self) -> None:
        """Waits until it is past."""


@dataclass(slots=True, frozen=True)
class Arriving:
    """Numbers on their way down."""

    words: torch.Tensor
    source: torch.Tensor  # on the device; kept, so that nothing else is written there before they were read
    there: Event | None  # None: they are there

    def wait(self) -> NDArray[np.int32]:
        """The numbers, once they are there. From any thread."""
        if self.there is not None:
            self.there.synchronize()
        numbers: NDArray[np.int32] = self.words.numpy()
        return numbers


class Link:
    """Between this host and one device, for one thread."""

    def __init__(self, device: torch.device, cuda: Any = None) -> None:
        """`cuda` is torch.cuda, or stands for it; None: the device's."""
        self._device = device
        self._pinned = device.type == "cuda"
        self._cuda = cuda or (torch.cuda if self._pinned else None)
        self._down: Any = self._cuda.Stream(device) if self._cuda is not None else None

    def up(self, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        """The same numbers on the device: int32, int64 or float64."""
        begins: list[int] = []
        size = 0
        for array in arrays:
            begins.append(size)
            size += -(-array.nbytes // _ALIGNED) * _ALIGNED
        sent = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        filled = sent.numpy()
        for begin, array in zip(begins, arrays, strict=True):
            filled[begin : begin + array.nbytes].view(array.dtype)[:] = array.ravel()
        there = sent.to(self._device, non_blocking=True)
        return [
            there[begin : begin + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
            for begin, array in zip(begins, arrays, strict=True)
        ]

    def down(self, words: torch.Tensor) -> Arriving:
        """Numbers that the kernels started so far write: int32."""
        if self._cuda is None:
            return Arriving(words, words, None)
        written = self._cuda.Event()
        written.record()
        if not words.numel():
            return Arriving(torch.empty(0, dtype=words.dtype), words, written)
        host = torch.empty(words.shape, dtype=words.dtype, pin_memory=self._pinned)
        there = self._cuda.Event()
        with self._cuda.stream(self._down):
            self._down.wait_event(written)
            host.copy_(words, non_blocking=True)
            there.record(self._down)
        return Arriving(host, words, there)
