"""A recorded program on tensors: its pieces in turn, with attention and media between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.ops import Ops, Step
from kernels.piecewise.pieces import Barrier, Piece, split
from kernels.piecewise.program import AXES, IDS, POSITIONS, Node, Program

Tensor = torch.Tensor
Call = Callable[..., Sequence[Tensor]]
"""A piece as a function: its inputs, then its weights, give its outputs."""


def base_table(base: Ops[Tensor]) -> dict[str, Callable[..., Any]]:
    """The base's ops by their names, for a piece that is not compiled."""
    return {
        "embedding": base.embedding,
        "rms_norm": base.rms_norm,
        "add_rms_norm": base.add_rms_norm,
        "split_heads": base.split_heads,
        "qk_norm": base.qk_norm,
        "rope_cos_sin": base.rope_cos_sin,
        "rope_axes_cos_sin": base.rope_axes_cos_sin,
        "silu_mul": base.silu_mul,
        "largest": base.largest,
    }


def uncompiled(piece: Piece, base: Ops[Tensor]) -> Call:
    """The piece by the base's ops, one after the other. Its own weights count: those it is given are the same."""
    table = base_table(base)

    def call(*arguments: Tensor) -> list[Tensor]:
        values = dict(zip(piece.inputs, arguments, strict=False))
        for node in piece.nodes:
            values.update(zip(node.outputs, _run(table, node, values), strict=True))
        return [values[value] for value in piece.outputs]

    return call


def _run(table: dict[str, Callable[..., Any]], node: Node, values: dict[int, Tensor]) -> tuple[Tensor, ...]:
    inputs = [values[value] for value in node.inputs]
    if node.product is not None:
        return (node.product(*inputs),)
    made = table[node.op](*inputs, *node.weights, *node.constants)
    return made if isinstance(made, tuple) else (made,)


@dataclass(slots=True, frozen=True)
class Hooks:
    """What others make of a program."""

    wrap_piece: Callable[[Piece, Call], Call] = field(default=lambda piece, run: run)
    """What runs a piece, from what would: called once for each place of the program where a piece stands."""
    place: Callable[[Tensor], Tensor] = field(default=lambda made: made)
    """Puts what an op between pieces gave where the next piece is to read it, and returns it there: a captured graph
    reads where it read when it was captured."""


@dataclass(slots=True, frozen=True)
class _Call:
    """A piece, ready."""

    run: Call
    piece: Piece


class Runner:
    """The mathematics of a pass over tensors."""

    def __init__(self, program: Program, base: Ops[Tensor], hooks: Hooks) -> None:
        parts = split(program)
        self.listing = "\n".join(part.text if isinstance(part, Piece) else f"{part.node.op}\n" for part in parts)
        self._place = hooks.place
        self._output = program.output
        self._parts = [
            part if isinstance(part, Barrier) else _Call(hooks.wrap_piece(part, uncompiled(part, base)), part)
            for part in parts
        ]
        self._between = {"replace_rows": base.replace_rows, "add_rows": base.add_rows}

    def __call__(self, step: Step[Tensor]) -> Tensor:
        """The program's result for the tokens of a step."""
        values = {IDS: step.ids_T, POSITIONS: step.positions_T, AXES: step.positions_3T}
        for part in self._parts:
            if isinstance(part, Barrier):
                self._pass_barrier(part, step, values)
                continue
            piece = part.piece
            arguments = [values.pop(value) if value in piece.released else values[value] for value in piece.inputs]
            made = part.run(*arguments, *piece.weights)
            values.update(zip(piece.outputs, made, strict=True))
        return values[self._output]

    def _pass_barrier(self, barrier: Barrier, step: Step[Tensor], values: dict[int, Tensor]) -> None:
        node = barrier.node
        inputs = [values.pop(value) if value in barrier.released else values[value] for value in node.inputs]
        if node.op == "attend":
            made = step.attend(node.constants[0], *inputs)
        else:
            made = self._between[node.op](inputs[0], step.media, node.constants[0])
        values[node.outputs[0]] = self._place(made)
