"""Mistral: every layer sees a sliding window, where one is set."""

from __future__ import annotations

from services.worker.models.config import ConfigKeys, ModelConfig, read_decoder


def read_config(keys: ConfigKeys) -> ModelConfig:
    """MistralForCausalLM. A checkpoint that does not name the window at all has the family's first one."""
    window: int | None = 4096 if keys.lacks("sliding_window") else None
    if keys.has("sliding_window"):
        window = keys.integer("sliding_window")
    return read_decoder(keys, windows=(window,) * keys.integer("num_hidden_layers"))
