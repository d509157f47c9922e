"""Tiny random-weight checkpoints, written by transformers, which is the oracle for them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models

BASE = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased-llama3": ("Llama", {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3}),
    "llama-wide-heads-linear": ("Llama", {"head_dim": 24, "rope_parameters": LINEAR}),
    "llama-yarn": ("Llama", {"num_key_value_heads": 6, "rope_parameters": YARN}),
    "mistral-window": ("Mistral", {"sliding_window": 20}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2-some-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-one-kv-head": ("Qwen3", {"head_dim": 8, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
}


def make(kind: str) -> Any:
    """A transformers model in float32 with weights large enough that a mistake shows."""
    family, changes = KINDS[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers warns of its own deprecations while it is imported
        import transformers

        config = getattr(transformers, f"{family}Config")(**{**BASE, **changes})
        torch.manual_seed(3)
        model = getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        torch.nn.init.normal_(parameter.data, 1.0 if "norm" in name else 0.0, 0.15)
    return model.float().eval()


def save(model: Any, folder: Path, **options: Any) -> Path:
    """Saves a model as safetensors beside a one-token tokenizer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder, **options)
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(folder / "tokenizer.json"))
    return folder


@torch.inference_mode()
def oracle_logits(model: Any, ids: list[int]) -> torch.Tensor:
    """The oracle's logits of every position."""
    logits: torch.Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits.float()
