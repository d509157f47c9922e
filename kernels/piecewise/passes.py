"""What is changed in a recorded program before it is split, each change by itself.

    opaque(x)                    ─ quantize ▶   numbers, scale = quantize_rows(x); multiply(numbers, scale)
    rms_norm; quantize_rows      ─ norm ────▶   rms_norm_rows, and so for add_rms_norm
    silu_mul; quantize_rows      ─ gate ────▶   silu_mul_rows

The compiler fuses what is plain torch by itself, so that little is left to do here: to bring what a product does to its
inputs out of the product, and to name pairs for which there is one hand-written kernel, where nothing is compiled.
A pass may decline numbers of tokens at which it does not pay; the program of a step is then chosen by its tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from kernels.piecewise.program import Kind, Node, Program
from kernels.quantized_rows.reference import TYPES, QuantizedRows
from kernels.quantized_rows.reference import Kind as Rows


@runtime_checkable
class _TakesRows(Protocol):
    """A product whose inputs may be quantized outside of it: kernels.linear.quantized has them."""

    rows: Rows

    def multiply(self, x: QuantizedRows, dtype: torch.dtype) -> torch.Tensor:
        """The product of quantized rows."""


class Pass(NamedTuple):
    """One change."""

    name: str
    run: Callable[[Program], Program]
    declines: tuple[range, ...] = ()  # numbers of tokens


def quantize(program: Program) -> Program:
    """Rows are quantized in the sight of the compiler, once for all products that read them."""
    kinds = list(program.kinds)
    rows: dict[tuple[int, str], tuple[int, ...]] = {}

    def changed() -> Iterator[Node]:
        for node in program.nodes:
            if not isinstance(node.product, _TakesRows):
                yield node
                continue
            x, kind = node.inputs[0], node.product.rows
            if (x, kind) not in rows:
                rows[x, kind] = (len(kinds), len(kinds) + 1)
                shape = program.kinds[x].shape
                kinds.extend((Kind(shape, TYPES[kind]), Kind(shape[:-1], torch.float32)))
                yield Node("quantize_rows", (x,), rows[x, kind], constants=(kind,))
            constants = (*node.constants, program.kinds[x].dtype)
            yield replace(node, op="multiply", inputs=rows[x, kind], constants=constants)

    nodes = tuple(changed())
    return Program(nodes, tuple(kinds), program.output)


def _joined(program: Program, first: str) -> Program:
    """`first` and the quantize_rows that alone reads what it makes, as one node."""
    reads = Counter(value for node in program.nodes for value in node.inputs)
    reads[program.output] += 1
    quantized = {node.inputs[0]: node for node in program.nodes if node.op == "quantize_rows"}

    def changed() -> Iterator[Node]:
        gone: set[int] = set()  # the values that are no longer made
        for node in program.nodes:
            then = quantized.get(node.outputs[0]) if node.op == first and reads[node.outputs[0]] == 1 else None
            if then is not None:
                gone.update(then.inputs)
                outputs, constants = then.outputs + node.outputs[1:], node.constants + then.constants
                yield replace(node, op=f"{first}_rows", outputs=outputs, constants=constants)
            elif node.op != "quantize_rows" or node.inputs[0] not in gone:
                yield node

    return replace(program, nodes=tuple(changed()))


def norm(program: Program) -> Program:
    """Norms whose rows are quantized next."""
    return _joined(_joined(program, "rms_norm"), "add_rms_norm")


def gate(program: Program) -> Program:
    """Gated activations whose rows are quantized next."""
    return _joined(program, "silu_mul")


def drop(program: Program) -> Program:
    """Nodes whose values nobody reads are left out."""
    read = {program.output}
    kept: list[Node] = []
    for node in reversed(program.nodes):
        if not read.isdisjoint(node.outputs):
            kept.append(node)
            read.update(node.inputs)
    return replace(program, nodes=tuple(reversed(kept)))


PASSES = (Pass("quantize", quantize), Pass("norm", norm), Pass("gate", gate), Pass("drop", drop))
"""In their order. What they made of it stands in what a piece says, under which its compiled code is kept."""


def ranges(passes: Sequence[Pass], most: int) -> tuple[range, ...]:
    """Numbers of tokens, from 1 to `most`, cut where a pass begins or ends to decline."""
    cuts = {edge for each in passes for declined in each.declines for edge in (declined.start, declined.stop)}
    edges = [1, *sorted(edge for edge in cuts if 1 < edge <= most), most + 1]
    return tuple(range(first, stop) for first, stop in pairwise(edges))


def apply(passes: Sequence[Pass], program: Program, tokens: range) -> Program:
    """The program after all passes that do not decline so many tokens; `tokens` is one of `ranges`."""
    for each in passes:
        if not any(tokens.start in declined for declined in each.declines):
            program = each.run(program)
    return program
