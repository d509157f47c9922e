"""Which architectures are served: one file and one line each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from services.worker.models import llama, mistral, qwen2, qwen3, qwen3_vl
from services.worker.models.config import ConfigKeys, ModelConfig

ARCHITECTURES: dict[str, Callable[[ConfigKeys], ModelConfig]] = {
    "LlamaForCausalLM": llama.read_config,
    "MistralForCausalLM": mistral.read_config,
    "Qwen2ForCausalLM": qwen2.read_config,
    "Qwen3ForCausalLM": qwen3.read_config,
    "Qwen3VLForConditionalGeneration": qwen3_vl.read_config,
}


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The config of the architecture that a config.json names. Raises InvalidArgument, naming the key."""
    keys = ConfigKeys(raw)
    names = keys.texts("architectures")
    served = ", ".join(ARCHITECTURES)
    if len(names) != 1:
        raise keys.refuse("architectures", f"must name one architecture, of {served}")
    if names[0] not in ARCHITECTURES:
        raise keys.refuse("architectures", f"is not served; these are: {served}")
    return ARCHITECTURES[names[0]](keys)
