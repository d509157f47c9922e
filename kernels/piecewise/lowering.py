"""A piece into compiled code: traced by the references of its ops, compiled by Inductor for any number of tokens.

References are plain torch, which is what Inductor fuses; hand-written kernels would be walls to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext, StrictMinMaxConstraint
from torch.utils._sympy.value_ranges import ValueRanges

from kernels import eager
from kernels.embedding import reference as embedding
from kernels.media import encoder
from kernels.media import reference as media
from kernels.piecewise import opaque
from kernels.piecewise.pieces import Piece
from kernels.piecewise.program import Kind
from kernels.piecewise.running import MOST_TOKENS, flat
from kernels.quantized_rows import reference as quantized_rows
from kernels.rms_norm import reference as rms_norm
from kernels.rope import reference as rope
from kernels.silu_mul import reference as silu_mul

Tensor = torch.Tensor
Compiled = Callable[..., Any]

_HINT = 64
"""Tokens for which loops are cut into threads' shares: some more than one, since most steps have a few rows."""
OPTIONS: Mapping[str, Any] = {
    "cpp_cache_precompile_headers": False,  # asks the C++ compiler at every load
    "emulate_precision_casts": True,  # what an op rounds stays rounded where ops are fused, as in the table of tensors
    "cpp.vec_isa_ok": True,  # else a process is started at every load to see whether vector code runs
}
"""What Inductor is told beside its defaults."""


def compile_piece(
    piece: Piece, device: torch.device, target: Path, libraries: Path, options: Mapping[str, Any]
) -> Compiled:
    """Compiles a piece, writes it to a file and its libraries into a folder. Raises whatever the compiler raises."""
    from torch._inductor import standalone_compile  # seconds that nobody else need wait
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir

    graph, arguments = trace(piece, device)
    with torch.no_grad(), temporary_cache_dir(str(libraries)):
        made = standalone_compile(graph, arguments, options={"config_patches": dict(options)})
        made.save(path=str(target), format="binary")
    return made


def load_piece(source: Path, libraries: Path, options: Mapping[str, Any]) -> Compiled:
    """What `compile_piece` wrote, ready to be called with the piece's arguments. Nothing is compiled or traced."""
    from torch._inductor import config
    from torch._inductor.runtime.cache_dir_utils import temporary_cache_dir
    from torch._inductor.standalone_compile import CompiledArtifact

    with config.patch(dict(options)), temporary_cache_dir(str(libraries)):
        return CompiledArtifact.load(path=str(source), format="binary")


def trace(piece: Piece, device: torch.device) -> tuple[GraphModule, list[Any]]:
    """The piece as a graph of torch's ops, and arguments like those it will be given, without memory."""
    arguments = _arguments(piece, device)
    with torch.no_grad():
        return make_fx(as_function(piece))(*arguments), arguments


def as_function(piece: Piece) -> Callable[..., tuple[Tensor, ...]]:
    """The piece by the references of its ops."""

    def run(*arguments: Tensor) -> tuple[Tensor, ...]:
        values = dict(zip(piece.inputs, arguments, strict=False))
        weights = iter(arguments[len(piece.inputs) :])
        for node in piece.nodes:
            inputs = [values[value] for value in node.inputs]
            made = REFERENCES[node.op](*inputs, *[next(weights) for _ in node.weights], *node.constants)
            values.update(zip(node.outputs, flat(made), strict=True))
        return tuple(values[value] for value in piece.outputs)

    return run


def _arguments(piece: Piece, device: torch.device) -> list[Any]:
    """Tensors without memory, whose number of tokens is a symbol."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context: Any = StatelessSymbolicContext(
        dynamic_sizes=[DimDynamic.DYNAMIC],
        constraint_sizes=[StrictMinMaxConstraint(warn_only=False, vr=ValueRanges(2, MOST_TOKENS))],
    )
    tokens = mode.from_tensor(torch.empty(_HINT, device=device), symbolic_context=context).shape[0]

    def like(kind: Kind) -> Tensor:
        return torch.empty([tokens if size is None else size for size in kind.shape], dtype=kind.dtype, device=device)

    with mode:
        inputs = [like(kind) for kind in piece.kinds]
        return inputs + [
            torch.empty_strided(weight.shape, weight.stride(), dtype=weight.dtype, device=weight.device)
            for weight in piece.weights
        ]


def _largest(x_TV: Tensor) -> Tensor:
    """See kernels.largest.reference.pairs, which waits for the device."""
    x_TV = x_TV.float()
    at_T1 = x_TV.argmax(-1, keepdim=True)
    return torch.cat((at_T1.int().view(torch.float32), x_TV.gather(-1, at_T1)), dim=1)


REFERENCES: dict[str, Callable[..., Any]] = {
    "embedding": embedding.embedding,
    "linear": F.linear,
    "opaque": opaque.product,
    "rms_norm": rms_norm.rms_norm,
    "add_rms_norm": rms_norm.add_rms_norm,
    "qk_norm": rms_norm.qk_norm,
    "split_heads": eager.split_heads,
    "rope_cos_sin": rope.rope_cos_sin,
    "rope_axes_cos_sin": media.rope_axes_cos_sin,
    "silu_mul": silu_mul.silu_mul,
    "largest": _largest,
    "multiply": opaque.product_of_rows,
    "quantize_rows": quantized_rows.quantize_rows,
    "rms_norm_rows": quantized_rows.rms_norm,
    "add_rms_norm_rows": quantized_rows.add_rms_norm,
    "silu_mul_rows": quantized_rows.silu_mul,
    "add": torch.add,
    "layer_norm": encoder.layer_norm,
    "gelu": encoder.gelu,
    "rope": rope.rope,
}
"""What each op of a node is: (inputs, then weights, then constants) -> its outputs."""
