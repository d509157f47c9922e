"""Where a program is split, and which of its pieces are the same.

    nodes    angles embedding norm linear split │ attend │ linear add_norm … linear split │ attend │ …
             └──────────── piece ─────────────┘ barrier  └──────────── piece ─────────┘

A piece is a function: values that others made, then weights, give the values that others read. What it says of itself
has numbers of its own, so that the pieces of two layers that do the same say the same; a model of N layers has N + 1
pieces, of which three are distinct.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from kernels.piecewise.program import BARRIERS, Kind, Node, Program, Tensor, lines


@dataclass(slots=True, frozen=True)
class Piece:
    """Nodes between two barriers."""

    nodes: tuple[Node, ...]
    inputs: tuple[int, ...]  # values of the program, in the order of the arguments
    outputs: tuple[int, ...]
    kinds: tuple[Kind, ...]  # of the inputs
    weights: tuple[Tensor, ...]  # the arguments behind them
    released: frozenset[int]  # inputs that nobody reads afterwards
    text: str
    """What the piece does and what it is given: equal for pieces that may share what is compiled."""

    @property
    def key(self) -> str:
        """The text in 16 digits."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


@dataclass(slots=True, frozen=True)
class Barrier:
    """An op that runs between pieces."""

    node: Node
    released: frozenset[int]


def split(program: Program) -> tuple[Piece | Barrier, ...]:
    """The program in order. Nodes whose values nobody reads are left out."""
    return tuple(_parts(program))


def distinct(parts: tuple[Piece | Barrier, ...]) -> dict[str, Piece]:
    """One piece of each kind, by its key, in the order of first use."""
    found: dict[str, Piece] = {}
    for part in parts:
        if isinstance(part, Piece):
            found.setdefault(part.key, part)
    return found


def _parts(program: Program) -> Iterator[Piece | Barrier]:
    uses = program.last_uses()
    pending: list[Node] = []
    for number, node in enumerate(program.nodes):
        if node.op not in BARRIERS:
            pending.append(node)
            continue
        if pending:
            yield _piece(program, pending, number, uses)
            pending = []
        yield Barrier(node, frozenset(value for value in node.inputs if uses[value] == number))
    if pending:
        yield _piece(program, pending, len(program.nodes), uses)


def _piece(program: Program, nodes: list[Node], end: int, uses: dict[int, int]) -> Piece:
    """The piece of nodes that stand before node `end`."""
    made = [value for node in nodes for value in node.outputs]
    inputs = tuple(dict.fromkeys(value for node in nodes for value in node.inputs if value not in made))
    outputs = tuple(value for value in made if uses.get(value, -1) >= end)
    kinds = tuple(program.kinds[value] for value in inputs)
    weights = tuple(weight for node in nodes for weight in node.weights)
    names = {value: f"a{place}" for place, value in enumerate(inputs)}
    names |= {value: f"v{place}" for place, value in enumerate(made)}
    said = [f"a{place}: {kind}" for place, kind in enumerate(kinds)]
    said += lines(nodes, names)
    said.append(f"return {', '.join(names[value] for value in outputs)}")
    released = frozenset(value for value in inputs if uses[value] < end)
    return Piece(tuple(nodes), inputs, outputs, kinds, weights, released, "\n".join(said) + "\n")
