"""Qwen2: biases on query, key and value; some layers may see a sliding window."""

from __future__ import annotations

from services.worker.models.config import ConfigKeys, ModelConfig, read_decoder, read_layer_windows


def read_config(keys: ConfigKeys) -> ModelConfig:
    """Qwen2ForCausalLM."""
    return read_decoder(keys, windows=read_layer_windows(keys), qkv_bias=True)
