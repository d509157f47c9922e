"""A recorded program on tensors: its pieces in turn, with attention and media between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.media import encoder
from kernels.ops import Ops, Step
from kernels.piecewise.pieces import Barrier, Piece
from kernels.piecewise.program import AXES, IDS, POSITIONS, Node
from kernels.quantized_rows.reference import QuantizedRows
from kernels.rope import reference as rope

Tensor = torch.Tensor
Call = Callable[..., Sequence[Tensor]]
"""A piece as a function: its inputs, then its weights, give its outputs."""
MOST_TOKENS = 16384
"""Tokens that a compiled piece takes. Inductor computes 32-bit addresses where it can prove that they suffice, and
2^14 tokens by a vocabulary of 2^17 do; a larger step runs uncompiled."""


def uncompiled(piece: Piece, base: Ops[Tensor]) -> Call:
    """The piece by the base's ops, one after the other. Its own weights count: those it is given are the same."""
    table = _table(base)

    def call(*arguments: Tensor) -> list[Tensor]:
        values = dict(zip(piece.inputs, arguments, strict=False))
        for node in piece.nodes:
            made = table[node.op](node, [values[value] for value in node.inputs])
            values.update(zip(node.outputs, flat(made), strict=True))
        return [values[value] for value in piece.outputs]

    return call


def flat(made: Any) -> Iterator[Tensor]:
    """The tensors that an op gave, whichever way they are grouped."""
    if isinstance(made, tuple):
        for part in made:
            yield from flat(part)
    else:
        yield made


def _table(base: Ops[Tensor]) -> dict[str, Callable[[Node, list[Tensor]], Any]]:
    """How the base runs each node."""

    def by(op: Callable[..., Any]) -> Callable[[Node, list[Tensor]], Any]:
        return lambda node, inputs: op(*inputs, *node.weights, *node.constants)

    def multiply(node: Node, inputs: list[Tensor]) -> Tensor:
        made: Tensor = node.product.multiply(QuantizedRows(*inputs), node.constants[-1])
        return made

    table = {
        "embedding": by(base.embedding),
        "rms_norm": by(base.rms_norm),
        "add_rms_norm": by(base.add_rms_norm),
        "split_heads": by(base.split_heads),
        "qk_norm": by(base.qk_norm),
        "rope_cos_sin": by(base.rope_cos_sin),
        "rope_axes_cos_sin": by(base.rope_axes_cos_sin),
        "silu_mul": by(base.silu_mul),
        "largest": by(base.largest),
        "linear": lambda node, inputs: node.product(*inputs),
        "opaque": lambda node, inputs: node.product(*inputs),
        "multiply": multiply,
        "add": by(torch.add),
        "layer_norm": by(encoder.layer_norm),
        "gelu": by(encoder.gelu),
        "rope": by(rope.rope),
    }
    if base.name != "triton":
        return table
    from kernels.quantized_rows import triton as rows

    return table | {
        "quantize_rows": by(rows.quantize_rows),
        "rms_norm_rows": by(rows.rms_norm),
        "add_rms_norm_rows": by(rows.add_rms_norm),
        "silu_mul_rows": by(rows.silu_mul),
    }


@dataclass(slots=True, frozen=True)
class Hooks:
    """What others make of a program."""

    wrap_piece: Callable[[Piece, Call], Call] = field(default=lambda piece, run: run)
    """What runs a piece, from what would: called once for each place of the program where a piece stands."""
    place: Callable[[Tensor], Tensor] = field(default=lambda made: made)
    """Puts what an op between pieces gave where the next piece is to read it, and returns it there: a captured graph
    reads where it read when it was captured."""


@dataclass(slots=True, frozen=True)
class Ready:
    """A piece, and what runs it."""

    run: Call
    piece: Piece


Parts = tuple[Ready | Barrier, ...]


class Runner:
    """The mathematics of a pass over tensors."""

    def __init__(self, variants: Sequence[tuple[range, Parts]], output: int, base: Ops[Tensor], hooks: Hooks) -> None:
        """Variants: what runs for so many tokens, in rising order and without gaps."""
        self._variants = tuple(variants)
        self._output = output
        self._place = hooks.place
        self._media = {"replace_rows": base.replace_rows, "add_rows": base.add_rows}

    def __call__(self, step: Step[Tensor]) -> Tensor:
        """The program's result for the tokens of a step."""

        def between(node: Node, inputs: list[Tensor]) -> Tensor:
            if node.op == "attend":
                return self._place(step.attend(node.constants[0], *inputs))
            return self._place(self._media[node.op](inputs[0], step.media, node.constants[0]))

        given = {IDS: step.ids_T, POSITIONS: step.positions_T, AXES: step.positions_3T}
        return run_parts(self._parts(len(step.ids_T)), given, between)[self._output]

    def _parts(self, tokens: int) -> Parts:
        for variant, parts in self._variants:
            if tokens < variant.stop:
                return parts
        raise ValueError(f"a step of {tokens} tokens is larger than any that pieces were made for")


def run_parts(
    parts: Parts, values: dict[int, Tensor], between: Callable[[Node, list[Tensor]], Tensor]
) -> dict[int, Tensor]:
    """Runs pieces, and `between` for what stands between them; values are let go where they are read last."""
    for part in parts:
        if isinstance(part, Barrier):
            values[part.node.outputs[0]] = between(part.node, _take(values, part.node.inputs, part.released))
        else:
            piece = part.piece
            made = part.run(*_take(values, piece.inputs, piece.released), *piece.weights)
            values.update(zip(piece.outputs, made, strict=True))
    return values


def _take(values: dict[int, Tensor], wanted: Sequence[int], released: frozenset[int]) -> list[Tensor]:
    taken = [values[value] for value in wanted]
    for value in released:
        del values[value]
    return taken
