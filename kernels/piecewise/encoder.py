"""An encoder of media as pieces: attention of its frames runs between them, and what changes the number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernels.media import encoder
from kernels.media.encoder import EAGER, EncoderOps, Mathematics, Patches, Sizes
from kernels.ops import Ops
from kernels.piecewise.ops import Make, ready, split_heads
from kernels.piecewise.pieces import split
from kernels.piecewise.program import Kind, Node, Program, Recorder, Symbol
from kernels.piecewise.running import Hooks, run_parts

Tensor = torch.Tensor


def _add(x: Symbol, y: Symbol) -> Symbol:
    return x.recorder.add("add", [x, y], [x.kind])[0]


def _layer_norm(x: Symbol, weight_C: Tensor, bias_C: Tensor, eps: float) -> Symbol:
    return x.recorder.add("layer_norm", [x], [x.kind], weights=[weight_C, bias_C], constants=[eps])[0]


def _gelu(x: Symbol, approximate: str) -> Symbol:
    return x.recorder.add("gelu", [x], [x.kind], constants=[approximate])[0]


def _rope(x: Symbol, cos: Symbol, sin: Symbol) -> Symbol:
    return x.recorder.add("rope", [x, cos, sin], [x.kind])[0]


def _join(x: Symbol, count: int) -> Symbol:
    return x.recorder.add("join", [x], [Kind((None, count * x.width), x.kind.dtype)], constants=[count])[0]


def _stack(parts: Sequence[Symbol]) -> Symbol:
    kind = Kind((None, len(parts), parts[0].width), parts[0].kind.dtype)
    return parts[0].recorder.add("stack", parts, [kind])[0]


def _attend(qk: Symbol, v: Symbol) -> Symbol:
    heads = v.kind.shape[1]
    assert heads is not None
    return qk.recorder.add("attend_frames", [qk, v], [Kind((None, heads * v.width), v.kind.dtype)])[0]


_SYMBOLS: EncoderOps[Symbol] = EncoderOps(
    _add, _layer_norm, _gelu, split_heads, _rope, _join, _stack, lambda function, x, most: function(x)
)


def record(mathematics: Mathematics[Symbol], sizes: Sizes) -> Program:
    """The program of a pass."""
    recorder = Recorder()
    x, positions = (recorder.new(Kind((None, sizes.hidden), sizes.dtype)) for _ in range(2))
    cos, sin = (recorder.new(Kind((None, sizes.pairs), sizes.dtype)) for _ in range(2))
    return recorder.finish(mathematics(_SYMBOLS, Patches(x, positions, cos, sin, _attend)))


class EncoderPass:
    """The mathematics as compiled pieces; of too many patches as it stands."""

    def __init__(self, base: Ops[Tensor], compiler: Make | None, mathematics: Mathematics[Any], sizes: Sizes) -> None:
        program = record(mathematics, sizes)
        self._parts = tuple(ready(part, base, Hooks(), compiler) for part in split(program))
        self._output = program.output
        self._mathematics = mathematics
        self._most = sizes.most

    def __call__(self, patches: Patches[Tensor]) -> Tensor:
        """What the mathematics gives for some frames."""
        if len(patches.x_NC) > self._most:
            made: Tensor = self._mathematics(EAGER, patches)
            return made

        def between(node: Node, inputs: list[Tensor]) -> Tensor:
            if node.op == "attend_frames":
                return patches.attend(*inputs)
            return encoder.stack(inputs) if node.op == "stack" else encoder.join(inputs[0], node.constants[0])

        given = (patches.x_NC, patches.positions_NC, patches.cos_NE, patches.sin_NE)
        return run_parts(self._parts, dict(enumerate(given)), between)[self._output]
