"""Records a forward pass: a model's mathematics runs once over symbols, and each op adds a node.

    symbol    stands for a tensor whose shape is known but for the number of tokens
    value     what a symbol stands for, by its number
    node      one op: values in, values out; weights and constants beside them

Weights are arguments of a node and no part of what it says, so that two layers say the same, and a program that was
compiled elsewhere is bound to the weights of this process by its description alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor
Shape = tuple[int | None, ...]
"""None is the number of tokens."""

BARRIERS = frozenset(("attend", "replace_rows", "add_rows", "attend_frames", "join", "stack"))
"""Ops that run between pieces: they read rows, the cache, media or frames, which no compiler sees, or change how many
rows there are, which is one number in a piece."""
IDS, POSITIONS, AXES = range(3)
"""The values that a step brings: ids_T, positions_T and positions_3T."""


class Kind(NamedTuple):
    """What is known of a value before there is one."""

    shape: Shape
    dtype: torch.dtype

    def __str__(self) -> str:
        sizes = ", ".join("T" if size is None else str(size) for size in self.shape)
        return f"{str(self.dtype).removeprefix('torch.')} [{sizes}]"


@dataclass(slots=True, frozen=True, eq=False)
class Symbol:
    """Stands for a tensor."""

    recorder: Recorder
    value: int
    kind: Kind

    @property
    def width(self) -> int:
        """Numbers in the last axis. Raises ValueError where they depend on the step."""
        width = self.kind.shape[-1]
        if width is None:
            raise ValueError(f"value {self.value} has no last axis of a fixed size")
        return width


@dataclass(slots=True, frozen=True)
class Node:
    """One op."""

    op: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    weights: tuple[Tensor, ...] = ()
    constants: tuple[Any, ...] = ()
    product: Any = None
    """Of a product: the prepared weight itself, for a run that is not compiled."""


@dataclass(slots=True, frozen=True)
class Program:
    """All nodes in order, what is known of every value, and which value is the result."""

    nodes: tuple[Node, ...]
    kinds: tuple[Kind, ...]
    output: int

    def last_uses(self) -> dict[int, int]:
        """The last node that reads each value; the result is read behind them all."""
        uses = {value: number for number, node in enumerate(self.nodes) for value in node.inputs}
        uses[self.output] = len(self.nodes)
        return uses

    def text(self) -> str:
        """One line per node, to read."""
        return "\n".join(lines(self.nodes, {}))


@dataclass(slots=True)
class Recorder:
    """Collects nodes; symbols lead back to it."""

    nodes: list[Node] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)

    def new(self, kind: Kind) -> Symbol:
        """A value that nothing in the program makes, or that the next node makes."""
        self.kinds.append(kind)
        return Symbol(self, len(self.kinds) - 1, kind)

    def add(
        self,
        op: str,
        inputs: Sequence[Symbol],
        kinds: Sequence[Kind],
        *,
        weights: Sequence[Tensor] = (),
        constants: Sequence[Any] = (),
        product: Any = None,
    ) -> tuple[Symbol, ...]:
        """Appends a node, and gives the symbols of what it makes."""
        made = tuple(self.new(kind) for kind in kinds)
        self.nodes.append(
            Node(
                op,
                tuple(symbol.value for symbol in inputs),
                tuple(symbol.value for symbol in made),
                tuple(weights),
                tuple(constants),
                product,
            )
        )
        return made

    def finish(self, output: Symbol) -> Program:
        """The program whose result the symbol is."""
        return Program(tuple(self.nodes), tuple(self.kinds), output.value)


def lines(nodes: Sequence[Node], names: dict[int, str]) -> Iterator[str]:
    """What nodes say, one line each; values without a name are called by their number."""
    for node in nodes:
        said = [names.get(value, f"v{value}") for value in node.inputs]
        said += [str(Kind(tuple(weight.shape), weight.dtype)) for weight in node.weights]
        said += [repr(constant) for constant in node.constants]
        made = ", ".join(names.get(value, f"v{value}") for value in node.outputs)
        yield f"{made} = {node.op}({', '.join(said)})"
