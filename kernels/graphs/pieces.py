"""Graphs of the pieces of a pass (kernels/piecewise), for batches of any rows: attention runs between them.

A piece reads where it read when it was recorded: static inputs, what the pieces before it gave, and what attention
gave, which is put at one place of its own. All of it lives in the pool that graphs share, from the piece that makes it
to the last that reads it, in a replay as in the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple
from weakref import WeakSet

import torch

from kernels.graphs.capture import Capture, Graph
from kernels.piecewise.pieces import Piece
from kernels.piecewise.running import Call, Hooks

Tensor = torch.Tensor


class _Now(NamedTuple):
    """What the pass that runs is for."""

    tokens: int  # of the graphs
    real: int  # that are no padding
    records: bool


class Pieces:
    """Wraps the pieces of passes, and runs a pass with their graphs."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._now: _Now | None = None
        self._wrapped: WeakSet[_Wrapped] = WeakSet()  # they hold weights, and go with the pass that they are of
        self._made: Sequence[Tensor] = ()  # by the last piece
        self._places: dict[tuple[torch.dtype, tuple[int, ...]], Tensor] = {}

    @property
    def hooks(self) -> Hooks:
        """What ops of pieces are to be given."""
        return Hooks(self._wrap, self._place)

    @property
    def exist(self) -> bool:
        """Whether there are any."""
        return bool(self._wrapped)

    def record(self, tokens: int, run: Callable[[], Tensor]) -> Tensor:
        """Runs a pass of so many tokens, and records each piece on its way. The largest number comes first."""
        return self._with(_Now(tokens, tokens, records=True), run)

    def replay(self, tokens: int, real: int, run: Callable[[], Tensor]) -> Tensor:
        """Runs a pass of so many tokens, of which the first are `real`, by the graphs that were recorded for them."""
        return self._with(_Now(tokens, real, records=False), run)

    def forget(self) -> None:
        """Lets go of all graphs and their memory."""
        self._made = ()
        self._places.clear()
        for wrapped in self._wrapped:
            wrapped.graphs.clear()

    def _with(self, now: _Now, run: Callable[[], Tensor]) -> Tensor:
        self._now = now
        try:
            return run()
        finally:
            self._now, self._made = None, ()

    def _wrap(self, piece: Piece, run: Call) -> Call:
        del piece
        wrapped = _Wrapped(run)
        self._wrapped.add(wrapped)
        return lambda *arguments: self._run(wrapped, arguments)

    def _run(self, wrapped: _Wrapped, arguments: tuple[Tensor, ...]) -> Sequence[Tensor]:
        now = self._now
        if now is None:
            return wrapped.run(*arguments)
        if now.records:
            graph, made = self._capture.record(lambda: wrapped.run(*arguments))
            wrapped.graphs[now.tokens] = graph, [self._capture.borrowed(x) for x in made]
            self._made = made  # its own memory, for as long as this pass reads it
        else:
            graph, self._made = wrapped.graphs[now.tokens]
            graph.replay()
        return self._made

    def _place(self, made: Tensor) -> Tensor:
        """What an op between pieces gave, at the place where the next piece reads it; no other may read it later."""
        now = self._now
        if now is None or any(made is x for x in self._made):  # of text, media ops give what they are given
            return made
        key = made.dtype, made.shape[1:]
        if key not in self._places:
            self._places[key] = torch.zeros_like(made)
        place = self._places[key][: now.tokens]
        place[: now.real].copy_(made[: now.real])  # nobody wrote what is behind
        return place


class _Wrapped:
    """What runs a piece, and its graphs by tokens with what they give."""

    def __init__(self, run: Call) -> None:
        self.run = run
        self.graphs: dict[int, tuple[Graph, Sequence[Tensor]]] = {}
