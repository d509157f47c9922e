"""The checkpoint of a model that sees: which of its tensors are the decoder's, and the encoder's by name."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import torch

from kernels.linear.blocks import Blocks
from kernels.ops import Ops
from services.worker.layers import LayerNorm, Merger, VisionBlock, VisionWeights
from services.worker.models.config import VisionConfig
from services.worker.weights import Precision, Reader, TensorSource

_VISION, _TEXT = "model.visual.", "model.language_model."


class _Renamed:
    """Some tensors of a source under other names. See services.worker.weights.TensorSource."""

    def __init__(self, source: TensorSource, names: Mapping[str, str]) -> None:
        self._source = source
        self._names = names

    def names(self) -> Set[str]:
        return self._names.keys()

    def get(self, name: str) -> torch.Tensor:
        return self._source.get(self._names[name])

    def blocks(self, name: str) -> Blocks | None:
        return self._source.blocks(self._names[name])


def text_of(source: TensorSource) -> TensorSource:
    """All but the encoder's, under the names of a model that is text alone."""
    names = [name for name in source.names() if not name.startswith(_VISION)]
    return _Renamed(source, {name.replace(_TEXT, "model.", 1): name for name in names})


def load_vision(
    config: VisionConfig, source: TensorSource, ops: Ops[Any], precision: Precision, device: torch.device
) -> VisionWeights:
    """The encoder's weights; none of them is quantized.

    Raises InvalidArgument that names a tensor that is missing, too many, or of another shape.
    """
    own = {name: name for name in source.names() if name.startswith(_VISION)}
    reader = Reader(_Renamed(source, own), replace(ops, prepare_linear=ops.prepare_product), precision, device)
    hidden, merged = config.hidden_size, config.hidden_size * config.merged
    patch_shape = (hidden, config.channels, config.frames, config.patch, config.patch)
    patch = ops.prepare_product(
        reader.tensor(f"{_VISION}patch_embed.proj.weight", *patch_shape).flatten(1),
        reader.tensor(f"{_VISION}patch_embed.proj.bias", hidden),
    )
    table_SSC = reader.tensor(f"{_VISION}pos_embed.weight", config.grid**2, hidden).view(config.grid, config.grid, -1)
    blocks = tuple(_block(reader, config, f"{_VISION}blocks.{index}.") for index in range(config.depth))
    merger = _merger(reader, config, f"{_VISION}merger.", hidden)
    deepstack = tuple(
        _merger(reader, config, f"{_VISION}deepstack_merger_list.{index}.", merged)
        for index in range(len(config.deepstack))
    )
    reader.check_all_used()
    return VisionWeights(patch, table_SSC, blocks, merger, deepstack, dict(reader.memory), precision.compute, device)


def _block(reader: Reader, config: VisionConfig, prefix: str) -> VisionBlock:
    hidden, inner = config.hidden_size, config.intermediate_size
    return VisionBlock(
        attention_norm=_norm(reader, f"{prefix}norm1", hidden),
        qkv=reader.linear([f"{prefix}attn.qkv"], [3 * hidden], hidden, bias=True),
        output=reader.linear([f"{prefix}attn.proj"], [hidden], hidden, bias=True),
        mlp_norm=_norm(reader, f"{prefix}norm2", hidden),
        up=reader.linear([f"{prefix}mlp.linear_fc1"], [inner], hidden, bias=True),
        down=reader.linear([f"{prefix}mlp.linear_fc2"], [hidden], inner, bias=True),
    )


def _merger(reader: Reader, config: VisionConfig, prefix: str, normed: int) -> Merger:
    joined = config.hidden_size * config.merged
    return Merger(
        norm=_norm(reader, f"{prefix}norm", normed),
        up=reader.linear([f"{prefix}linear_fc1"], [joined], joined, bias=True),
        down=reader.linear([f"{prefix}linear_fc2"], [config.output_size], joined, bias=True),
    )


def _norm(reader: Reader, name: str, size: int) -> LayerNorm:
    return LayerNorm(reader.tensor(f"{name}.weight", size), reader.tensor(f"{name}.bias", size))
