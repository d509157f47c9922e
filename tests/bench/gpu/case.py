"""One kernel with inputs: held to its reference, then timed beside its floor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.bench.gpu.clock import SETS, Ceilings, Clock

Given = tuple[Any, ...]


@dataclass(slots=True)
class Case:
    """A function, its specification, and what it is given. What it writes into what it is given, it also returns."""

    name: str
    make: Callable[[], Given]  # fresh random inputs
    run: Callable[..., Any]
    reference: Callable[..., Any]
    moved: int = 0  # bytes that must be read or written
    operations: int = 0
    bits: int = 16  # of the numbers that are multiplied
    tolerance: float | None = 1e-2  # of the relative error in the 2-norm; None: equal to the last bit
    timed: bool = True
    recorded: bool = True  # whether a graph can hold it


@dataclass(slots=True)
class Result:
    """What one case gave; times in seconds."""

    name: str
    error: float  # relative, in the 2-norm; of what is whole, the part that differs
    right: bool
    seconds: float | None = None
    floor_s: float | None = None
    measured: str = ""
    why: str = field(default="")

    @property
    def of_floor(self) -> float | None:
        """How much of the device's best it reaches."""
        return self.floor_s / self.seconds if self.seconds and self.floor_s else None


def check(case: Case) -> Result:
    """Runs it on memory that is NaN before it is written."""
    given = case.make()
    expected = flat(case.reference(*copied(given)))
    with poisoned():
        found = flat(case.run(*given))
    error = max((_error(x, y) for x, y in zip(found, expected, strict=True)), default=0.0)
    right = error <= (case.tolerance or 0.0)
    return Result(case.name, error, right)


def measure(case: Case, clock: Clock, ceilings: Ceilings) -> tuple[float, float, str]:
    """Seconds, their floor, and how they were measured."""
    wanted = -(-3 * ceilings.cache // max(1, case.moved)) if clock.on_gpu else 1
    sets = [case.make() for _ in range(max(1, min(SETS, wanted)))]
    seconds, how = clock.seconds(lambda index: case.run(*sets[index % len(sets)]), recorded=case.recorded)
    return seconds, ceilings.floor_s(case.moved, case.operations, case.bits), how


def flat(found: Any) -> list[torch.Tensor]:
    """All tensors of a result."""
    if isinstance(found, torch.Tensor):
        return [found]
    return [tensor for part in found for tensor in flat(part)] if isinstance(found, Sequence) else []


def copied(given: Any) -> Any:
    """The same inputs in memory of their own."""
    if isinstance(given, torch.Tensor):
        return given.clone()
    if isinstance(given, tuple):
        parts = [copied(part) for part in given]
        return type(given)(*parts) if hasattr(given, "_fields") else tuple(parts)
    return given


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    if not expected.is_floating_point():
        return float((found != expected).double().mean())
    x, y = found.double(), expected.double()
    same = (x == y) | (x.isnan() & y.isnan())
    x, y = torch.where(same, 0.0, x), torch.where(same, 0.0, y)
    difference = float((x - y).norm())  # NaN where only one of them is
    size = float(torch.nan_to_num(expected.double(), 0.0, 0.0, 0.0).norm())
    return float("inf") if difference != difference else difference / max(size, 1e-30)


@contextmanager
def poisoned() -> Iterator[None]:
    """New tensors are NaN, or the largest whole number, until they are written."""
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations that are not deterministic: it is not about them
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)
