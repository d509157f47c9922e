"""Weights from a checkpoint into a decoder: names, shapes, fusing. Knows no mathematics.

A source gives tensors by their Hugging Face names: a folder of safetensors here, a GGUF file in gguf_file.
"""

from __future__ import annotations

import json
from collections.abc import Set
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from kernels.dispatch import Linear, Ops
from services.common.errors import InvalidArgument, NotFound
from services.worker.layers import Layer, Weights
from services.worker.models.config import ModelConfig


class TensorSource(Protocol):
    """Tensors by name."""

    def names(self) -> Set[str]:
        """All of them."""

    def get(self, name: str) -> torch.Tensor:
        """One of them, in whatever floating type it is stored."""


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
    config: ModelConfig, source: TensorSource, ops: Ops, dtype: torch.dtype, device: torch.device
) -> Weights:
    """All weights. Raises InvalidArgument that names a tensor that is missing, too many, or of another shape."""
    reader = _Reader(source, ops, dtype, device)
    hidden = config.hidden_size
    embedding_VD = reader.tensor("model.embed_tokens.weight", config.vocab_size, hidden)
    layers = tuple(_load_layer(reader, config, f"model.layers.{index}.") for index in range(config.num_layers))
    final_norm_D = reader.tensor("model.norm.weight", hidden)
    if config.tie_word_embeddings:
        reader.allow("lm_head.weight")  # some checkpoints store the tied table twice
        head = reader.prepare(embedding_VD, None)
    else:
        head = reader.linear(["lm_head"], [config.vocab_size], hidden, bias=False)
    reader.check_all_used()
    return Weights(embedding_VD, layers, final_norm_D, head, reader.nbytes)


def _load_layer(reader: _Reader, config: ModelConfig, prefix: str) -> Layer:
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


class _Reader:
    """Takes tensors from a source, and knows in the end which were not taken."""

    def __init__(self, source: TensorSource, ops: Ops, dtype: torch.dtype, device: torch.device) -> None:
        self.nbytes = 0
        self._source = source
        self._ops = ops
        self._dtype = dtype
        self._device = device
        self._unused = set(source.names())

    def tensor(self, name: str, *shape: int) -> torch.Tensor:
        """One tensor of the shape that the config implies."""
        tensor = self._take(name, *shape).to(device=self._device, dtype=self._dtype, copy=True)
        self.nbytes += tensor.nbytes
        return tensor

    def linear(self, names: list[str], widths: list[int], inputs: int, *, bias: bool) -> Linear:
        """Products of one input, side by side as one."""
        weight = self._fuse(
            [self._take(f"{name}.weight", width, inputs) for name, width in zip(names, widths, strict=True)]
        )
        if not bias:
            return self.prepare(weight, None)
        return self.prepare(
            weight, self._fuse([self._take(f"{name}.bias", width) for name, width in zip(names, widths, strict=True)])
        )

    def prepare(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None) -> Linear:
        """Hands a weight to the op that will multiply with it, and counts it."""
        self.nbytes += weight_OI.nbytes + (0 if bias_O is None else bias_O.nbytes)
        return self._ops.prepare_linear(weight_OI, bias_O)

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

    def _fuse(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.to(device=self._device, dtype=self._dtype) for part in parts])

    def _take(self, name: str, *shape: int) -> torch.Tensor:
        if name not in self._source.names():
            raise InvalidArgument(f"the checkpoint lacks the tensor {name}", field="model")
        self._unused.discard(name)
        tensor = self._source.get(name)
        if tensor.shape != shape:
            raise InvalidArgument(
                f"tensor {name} has the shape {list(tensor.shape)}, its config asks for {list(shape)}", field="model"
            )
        if not tensor.is_floating_point():
            raise InvalidArgument(f"tensor {name} is {tensor.dtype}: only floating types are served", field="model")
        return tensor
