"""Llama: biases where its config asks for them."""

from __future__ import annotations

from services.worker.models.config import ConfigKeys, ModelConfig, read_decoder


def read_config(keys: ConfigKeys) -> ModelConfig:
    """LlamaForCausalLM."""
    attention_bias = keys.flag("attention_bias", False)
    return read_decoder(
        keys, qkv_bias=attention_bias, output_bias=attention_bias, mlp_bias=keys.flag("mlp_bias", False)
    )
