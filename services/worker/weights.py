"""Weights from a checkpoint into a decoder: names, shapes, types, fusing. Knows no mathematics.

A source gives tensors by their Hugging Face names: a folder of safetensors here, a GGUF file in gguf_file.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from kernels.linear.blocks import GROUP, Blocks
from kernels.ops import Linear, Ops
from services.common.errors import InvalidArgument, NotFound
from services.common.logs import Log
from services.worker.layers import Layer, Weights
from services.worker.models.config import ModelConfig
from services.worker.upload import Upload

_KEPT = (torch.float32, torch.float16, torch.bfloat16)
"""Types that matrices may keep; another becomes float32."""
_log = Log("worker.weights")


@dataclass(slots=True, frozen=True)
class Precision:
    """In which types weights are kept."""

    compute: torch.dtype  # norms, biases, and everything that a step computes
    stored: torch.dtype | None  # matrices; None: as the file has them, quantized ones too
    bits: int | None = None  # matrices are rounded to so many, those that are not quantized yet
    unpacked: bool = False  # the ops multiply with `compute` alone: what is quantized is turned into it
    rounded: str | None = None  # the ops themselves round matrices of floats to this kind as they are prepared
    packed: bool = False  # what the file has quantized stays so beside floats of the type `stored`, but for tables


class TensorSource(Protocol):
    """Tensors by name."""

    def names(self) -> Set[str]:
        """All of them."""

    def get(self, name: str) -> torch.Tensor:
        """One of them, in whatever floating type it is stored."""

    def blocks(self, name: str) -> Blocks | None:
        """A matrix that is stored quantized; None where it is not, or where blocks cannot hold it."""


class SafetensorsFolder:
    """model.safetensors, or the shards that model.safetensors.index.json names; mapped, not read."""

    def __init__(self, folder: Path) -> None:
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        self._files: dict[str, Any] = {}
        if single.is_file():
            self._open(single)
        elif index.is_file():
            for shard in sorted(set(_weight_map(index).values())):
                self._open(folder / shard)
            for name, shard in _weight_map(index).items():
                if name not in self._files:
                    raise InvalidArgument(
                        f"{folder / shard} lacks the tensor {name} that its index names", field="model"
                    )
        else:
            raise NotFound(f"{folder} has neither model.safetensors nor model.safetensors.index.json", field="model")

    def names(self) -> Set[str]:
        """All names."""
        return self._files.keys()

    def get(self, name: str) -> torch.Tensor:
        """One tensor."""
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def blocks(self, name: str) -> Blocks | None:
        """None is quantized here."""

    def _open(self, path: Path) -> None:
        try:
            file: Any = safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise InvalidArgument(f"{path} cannot be read: {error}", field="model") from error
        self._files.update(dict.fromkeys(file.keys(), file))


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise InvalidArgument(f"{index} is not an index of safetensors files", field="model") from error
    return dict(weight_map)


def load_weights(
    config: ModelConfig,
    source: TensorSource,
    ops: Ops[Any],
    precision: Precision,
    device: torch.device,
    *,
    threads: int = 1,
) -> Weights:
    """All weights, by so many threads: repacking is numpy's work and C's, beside which Python runs.

    Raises InvalidArgument that names a tensor that is missing, too many, or of another shape.
    """
    reader = Reader(source, ops, precision, device)
    prefixes = [f"model.layers.{index}." for index in range(config.num_layers)]
    with ThreadPoolExecutor(threads, "load") as workers:
        ends = workers.submit(_load_ends, reader, config)
        layers = tuple(workers.map(partial(_load_layer, reader, config), prefixes))
        embedding, head = ends.result()
    final_norm_D = reader.tensor("model.norm.weight", config.hidden_size)
    reader.check_all_used()
    reader.report()
    return Weights(embedding, layers, final_norm_D, head, dict(reader.memory), precision.compute, device)


def _load_ends(reader: Reader, config: ModelConfig) -> tuple[Any, Linear[Any]]:
    """The embedding and the head."""
    hidden, vocab = config.hidden_size, config.vocab_size
    table_VD = reader.matrix(["model.embed_tokens"], [vocab], hidden, rounded=config.tie_word_embeddings)
    if not config.tie_word_embeddings:
        embedding = reader.prepare_embedding(table_VD, None)
        del table_VD
        return embedding, reader.linear(["lm_head"], [vocab], hidden, bias=False)
    reader.allow("lm_head.weight")  # some checkpoints store the tied table twice
    head = reader.prepare(table_VD, None)
    return reader.prepare_embedding(table_VD, head), head


def _load_layer(reader: Reader, config: ModelConfig, prefix: str) -> Layer:
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    q_width = config.num_heads * size
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    reader.allow(f"{attention}rotary_emb.inv_freq")  # old checkpoints store what the config says anyway
    qkv = reader.linear(
        [f"{attention}{part}_proj" for part in "qkv"],
        [q_width, config.kv_width, config.kv_width],
        hidden,
        bias=config.qkv_bias,
    )
    return Layer(
        attention_norm_D=reader.tensor(f"{prefix}input_layernorm.weight", hidden),
        qkv=qkv,
        q_norm_A=reader.tensor(f"{attention}q_norm.weight", size) if config.qk_norm else None,
        k_norm_A=reader.tensor(f"{attention}k_norm.weight", size) if config.qk_norm else None,
        output=reader.linear([f"{attention}o_proj"], [hidden], q_width, bias=config.output_bias),
        mlp_norm_D=reader.tensor(f"{prefix}post_attention_layernorm.weight", hidden),
        gate_up=reader.linear([f"{mlp}gate_proj", f"{mlp}up_proj"], [inner, inner], hidden, bias=config.mlp_bias),
        down=reader.linear([f"{mlp}down_proj"], [hidden], inner, bias=config.mlp_bias),
    )


class Reader:
    """Takes tensors from a source, and knows in the end which were not taken and what the others weigh.

    Several threads may read.
    """

    def __init__(self, source: TensorSource, ops: Ops[Any], precision: Precision, device: torch.device) -> None:
        self.memory: Counter[str] = Counter()  # bytes by the type that they are kept in
        self._source = source
        self._ops = ops
        self._precision = precision
        self._device = device
        self._upload = Upload(device)
        self._unused = set(source.names())
        self._not_rounded: list[str] = []
        self._counting = Lock()

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """One tensor of the shape that the config implies."""
        tensor = self._upload(self._take(name, *shape)).to(dtype=self._precision.compute, copy=True)
        self._count(tensor)
        return tensor

    def linear(self, names: list[str], widths: list[int], inputs: int, *, bias: bool) -> Linear[Any]:
        """Products of one input, side by side as one."""
        weight = self.matrix(names, widths, inputs)
        if not bias:
            return self.prepare(weight, None)
        parts = [self._take(f"{name}.bias", width) for name, width in zip(names, widths, strict=True)]
        return self.prepare(weight, torch.cat([self._placed(part, self._precision.compute) for part in parts]))

    def matrix(
        self, names: list[str], widths: list[int], inputs: int, *, rounded: bool = True
    ) -> torch.Tensor | Blocks:
        """Weights of one input under one another, in the type that they are kept in."""
        weight = _fuse(
            [self._part(f"{name}.weight", width, inputs, rounded) for name, width in zip(names, widths, strict=True)]
        )
        if self._precision.unpacked and isinstance(weight, Blocks):
            return weight.dequantize(self._precision.compute)
        return weight

    def prepare(self, weight_OI: torch.Tensor | Blocks, bias_O: torch.Tensor | None) -> Linear[Any]:
        """Hands a weight to the op that will multiply with it, and counts it."""
        product = self._ops.prepare_linear(weight_OI, bias_O)
        if self._precision.rounded is not None and not isinstance(weight_OI, Blocks):
            rounded: Any = product
            self._add(self._precision.rounded, rounded.nbytes)
            return product
        self._count(weight_OI)
        if bias_O is not None:
            self._count(bias_O)
        return product

    def prepare_embedding(self, table_VD: torch.Tensor | Blocks, head: Linear[Any] | None) -> Any:
        """Hands a table to the op that will look up its rows; where that reads a tied head, it is not counted again."""
        if self._precision.packed and isinstance(table_VD, Blocks):
            table_VD = table_VD.dequantize(self._precision.compute)
        if head is None or self._precision.unpacked or self._precision.packed:
            self._count(table_VD)
        return self._ops.prepare_embedding(table_VD, head)

    def allow(self, name: str) -> None:
        """A tensor that may be there and is not needed."""
        self._unused.discard(name)

    def check_all_used(self) -> None:
        """Raises InvalidArgument for tensors that nothing took."""
        if self._unused:
            shown = ", ".join(sorted(self._unused)[:5])
            raise InvalidArgument(
                f"the checkpoint has {len(self._unused)} tensors that its config has no place for: {shown}",
                field="model",
            )

    def report(self) -> None:
        """Says in the log which matrices could not be rounded."""
        if self._not_rounded:
            why = f"their inputs are no multiple of {GROUP}"
            _log.warning("not quantized", tensors=len(self._not_rounded), first=min(self._not_rounded), why=why)

    def _part(self, name: str, outputs: int, inputs: int, rounded: bool) -> torch.Tensor | Blocks:
        """One matrix, in the type that it is kept in unless it is joined with others."""
        precision = self._precision
        if (precision.stored is None or precision.packed) and name in self._source.names():
            blocks = self._source.blocks(name)
            if blocks is not None:
                self._check_shape(name, blocks.shape, (outputs, inputs))
                self._unused.discard(name)
                return self._moved(blocks)
        tensor = self._take(name, outputs, inputs)
        dtype = precision.stored or (tensor.dtype if tensor.dtype in _KEPT else torch.float32)
        rounded = rounded and precision.bits is not None
        if rounded and inputs % GROUP:
            self._not_rounded.append(name)
        if precision.bits is None or not rounded or inputs % GROUP:
            return self._placed(tensor, dtype)
        try:
            return self._moved(Blocks.of(tensor.to(dtype), precision.bits))
        except ValueError as error:
            raise InvalidArgument(f"tensor {name} cannot be quantized: {error}", field="quantize") from error

    def _take(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._source.names():
            raise InvalidArgument(f"the checkpoint lacks the tensor {name}", field="model")
        self._unused.discard(name)
        tensor = self._source.get(name)
        self._check_shape(name, tensor.shape, shape)
        if not tensor.is_floating_point():
            raise InvalidArgument(f"tensor {name} is {tensor.dtype}: only floating types are served", field="model")
        return tensor

    def _check_shape(self, name: str, found: Sequence[int], wanted: Sequence[int]) -> None:
        if tuple(found) != tuple(wanted):
            raise InvalidArgument(
                f"tensor {name} has the shape {list(found)}, its config asks for {list(wanted)}", field="model"
            )

    def _placed(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """On the device; the type that it is stored in goes over the bus, and is changed there."""
        return self._upload(tensor).to(dtype)

    def _moved(self, blocks: Blocks) -> Blocks:
        numbers_OI = self._upload(blocks.numbers_OI)
        if numbers_OI is blocks.numbers_OI:
            return blocks
        minimum_OG = None if blocks.minimum_OG is None else self._upload(blocks.minimum_OG)
        return Blocks(numbers_OI, self._upload(blocks.scale_OG), minimum_OG, blocks.bits)

    def _count(self, weight: torch.Tensor | Blocks) -> None:
        kind = f"int{weight.bits}" if isinstance(weight, Blocks) else str(weight.dtype).removeprefix("torch.")
        self._add(kind, weight.nbytes)

    def _add(self, kind: str, nbytes: int) -> None:
        with self._counting:
            self.memory[kind] += nbytes


def _fuse(parts: list[torch.Tensor | Blocks]) -> torch.Tensor | Blocks:
    """One under the other, in one type that loses nothing worth having: blocks count as float16 beside floats."""
    blocks = [part for part in parts if isinstance(part, Blocks)]
    if len(blocks) == len(parts):
        return Blocks.concat(blocks)
    types = [torch.float16 if isinstance(part, Blocks) else part.dtype for part in parts]
    dtype = reduce(torch.promote_types, types)
    return torch.cat([part.dequantize() if isinstance(part, Blocks) else part for part in parts]).to(dtype)
