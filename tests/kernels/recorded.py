"""A capture that keeps what a GPU would: launches and torch's own ops on the tensors that they had, and no Python.

A replay runs those again and writes where they wrote. So what is worked out in Python while a graph is recorded stays
as it was then, and a result that depends on a step's own numbers comes out wrong. What a capture does not allow raises.
Memory that was made in a recording is its own; any other it knows by address alone, as a GPU does, and a replay raises
where nobody has kept it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from kernels.launch import Launch

Tensor = torch.Tensor
_FORBIDDEN = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "equal")
"""What a captured stream cannot do: give the host a number, or take one from it."""


@dataclass(slots=True, frozen=True)
class _Outside:
    """A tensor whose memory is not the graph's."""

    storage: StorageWeakRef
    like: Tensor  # on no device
    offset: int

    def found(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)
        if storage is None:
            raise AssertionError(f"a graph reads memory that nobody kept: {self.like}")
        return torch.empty(0, dtype=self.like.dtype).set_(storage, self.offset, self.like.shape, self.like.stride())


class _Memory:
    """What was made in recordings."""

    def __init__(self) -> None:
        self._own = set[int]()

    def add(self, x: Tensor) -> None:
        self._own.add(_address(x))

    def seen(self, given: Any) -> Any:
        """The same, but with what is held of tensors elsewhere where a graph would hold nothing."""
        return tree_map(self._seen, given)

    def _seen(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.numel() or _address(leaf) in self._own:
            return leaf
        like = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
        return _Outside(StorageWeakRef(leaf.untyped_storage()), like, leaf.storage_offset())


def _found(given: Any) -> Any:
    return tree_map(lambda leaf: leaf.found() if isinstance(leaf, _Outside) else leaf, given)


class _Ops(TorchDispatchMode):
    """Notes every op, unless a kernel runs."""

    def __init__(self, notes: list[Callable[[], None]], memory: _Memory) -> None:
        super().__init__()
        self._notes = notes
        self._memory = memory
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.paused:
            return out
        name = func.overloadpacket.__name__
        if name in _FORBIDDEN:
            raise AssertionError(f"a capture does not allow {name}")
        read = {_address(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        fresh = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and _address(leaf) not in read]
        for leaf in fresh:
            self._memory.add(leaf)
        if "empty" in name:
            return out
        if fresh or func._schema.is_mutable:
            seen = self._memory.seen((args, kwargs))

            def again() -> None:
                given, named = _found(seen)
                made = tree_leaves(func(*given, **named))
                for before, now in zip(fresh, made, strict=False):
                    before.copy_(now)

            self._notes.append(again)
        return out


def _address(x: Tensor) -> int:
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
        self._memory = _Memory()

    def renew(self) -> None:
        self.pools += 1

    @contextmanager
    def session(self) -> Iterator[None]:
        self.in_session = True
        yield
        self.in_session = False

    def record(self, run: Callable[[], Sequence[Tensor]]) -> tuple[_Notes, Sequence[Tensor]]:
        assert self.in_session
        run()
        notes: list[Callable[[], None]] = []
        mode = _Ops(notes, self._memory)
        original = Launch.run

        def noted(launch: Launch) -> None:
            mode.paused = True
            original(launch)
            blank, seen = launch._replace(given=()), self._memory.seen(launch.given)
            mode.paused = False
            notes.append(lambda: original(blank._replace(given=_found(seen))))

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

    def borrowed(self, x: Tensor) -> Tensor:
        return x

    def taken_bytes(self) -> int:
        return self.bytes
