"""The ops over symbols: what each adds to the program. Everything else of the table is the base's.

A weight that is a plain matrix is an argument of a piece, where the compiler sees the product. Any other (packed for
this CPU, in tiles, quantized) stays the base's: its product is called from within the piece (`opaque`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch

from kernels.linear import reference as linear
from kernels.linear.blocks import Blocks
from kernels.ops import Attention, Limits, Ops, Step, StepTensors, Warmed
from kernels.ops import Linear as Product
from kernels.piecewise.opaque import handle
from kernels.piecewise.passes import PASSES, Pass, apply, ranges
from kernels.piecewise.pieces import Barrier, Piece, split
from kernels.piecewise.program import Kind, Program, Recorder, Symbol
from kernels.piecewise.running import MOST_TOKENS, Call, Hooks, Parts, Ready, Runner, uncompiled

Tensor = torch.Tensor
Make = Callable[[Piece], Call | None]
"""Compiles a piece; None where that cannot be done (kernels/piecewise/compiler)."""


def piecewise_ops(
    base: Ops[Tensor],
    hooks: Hooks | None = None,
    compiler: Make | None = None,
    passes: Sequence[Pass] = PASSES,
) -> Ops[Symbol]:
    """The table; what is prepared with it runs on the base's ops, all but what is compiled.

    Without a compiler pieces run by the base's ops too.
    """
    table: Ops[Symbol] = replace(
        cast(Any, base),  # each of its fields over tensors is replaced
        prepare_linear=partial(_prepare, base.prepare_linear),
        prepare_product=partial(_prepare, base.prepare_product),
        compile=partial(_Pass, base, hooks or Hooks(), compiler, passes),
        compile_rows=partial(_compile_rows, base),
        embedding=embedding,
        rms_norm=rms_norm,
        add_rms_norm=add_rms_norm,
        split_heads=split_heads,
        qk_norm=qk_norm,
        rope_cos_sin=rope_cos_sin,
        rope_axes_cos_sin=rope_axes_cos_sin,
        replace_rows=partial(_media, "replace_rows"),
        add_rows=partial(_media, "add_rows"),
        silu_mul=silu_mul,
        largest=largest,
    )
    return table


class Linear:
    """A prepared weight of the base as an op."""

    def __init__(self, product: Product[Tensor], outputs: int) -> None:
        self.product = product
        self._outputs = outputs
        self._handle = handle(product)

    @property
    def nbytes(self) -> int:
        """Bytes of a weight that was rounded."""
        product: Any = self.product
        return int(product.nbytes)

    def __call__(self, x: Any) -> Any:
        """The product for every row of x, a symbol; or of a tensor, where nothing is recorded."""
        if isinstance(x, Tensor):
            return self.product(x)
        kind = Kind((*x.kind.shape[:-1], self._outputs), x.kind.dtype)
        plain = self.product if isinstance(self.product, linear.Linear) else None
        if plain is None:
            return x.recorder.add(
                "opaque", [x], [kind], weights=[self._handle], constants=[self._outputs], product=self.product
            )[0]
        weights = [plain.weight_OI] + ([] if plain.bias_O is None else [plain.bias_O])
        return x.recorder.add("linear", [x], [kind], weights=weights, product=self.product)[0]


def embedding(ids: Symbol, table_VD: Tensor) -> Symbol:
    """Rows of the table."""
    kind = Kind((*ids.kind.shape, table_VD.shape[1]), table_VD.dtype)
    return ids.recorder.add("embedding", [ids], [kind], weights=[table_VD])[0]


def rms_norm(x: Symbol, weight_D: Tensor, eps: float) -> Symbol:
    """Root mean square norm of the last axis."""
    return x.recorder.add("rms_norm", [x], [x.kind], weights=[weight_D], constants=[eps])[0]


def add_rms_norm(x: Symbol, residual: Symbol, weight_D: Tensor, eps: float) -> tuple[Symbol, Symbol]:
    """The norm of the sum, and the sum."""
    normed, total = x.recorder.add("add_rms_norm", [x, residual], [x.kind, x.kind], weights=[weight_D], constants=[eps])
    return normed, total


def split_heads(x: Symbol, counts: Sequence[int], head_dim: int) -> tuple[Symbol, ...]:
    """So many heads each."""
    kinds = [Kind((x.kind.shape[0], count, head_dim), x.kind.dtype) for count in counts]
    return x.recorder.add("split_heads", [x], kinds, constants=[tuple(counts), head_dim])


def qk_norm(qk: Symbol, q_norm_A: Tensor, k_norm_A: Tensor, heads: int, eps: float) -> Symbol:
    """Every head normed."""
    return qk.recorder.add("qk_norm", [qk], [qk.kind], weights=[q_norm_A, k_norm_A], constants=[heads, eps])[0]


def rope_cos_sin(positions: Symbol, inv_freq_E: Tensor, scale: float, dtype: torch.dtype) -> tuple[Symbol, Symbol]:
    """cos and sin of the step's positions."""
    return _angles("rope_cos_sin", positions, inv_freq_E, scale, dtype)


def rope_axes_cos_sin(
    positions: Symbol, inv_freq_3E: Tensor, scale: float, dtype: torch.dtype
) -> tuple[Symbol, Symbol]:
    """The same of positions on three axes."""
    return _angles("rope_axes_cos_sin", positions, inv_freq_3E, scale, dtype)


def _angles(op: str, positions: Symbol, inv_freq: Tensor, scale: float, dtype: torch.dtype) -> tuple[Symbol, Symbol]:
    kind = Kind((None, inv_freq.shape[-1]), dtype)
    cos, sin = positions.recorder.add(op, [positions], [kind, kind], weights=[inv_freq], constants=[scale, dtype])
    return cos, sin


def silu_mul(gate_up: Symbol) -> Symbol:
    """silu(gate) * up."""
    kind = Kind((*gate_up.kind.shape[:-1], gate_up.width // 2), gate_up.kind.dtype)
    return gate_up.recorder.add("silu_mul", [gate_up], [kind])[0]


def largest(x: Symbol) -> Symbol:
    """The place of each row's largest, and its value."""
    return x.recorder.add("largest", [x], [Kind((x.kind.shape[0], 2), torch.float32)])[0]


def attend(how: Attention, qk: Symbol, v: Symbol, cos: Symbol, sin: Symbol) -> Symbol:
    """A barrier."""
    kind = Kind((None, how.heads * v.width), v.kind.dtype)
    return qk.recorder.add("attend", [qk, v, cos, sin], [kind], constants=[how])[0]


def _media(op: str, x: Symbol, media: None, part: int) -> Symbol:
    """A barrier."""
    del media  # the step brings it
    return x.recorder.add(op, [x], [x.kind], constants=[part])[0]


def record(mathematics: Callable[[Step[Symbol]], Symbol]) -> Program:
    """The program of a forward pass."""
    recorder = Recorder()
    ids = recorder.new(Kind((None,), torch.int64))
    positions = recorder.new(Kind((None,), torch.int64))
    axes = recorder.new(Kind((3, None), torch.int64))
    return recorder.finish(mathematics(Step(ids, positions, axes, None, attend)))


def _prepare(
    prepare: Callable[[Tensor | Blocks, Tensor | None], Product[Tensor]],
    weight_OI: Tensor | Blocks,
    bias_O: Tensor | None,
) -> Linear:
    return Linear(prepare(weight_OI, bias_O), weight_OI.shape[0])


class _Pass:
    """The base's pass around pieces. See kernels.ops.Pass."""

    def __init__(
        self,
        base: Ops[Tensor],
        hooks: Hooks,
        compiler: Make | None,
        passes: Sequence[Pass],
        mathematics: Callable[[Step[Symbol]], Symbol],
    ) -> None:
        program = record(mathematics)
        variants: list[tuple[range, Parts]] = []
        for tokens in ranges(passes, MOST_TOKENS):
            parts = split(apply(passes, program, tokens))
            variants.append((tokens, tuple(ready(part, base, hooks, compiler) for part in parts)))
        beyond = range(MOST_TOKENS + 1, sys.maxsize)
        plain = split(apply(passes, program, beyond))
        variants.append((beyond, tuple(ready(part, base, Hooks(), None) for part in plain)))
        self.listing = "\n".join(_listing(tokens, parts) for tokens, parts in variants[:-1])
        self._inner = base.compile(Runner(variants, program.output, base, hooks))

    def warm(self, limits: Limits | None) -> Warmed:
        """See kernels.ops.Pass. Pieces are compiled before."""
        return self._inner.warm(limits)

    def __call__(self, given: StepTensors) -> Tensor:
        """What the mathematics gives for the tokens of a step."""
        return self._inner(given)


def ready(part: Piece | Barrier, base: Ops[Tensor], hooks: Hooks, compiler: Make | None) -> Ready | Barrier:
    """What runs a part."""
    if isinstance(part, Barrier):
        return part
    compiled = None if compiler is None else compiler(part)
    run = uncompiled(part, base) if compiled is None else _given_whole(compiled, len(part.inputs))
    return Ready(hooks.wrap_piece(part, run), part)


def _given_whole(compiled: Call, inputs: int) -> Call:
    """Compiled code takes inputs without gaps: positions of text on three axes are one row, seen three times.

    Within what is wrapped, so that a graph that records it copies too.
    """

    def run(*arguments: Tensor) -> Sequence[Tensor]:
        return compiled(*[x.contiguous() for x in arguments[:inputs]], *arguments[inputs:])

    return run


def _listing(tokens: range, parts: Parts) -> str:
    """What each part does, to read."""
    said = (
        f"{part.node.op}\n" if isinstance(part, Barrier) else f"piece {part.piece.key}\n{part.piece.text}"
        for part in parts
    )
    return "\n".join((f"{tokens.start} to {tokens.stop - 1} tokens\n", *said))


def _compile_rows(base: Ops[Tensor], mathematics: Callable[[Symbol], Symbol], width: int) -> Callable[[Tensor], Tensor]:
    """One piece, by the base's ops: of a product and what is chosen of it a compiler makes nothing better."""
    recorder = Recorder()
    x = recorder.new(Kind((None, width), torch.float32))  # whatever its type: nothing is compiled for it
    parts = split(recorder.finish(mathematics(x)))
    if len(parts) != 1 or isinstance(parts[0], Barrier):
        raise ValueError("only one piece is served as mathematics of rows")
    call = uncompiled(parts[0], base)
    return base.compile_rows(lambda x_XI: call(x_XI)[0], width)
