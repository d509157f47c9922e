"""A forward pass with its graphs, and what the graphs of one model share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from kernels.graphs.capture import Capture, Graph, capture_of
from kernels.graphs.dispatch import Batch, Choice, Dispatcher, Mode
from kernels.graphs.inputs import Fill, Inputs
from kernels.native.build import Unavailable
from kernels.ops import Limits, Ops, Pass, StepTensors, Warmed

CHOICES = ("auto", "none", "full")
"""auto is full on a GPU."""
_SAMPLE = 4
"""Graphs of each kind that tell what all take: the largest fills the pool, the others say what one more costs."""


class Graphs:
    """What the graphs of one model share: the device's capture, static inputs, and which graphs there are."""

    def __init__(self, capture: Capture, fill: Fill, *, drafts: int = 0) -> None:
        """`drafts`: graphs also hold rows of one token and up to so many drafts."""
        self.capture = capture
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
            self._dispatcher = Dispatcher(rows=limits.rows, tokens=limits.tokens, drafts=self._drafts)
            every = list(self._dispatcher.choices())
            tokens = max((choice.tokens for choice in every), default=0)
            rows = max((choice.rows for choice in every), default=0)
            self._inputs = Inputs(limits, tokens, rows, self._fill)
        return self._dispatcher, self._inputs

    def forget(self) -> None:
        """Lets go of the memory."""
        self._limits = self._dispatcher = self._inputs = None


class GraphOptions(NamedTuple):
    """Which graphs a model gets: `choice` is one of CHOICES; `drafts` as Graphs has it."""

    choice: str = "auto"
    drafts: int = 0


NO_GRAPHS = GraphOptions("none")


def with_graphs(ops: Ops[Any], options: GraphOptions, device: torch.device) -> Ops[Any]:
    """The ops, whose passes have graphs then.

    Raises ValueError for a choice that does not exist, and Unavailable where the ops cannot be in a graph.
    """
    choice = options.choice
    if choice not in CHOICES:
        raise ValueError(f"graphs must be one of {', '.join(CHOICES)}, not {choice!r}")
    if choice == "auto":
        choice = "full" if ops.name == "triton" and device.type == "cuda" else "none"
    if choice == "none":
        return ops
    if ops.name != "triton":
        raise Unavailable(f"graphs are of Triton kernels, and here are {ops.name} ones")
    from kernels.graphs.triton import fill  # a third of a second that others need not wait

    return Graphs(capture_of(device), fill, drafts=options.drafts).over(ops)


class Graphed:
    """See kernels.ops.Pass: what it gives lies in memory of its own where a graph ran."""

    def __init__(self, inner: Pass, shared: Graphs) -> None:
        self.listing = inner.listing
        self._inner = inner
        self._shared = shared
        self._dispatcher: Dispatcher | None = None
        self._inputs: Inputs | None = None
        self._cache: torch.Tensor | None = None
        self._graphs: dict[Choice, Graph] = {}
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
        given = inputs.of(choice)

        def run() -> None:
            out = self._inner(given)
            if self._out is None:  # the largest comes first, and runs once before it is recorded
                self._out = torch.zeros_like(out)
            self._out[: len(out)].copy_(out)

        self._graphs[choice] = self._shared.capture.record(run)

    def __call__(self, given: StepTensors) -> torch.Tensor:
        """See kernels.ops.Pass."""
        dispatcher, inputs = self._dispatcher, self._inputs
        if dispatcher is None or inputs is None or given.cache is not self._cache or not len(given.ids_T):
            return self._inner(given)
        choice = dispatcher.choose(_batch(given))
        if choice.mode is Mode.NONE:
            return self._inner(given)
        inputs.take(given, choice)
        self._graphs[choice].replay()
        assert self._out is not None
        return self._out[: len(given.ids_T)]


def _batch(given: StepTensors) -> Batch:
    starts, rows = given.rows.row_starts, given.rows.count
    tokens = len(given.ids_T)
    per_row = 1 if tokens == rows else max(map(given.rows.new_tokens, range(rows)))
    return Batch(tokens, rows, per_row, given.media is None and starts[-1] == tokens)
