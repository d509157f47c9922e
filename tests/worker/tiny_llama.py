"""A Llama with random weights, small enough to write and to run in a moment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.worker.config import WorkerSettings
from services.worker.runner import TorchRunner
from services.worker.toy_text import VOCAB_SIZE, toy_text_files
from tests.worker.columns import SHAPE

HIDDEN, HEADS, KV_HEADS, HEAD, FEED = 32, 4, 2, 8, 48
PROMPT = [11, 200, 34, 5, 90, 90, 17, 3, 150, 42, 8]


def tiny_llama(folder: Path) -> Path:
    """A Llama of two layers with random weights."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(2):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (HIDDEN,),
            f"{name}.post_attention_layernorm.weight": (HIDDEN,),
            f"{name}.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            f"{name}.self_attn.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{name}.self_attn.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
            f"{name}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            f"{name}.mlp.gate_proj.weight": (FEED, HIDDEN),
            f"{name}.mlp.up_proj.weight": (FEED, HIDDEN),
            f"{name}.mlp.down_proj.weight": (HIDDEN, FEED),
        }
    weights = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    for name, content in toy_text_files(64).items():
        (folder / name).write_bytes(content)
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "eos_token_id": 258,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def runner_of(model_path: str, **settings: Any) -> TorchRunner:
    """A runner with this model and a cache; one thread, deterministic unless told otherwise."""
    made = TorchRunner(WorkerSettings.build(**{"threads": 1, "deterministic": True, **settings}))
    made.load(model_path, None)
    made.init_cache(SHAPE)
    return made
