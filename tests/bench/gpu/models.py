"""Models of known shapes with random weights, made on the device."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from kernels.ops import Linear, Ops
from services.worker.layers import Layer, Weights
from services.worker.models.config import ModelConfig
from services.worker.models.decoder import Decoder
from services.worker.models.registry import read_config

CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
    },
}
_TOY = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def config_of(name: str, *, toy: bool) -> ModelConfig:
    """The shape of this name, or a toy of its family."""
    return read_config({**CONFIGS[name], **(_TOY if toy else {})})


class Maker:
    """Random weights, prepared by the ops that will multiply with them."""

    def __init__(self, config: ModelConfig, ops: Ops[Any], dtype: torch.dtype, device: torch.device) -> None:
        self._config = config
        self._ops = ops
        self._dtype = dtype
        self._device = device
        self._memory: Counter[str] = Counter()

    def model(self) -> Decoder:
        """The model."""
        config = self._config
        layers = tuple(self._layer() for _ in range(config.num_layers))
        table = self._matrix(config.vocab_size, config.hidden_size)
        head = self._linear(table if config.tie_word_embeddings else None, config.vocab_size, config.hidden_size)
        embedding = self._ops.prepare_embedding(table, head if config.tie_word_embeddings else None)
        norm = self._norm(config.hidden_size)
        weights = Weights(embedding, layers, norm, head, dict(self._memory), self._dtype, self._device)
        return Decoder(config, weights, self._ops)

    def _layer(self) -> Layer:
        config, size = self._config, self._config.head_dim
        hidden, inner, wide = config.hidden_size, config.intermediate_size, config.num_heads * size
        return Layer(
            attention_norm_D=self._norm(hidden),
            qkv=self._linear(None, wide + 2 * config.kv_width, hidden),
            q_norm_A=self._norm(size) if config.qk_norm else None,
            k_norm_A=self._norm(size) if config.qk_norm else None,
            output=self._linear(None, hidden, wide),
            mlp_norm_D=self._norm(hidden),
            gate_up=self._linear(None, 2 * inner, hidden),
            down=self._linear(None, hidden, inner),
        )

    def _matrix(self, outputs: int, inputs: int) -> torch.Tensor:
        matrix = torch.empty(outputs, inputs, dtype=self._dtype, device=self._device)
        return matrix.normal_(0.0, inputs**-0.5)

    def _norm(self, size: int) -> torch.Tensor:
        return torch.ones(size, dtype=self._dtype, device=self._device)

    def _linear(self, weight: torch.Tensor | None, outputs: int, inputs: int) -> Linear[Any]:
        """Counted as it is kept: what is read of it in every step."""
        weight = self._matrix(outputs, inputs) if weight is None else weight
        product: Any = self._ops.prepare_linear(weight, None)
        self._memory["products"] += getattr(product, "nbytes", weight.nbytes)
        return product
