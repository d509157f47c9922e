"""Qwen3: queries and keys are normed per head before they are turned."""

from __future__ import annotations

from services.worker.models.config import ConfigKeys, ModelConfig, read_decoder, read_layer_windows


def read_config(keys: ConfigKeys) -> ModelConfig:
    """Qwen3ForCausalLM."""
    attention_bias = keys.flag("attention_bias", False)
    return read_decoder(
        keys,
        head_dim=128,
        windows=read_layer_windows(keys),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
    )
