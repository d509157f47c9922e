"""A forward pass with its graphs, and what the graphs of one model share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kernels.graphs.capture import Capture, Graph, capture_of
from kernels.graphs.dispatch import Batch, Choice, Dispatcher, Mode
from kernels.graphs.inputs import Fill, Inputs
from kernels.graphs.pieces import Pieces
from kernels.native.build import Unavailable
from kernels.ops import Limits, Ops, Pass, StepTensors, Warmed
from kernels.piecewise.ops import piecewise_ops
from kernels.piecewise.running import Hooks

CHOICES = ("auto", "none", "full", "piecewise", "both")
"""auto is both on a GPU."""
_SAMPLE = 4
"""Graphs of each kind that tell what all take: the largest fills the pool, the others say what one more costs."""


class Graphs:
    """What the graphs of one model share: the device's capture, static inputs, and which graphs there are."""

    def __init__(self, capture: Capture, fill: Fill, *, full: bool = True, drafts: int = 0) -> None:
        """Of the whole pass where it is `full`, then also with rows of one token and up to so many `drafts`.

        Of pieces where ops are made with `pieces.hooks`.
        """
        self.capture = capture
        self.pieces = Pieces(capture)
        self._full = full
        self._fill = fill
        self._drafts = drafts
        self._limits: Limits | None = None
        self._dispatcher: Dispatcher | None = None
        self._inputs: Inputs | None = None

    def over(self, ops: Ops[Any]) -> Ops[Any]:
        """The same ops, whose passes have graphs."""
        inner: Callable[..., Pass] = ops.compile
        return replace(ops, compile=lambda mathematics: Graphed(inner(mathematics), self))

    def prepare(self, limits: Limits) -> tuple[Dispatcher, Inputs]:
        """What the passes share, for these limits."""
        if self._limits is not limits or self._dispatcher is None or self._inputs is None:
            self._limits = limits
            self.capture.renew()
            most = {"rows": limits.rows, "tokens": limits.tokens, "drafts": self._drafts}
            self._dispatcher = Dispatcher(**most, full=self._full, pieces=self.pieces.exist)
            every = list(self._dispatcher.choices())
            tokens = max((choice.tokens for choice in every), default=0)
            rows = max((choice.rows for choice in every), default=0)
            self._inputs = Inputs(limits, tokens, rows, self._fill)
        return self._dispatcher, self._inputs

    def forget(self) -> None:
        """Lets go of the memory."""
        self._limits = self._dispatcher = self._inputs = None
        self.pieces.forget()


class GraphOptions(NamedTuple):
    """Which graphs a model gets: `choice` is one of CHOICES; `drafts` as Graphs has it."""

    choice: str = "auto"
    drafts: int = 0


NO_GRAPHS = GraphOptions("none")


MakePieces = Callable[[Ops[torch.Tensor], Hooks | None], Ops[Any]]
"""Makes ops of pieces, as kernels.piecewise.ops.piecewise_ops does."""


def with_graphs(
    ops: Ops[Any], options: GraphOptions, device: torch.device, pieces: MakePieces | None = None
) -> Ops[Any]:
    """The ops, whose passes have graphs then. `pieces` is how they are compiled, if they are.

    Raises ValueError for a choice that does not exist, and Unavailable where the ops cannot be in a graph.
    """
    choice = options.choice
    if choice not in CHOICES:
        raise ValueError(f"graphs must be one of {', '.join(CHOICES)}, not {choice!r}")
    if choice == "auto":
        choice = "both" if ops.name == "triton" and device.type == "cuda" else "none"
    if choice == "none":
        return ops if pieces is None else pieces(ops, None)
    if ops.name != "triton":
        raise Unavailable(f"graphs are of Triton kernels, and here are {ops.name} ones")
    from kernels.graphs.triton import fill  # a third of a second that others need not wait

    graphs = Graphs(capture_of(device), fill, full=choice in ("full", "both"), drafts=options.drafts)
    if choice in ("piecewise", "both"):
        ops = (pieces or _uncompiled)(ops, graphs.pieces.hooks)
    elif pieces is not None:
        ops = pieces(ops, None)
    return graphs.over(ops)


def _uncompiled(ops: Ops[torch.Tensor], hooks: Hooks | None) -> Ops[Any]:
    return piecewise_ops(ops, hooks=hooks)


class Graphed:
    """See kernels.ops.Pass: what it gives lies in memory of its own where a graph ran."""

    def __init__(self, inner: Pass, shared: Graphs) -> None:
        self.listing = inner.listing
        self._inner = inner
        self._shared = shared
        self._dispatcher: Dispatcher | None = None
        self._inputs: Inputs | None = None
        self._cache: torch.Tensor | None = None
        # With what it reads: the memory would be another's once nobody holds it, as what was made of placed rows.
        self._graphs: dict[Choice, tuple[Graph, StepTensors]] = {}
        self._out: torch.Tensor | None = None  # [most tokens, *what the mathematics gives of one]

    def warm(self, limits: Limits | None) -> Warmed:
        """See kernels.ops.Pass. Records every graph, or a sample of them, which is let go again."""
        self._graphs.clear()
        self._dispatcher = self._inputs = self._cache = self._out = None
        if limits is None:
            self._shared.forget()
            return self._inner.warm(None)
        warmed = self._inner.warm(limits)
        self._dispatcher, self._inputs = self._shared.prepare(limits)
        self._cache = limits.cache
        with self._shared.capture.session():
            recorded = self._record(self._dispatcher, self._inputs, sample=limits.sample)
        if limits.sample:
            self.warm(None)
        return Warmed(warmed.graphs + recorded.graphs, warmed.bytes + recorded.bytes)

    def _record(self, dispatcher: Dispatcher, inputs: Inputs, *, sample: bool) -> Warmed:
        """All of them; their bytes, as measured where all are recorded, else as reckoned from the sample."""
        capture, taken, count = self._shared.capture, 0, 0
        for mode in (Mode.PIECEWISE, Mode.FULL):
            choices = [choice for choice in dispatcher.choices() if choice.mode is mode]
            before = capture.taken_bytes()
            first = before
            for index, choice in enumerate(choices[:_SAMPLE] if sample else choices):
                self._record_one(inputs, choice)
                first = capture.taken_bytes() if index == 0 else first
            after = capture.taken_bytes()
            taken += after - before
            count += len(choices)
            if sample and len(choices) > _SAMPLE:
                taken += max(0, after - first) * (len(choices) - _SAMPLE) // (_SAMPLE - 1)
        return Warmed(count, max(0, taken))

    def _record_one(self, inputs: Inputs, choice: Choice) -> None:
        inputs.clear(choice)
        if choice.mode is Mode.PIECEWISE:
            trial = inputs.trial(choice)
            self._keep(self._shared.pieces.record(choice.tokens, lambda: self._inner(trial)))
            return
        given = inputs.of(choice)
        graph, _ = self._shared.capture.record(lambda: (self._keep(self._inner(given)),))
        self._graphs[choice] = graph, given

    def __call__(self, given: StepTensors) -> torch.Tensor:
        """See kernels.ops.Pass."""
        dispatcher, inputs = self._dispatcher, self._inputs
        if dispatcher is None or inputs is None or given.cache is not self._cache or not len(given.ids_T):
            return self._inner(given)
        choice = dispatcher.choose(_batch(given))
        if choice.mode is Mode.NONE:
            return self._inner(given)
        inputs.take(given, choice)
        tokens = len(given.ids_T)
        if choice.mode is Mode.FULL:
            self._graphs[choice][0].replay()
            assert self._out is not None
            return self._out[:tokens]
        padded = inputs.padded(given, choice)
        return self._keep(self._shared.pieces.replay(choice.tokens, tokens, lambda: self._inner(padded))[:tokens])

    def _keep(self, out: torch.Tensor) -> torch.Tensor:
        """What a pass gave, in memory that no graph uses. The largest number of tokens comes first."""
        if self._out is None:
            self._out = torch.zeros_like(out)
        return self._out[: len(out)].copy_(out)


def _batch(given: StepTensors) -> Batch:
    starts, rows = given.rows.row_starts, given.rows.count
    tokens = len(given.ids_T)
    per_row = 1 if tokens == rows else max(map(given.rows.new_tokens, range(rows)))
    return Batch(tokens, rows, per_row, given.media is None and starts[-1] == tokens)
