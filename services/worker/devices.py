"""The device that a model lies on: whether it is there, what memory it has, and how much of it a step takes.

A processor's memory is the machine's (services.worker.memory). A GPU's has three parts:

    total | of other programs, of the driver, of kernels | kept by torch: tensors, and what freed ones left | free |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from services.common.errors import FailedPrecondition, InvalidArgument
from services.worker import memory


def find(name: str) -> torch.device:
    """The device of this name: cpu, cuda, or cuda:N.

    Raises InvalidArgument for a name that is none of these, and FailedPrecondition where there is no such device.
    """
    kind, _, number = name.partition(":")
    if kind == "cpu" and name == kind:
        return torch.device("cpu")
    if kind != "cuda" or not (name == kind or number.isdecimal()):
        raise InvalidArgument(f"device must be cpu, cuda or cuda:N, not {name!r}", field="device")
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise FailedPrecondition(f"device {name}: torch {torch.__version__} is built without CUDA", field="device")
    count = torch.cuda.device_count()
    if int(number or 0) >= count:
        found = f"torch sees {count} of them" if count else "torch sees no CUDA GPU: is its driver there?"
        raise FailedPrecondition(f"device {name} is not there: {found}", field="device")
    return torch.device("cuda", int(number or 0))


def use(device: torch.device) -> None:
    """What this thread starts on a GPU runs on this one from now on."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class Memory(Protocol):
    """The memory of a device, in bytes."""

    kv_fraction: float
    """The part of what is left that keys and values get where nothing is said."""

    def free(self) -> int:
        """What this process may still take."""

    def beside(self, tensors: int) -> int:
        """What this process takes beside tensors of so many bytes; on a GPU, what anybody does."""

    def peak(self, work: Callable[[], object]) -> int:
        """By how much the memory that is taken grows, at most, while `work` runs."""

    def give_back(self) -> None:
        """Gives what was freed back to the system."""


def memory_of(device: torch.device) -> Memory:
    """That of a device which is there."""
    return GpuMemory(device, torch.cuda) if device.type == "cuda" else HostMemory()


class HostMemory:
    """See Memory: the machine's, which the system and other processes need too."""

    kv_fraction = 0.25

    def free(self) -> int:
        """See Memory."""
        return memory.available_bytes()

    def beside(self, tensors: int) -> int:
        """See Memory."""
        return max(0, memory.resident_bytes() - tensors)

    def peak(self, work: Callable[[], object]) -> int:
        """See Memory."""
        return memory.peak_bytes(work)

    def give_back(self) -> None:
        """See Memory."""
        memory.give_back()


class GpuMemory:
    """See Memory. `cuda` is torch.cuda."""

    kv_fraction = 0.9

    def __init__(self, device: torch.device, cuda: Any) -> None:
        self._device = device
        self._cuda = cuda

    def free(self) -> int:
        """See Memory."""
        free, _ = self._cuda.mem_get_info(self._device)
        kept: int = self._cuda.memory_reserved(self._device) - self._cuda.memory_allocated(self._device)
        return int(free) + kept

    def beside(self, tensors: int) -> int:
        """See Memory."""
        del tensors  # torch knows
        free, total = self._cuda.mem_get_info(self._device)
        return max(0, int(total) - int(free) - int(self._cuda.memory_reserved(self._device)))

    def peak(self, work: Callable[[], object]) -> int:
        """Tensors at their most, and what kernels were given for good when they first ran."""
        self.give_back()
        before, beside = int(self._cuda.memory_allocated(self._device)), self.beside(0)
        self._cuda.reset_peak_memory_stats(self._device)
        work()
        self._cuda.synchronize(self._device)
        tensors = int(self._cuda.max_memory_allocated(self._device)) - before
        return max(0, tensors) + max(0, self.beside(0) - beside)

    def give_back(self) -> None:
        """See Memory."""
        self._cuda.synchronize(self._device)  # what a kernel still reads is not freed
        self._cuda.empty_cache()
        memory.give_back()
