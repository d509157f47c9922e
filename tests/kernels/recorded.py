"""A capture that keeps what a GPU would: launches and torch's own ops on the tensors that they had, and no Python.

A replay runs those again and writes where they wrote. So what is worked out in Python while a graph is recorded stays
as it was then, and a result that depends on a step's own numbers comes out wrong. What a capture does not allow raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels.launch import Launch

_FORBIDDEN = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "equal")
"""What a captured stream cannot do: give the host a number, or take one from it."""


class _Ops(TorchDispatchMode):
    """Notes every op, unless a kernel runs."""

    def __init__(self, notes: list[Callable[[], None]]) -> None:
        super().__init__()
        self._notes = notes
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.paused:
            return out
        name = func.overloadpacket.__name__
        if name in _FORBIDDEN:
            raise AssertionError(f"a capture does not allow {name}")
        read = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        fresh = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor) and _memory(leaf) not in read]
        if "empty" in name:
            return out
        if fresh or func._schema.is_mutable:

            def again() -> None:
                made = tree_leaves(func(*args, **kwargs))
                for before, now in zip(fresh, made, strict=False):
                    before.copy_(now)

            self._notes.append(again)
        return out


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


class _Notes:
    def __init__(self, notes: list[Callable[[], None]], capture: Recorded) -> None:
        self._notes = notes
        self._capture = capture

    def __len__(self) -> int:
        return len(self._notes)

    def replay(self) -> None:
        self._capture.replays += 1
        for note in self._notes:
            note()


class Recorded:
    """See kernels.graphs.capture.Capture. Each graph takes a byte for what it notes."""

    def __init__(self) -> None:
        self.graphs: list[_Notes] = []
        self.bytes = 0
        self.pools = 0
        self.replays = 0
        self.in_session = False

    def renew(self) -> None:
        self.pools += 1

    @contextmanager
    def session(self) -> Iterator[None]:
        self.in_session = True
        yield
        self.in_session = False

    def record(self, run: Callable[[], Sequence[torch.Tensor]]) -> tuple[_Notes, Sequence[torch.Tensor]]:
        assert self.in_session
        run()
        notes: list[Callable[[], None]] = []
        mode = _Ops(notes)
        original = Launch.run

        def noted(launch: Launch) -> None:
            mode.paused = True
            original(launch)
            mode.paused = False
            notes.append(lambda: original(launch))

        Launch.run = noted  # type: ignore[method-assign]
        try:
            with mode:
                made = run()
        finally:
            Launch.run = original  # type: ignore[method-assign]
        graph = _Notes(notes, self)
        self.graphs.append(graph)
        self.bytes += len(notes)
        return graph, made

    def borrowed(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def taken_bytes(self) -> int:
        return self.bytes
