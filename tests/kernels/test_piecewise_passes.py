"""What is changed in a program before it is split: rows are quantized outside of products, and with what makes them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.dispatch import choose_ops
from kernels.linear.blocks import Blocks
from kernels.ops import Ops
from kernels.piecewise.lowering import as_function
from kernels.piecewise.ops import piecewise_ops, record
from kernels.piecewise.passes import PASSES, Pass, apply, drop, ranges
from kernels.piecewise.pieces import Barrier, Piece, split
from kernels.piecewise.program import Kind, Program, Recorder
from kernels.piecewise.running import Hooks, Ready, Runner
from kernels.quantized_rows import reference
from kernels.quantized_rows.reference import QuantizedRows
from tests.kernels.test_piecewise import LAYERS, given, small_model


class RowsLinear:
    """kernels.linear.quantized.RowsLinear in plain torch."""

    def __init__(self, kind: reference.Kind, weight_OI: torch.Tensor | Blocks, bias_O: torch.Tensor | None) -> None:
        assert isinstance(weight_OI, torch.Tensor)
        self.rows = kind
        self._weight = reference.quantize_rows(weight_OI, kind)
        self._bias_O = bias_O

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        return self.multiply(reference.quantize_rows(x_TI, self.rows), x_TI.dtype)

    def multiply(self, x: QuantizedRows, dtype: torch.dtype) -> torch.Tensor:
        y_TO = x.dequantize() @ self._weight.dequantize().T
        return (y_TO if self._bias_O is None else y_TO + self._bias_O).to(dtype)


def quantized(kind: reference.Kind) -> Ops[torch.Tensor]:
    return replace(choose_ops("reference"), prepare_linear=lambda weight, bias: RowsLinear(kind, weight, bias))


def pieces(program: Program, passes: tuple[Pass, ...]) -> list[Piece]:
    return [part for part in split(apply(passes, program, range(1, 9))) if isinstance(part, Piece)]


def ops_of(piece: Piece) -> list[str]:
    return [node.op for node in piece.nodes]


def test_rows_are_quantized_with_what_makes_them() -> None:
    base = quantized("int8")
    first, middle, *_, last = pieces(record(small_model(piecewise_ops(base))), PASSES)
    assert ops_of(first) == ["rope_cos_sin", "embedding", "rms_norm_rows", "multiply", "split_heads", "qk_norm"]
    layer = ["quantize_rows", "multiply", "add_rms_norm_rows", "multiply", "silu_mul_rows", "multiply"]
    assert ops_of(middle) == [*layer, "add_rms_norm_rows", "multiply", "split_heads", "qk_norm"]
    assert ops_of(last) == [*layer, "add_rms_norm_rows", "multiply", "largest"]
    assert "v0, v1 = quantize_rows(a0, 'int8')\n" in last.text
    assert "v2 = multiply(v0, v1, int64 [], 24, torch.float32)\n" in last.text
    assert "v3, v4, v5 = add_rms_norm_rows(v2, a1, float32 [24], 1e-05, 'int8')\n" in last.text


@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_rows_quantized_outside_of_products_give_the_same_products(kind: reference.Kind) -> None:
    base = quantized(kind)
    program = record(small_model(piecewise_ops(base)))

    def pass_of(passes: tuple[Pass, ...]) -> Any:
        parts = split(apply(passes, program, range(1, 9)))
        ready = [part if isinstance(part, Barrier) else Ready(as_function(part), part) for part in parts]
        return base.compile(Runner([(range(1, 9), tuple(ready))], program.output, base, Hooks()))

    expected = base.compile(small_model(base))(given(7))
    assert torch.equal(pass_of(())(given(7)), expected)
    assert torch.equal(pass_of(PASSES)(given(7)), expected)


def test_a_norm_that_something_else_reads_stays_as_it_is() -> None:
    recorder = Recorder()
    x = recorder.new(Kind((None, 8), torch.float32))
    (normed,) = recorder.add("rms_norm", [x], [x.kind], weights=[torch.ones(8)], constants=[1e-5])
    product = RowsLinear("int8", torch.ones(8, 8), None)
    for _ in range(2):
        (y,) = recorder.add("opaque", [normed], [x.kind], constants=[8], product=product)
    (gated,) = recorder.add("silu_mul", [y], [Kind((None, 4), torch.float32)])
    for output, expected in ((gated, ["rms_norm_rows", "multiply", "silu_mul"]), (normed, ["rms_norm"])):
        assert [node.op for node in apply(PASSES, recorder.finish(output), range(1, 2)).nodes] == expected
    both = replace(recorder.finish(normed), output=normed.value)
    assert [node.op for node in apply(PASSES[:-1], both, range(1, 2)).nodes][:2] == ["rms_norm", "quantize_rows"]


def test_a_pass_may_decline_numbers_of_tokens() -> None:
    declines = Pass("none", lambda program: replace(program, nodes=()), (range(1, 17), range(100, 200)))
    assert ranges((declines,), 150) == (range(1, 17), range(17, 100), range(100, 151))
    assert ranges((), 150) == (range(1, 151),)
    program = record(small_model(piecewise_ops(choose_ops("reference"))))
    counts = [len(apply((declines,), program, tokens).nodes) for tokens in ranges((declines,), 150)]
    assert counts == [len(program.nodes), 0, len(program.nodes)]


def test_a_step_takes_the_program_of_its_tokens() -> None:
    base = choose_ops("reference")
    taken: list[str] = []

    def noted(name: str) -> Pass:
        def run(program: Program) -> Program:
            taken.append(name)
            return program

        return Pass(name, run, (range(1, 5),))

    ops = piecewise_ops(base, passes=(noted("more"), Pass("drop", drop)))
    made = ops.compile(small_model(ops))
    assert taken == ["more", "more"]  # from 5 tokens on, and for steps that are larger than what is compiled
    assert "1 to 4 tokens" in made.listing
    assert "5 to 16384 tokens" in made.listing
    assert made.listing.count("attend") == 2 * LAYERS
    for tokens in (4, 5):
        assert torch.equal(made(given(tokens)), base.compile(small_model(base))(given(tokens)))
