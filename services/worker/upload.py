"""Tensors of the host to a GPU, through pinned memory.

Memory of a file that is mapped is no memory that the bus can read: the driver would copy it into its own first, on one
thread. Here each thread that loads has two pinned pieces of its own, and while one is on its way it fills the other:

    file ── copy ──▶ piece 0 ── bus ──▶ GPU
    file ─────── copy ──▶ piece 1 ── bus ──▶ GPU         so no more than the pieces lie in the host's memory
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import local
from typing import Protocol

import torch

_PIECE = 16 << 20
"""Bytes: long enough for the bus, short enough that a second thread has its turn."""


class Event(Protocol):
    """A moment in a stream of the device; of one that was never recorded it is past."""

    def record(self) -> None:
        """It is now, for what this thread has started."""

    def synchronize(self) -> None:
        """Waits until it is past."""


@dataclass(slots=True)
class Piece:
    """Pinned memory, and when the device has read it."""

    bytes_N: torch.Tensor  # uint8
    read: Event


def pinned(size: int) -> Piece:
    """One of this many bytes, for the current GPU."""
    read: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    return Piece(torch.empty(size, dtype=torch.uint8, pin_memory=True), read)


class Upload:
    """Copies tensors to one device. Several threads may, each for itself."""

    def __init__(self, device: torch.device, size: int = _PIECE, make: Callable[[int], Piece] | None = None) -> None:
        """`size` is of a piece in bytes; `make` makes one. Without it: pinned for a GPU, none for a CPU."""
        self._device = device
        self._size = size
        self._make = make or (pinned if device.type == "cuda" else None)
        self._own = local()

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers on the device; the tensor itself where it lies there already."""
        if self._make is None or tensor.device.type != "cpu":
            return tensor.to(self._device)
        copied = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._device)
        if not tensor.numel():
            return copied
        source, target = (each.flatten().view(torch.uint8) for each in (tensor.contiguous(), copied))
        for index, first in enumerate(range(0, len(source), self._size)):
            piece = self._pieces()[index % 2]
            piece.read.synchronize()
            part = piece.bytes_N[: len(source) - first]
            part.copy_(source[first : first + self._size])
            target[first : first + self._size].copy_(part, non_blocking=True)
            piece.read.record()
        return copied

    def _pieces(self) -> tuple[Piece, Piece]:
        """This thread's."""
        found: tuple[Piece, Piece] | None = self._own.__dict__.get("pieces")
        if found is None:
            assert self._make is not None
            found = self._own.pieces = (self._make(self._size), self._make(self._size))
        return found
