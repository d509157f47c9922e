"""A Qwen3-VL with random weights and all files of a checkpoint, small enough to write and to run in a moment.

Bytes are ids 0 to 255; behind them come the special tokens. Weights are large enough that a mistake shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from services.worker.toy_text import toy_text_files

MAX_MODEL_LEN = 4096
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
IDS = {token: 256 + index for index, token in enumerate(SPECIAL)}
END, VISION_START, VISION_END = IDS["<|im_end|>"], IDS["<|vision_start|>"], IDS["<|vision_end|>"]
IMAGE, VIDEO = IDS["<|image_pad|>"], IDS["<|video_pad|>"]
VOCAB_SIZE = 272
PATCH, MERGE, FRAMES = 16, 2, 2
"""Pixels of a patch's side, patches of an embedding's side, frames of a patch."""
MEAN, STD = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
TEXT: dict[str, Any] = {
    "model_type": "qwen3_vl_text",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 256,
    "dtype": "float32",
    "eos_token_id": END,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": MAX_MODEL_LEN,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
    "rope_theta": 10000.0,
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}
VISION: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "deepstack_visual_indexes": [0, 2],
    "depth": 4,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 40,
    "num_heads": 2,
    "num_position_embeddings": 36,
    "out_hidden_size": 64,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": FRAMES,
}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "tie_word_embeddings": True,
}
PIXELS = {
    "patch_size": PATCH,
    "temporal_patch_size": FRAMES,
    "merge_size": MERGE,
    "image_mean": list(MEAN),
    "image_std": list(STD),
    "processor_class": "Qwen3VLProcessor",
}
IMAGES = {
    "size": {"longest_edge": 65536, "shortest_edge": 1024},
    "image_processor_type": "Qwen2VLImageProcessorFast",
    **PIXELS,
}
VIDEOS = {
    "size": {"longest_edge": 131072, "shortest_edge": 4096},
    "video_processor_type": "Qwen3VLVideoProcessor",
    **PIXELS,
}
TEMPLATE = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}
{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- else %}{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- endif %}
"""


def tiny_qwen3_vl(
    folder: Path, *, text: dict[str, Any] | None = None, vision: dict[str, Any] | None = None, **changes: Any
) -> Path:
    """Writes the checkpoint into `folder`; the arguments change keys of the text, of the vision and of all."""
    config = {**CONFIG, "text_config": {**TEXT, **(text or {})}, "vision_config": {**VISION, **(vision or {})}}
    config.update(changes)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(_weights(config), folder / "model.safetensors")
    tokenizer = Tokenizer.from_str(toy_text_files(MAX_MODEL_LEN)["tokenizer.json"].decode())
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    files: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": 256, "eos_token_id": [END, 256], "pad_token_id": 256},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "add_bos_token": False,
            "model_max_length": MAX_MODEL_LEN,
        },
        "preprocessor_config.json": IMAGES,
        "video_preprocessor_config.json": VIDEOS,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def _weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random weights under the names of the checkpoint."""
    generator = torch.Generator().manual_seed(11)
    shapes = {**_text_shapes(config["text_config"]), **_vision_shapes(config["vision_config"])}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["text_config"]["vocab_size"], config["text_config"]["hidden_size"])
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        norm = "norm" in name and name.endswith("weight")
        weights[name] = torch.randn(shape, generator=generator) * 0.15 + (1.0 if norm else 0.0)
    return weights


def _text_shapes(text: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, size = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    heads, kv_heads = text["num_attention_heads"] * size, text["num_key_value_heads"] * size
    top = "model.language_model"
    shapes: dict[str, tuple[int, ...]] = {
        f"{top}.embed_tokens.weight": (text["vocab_size"], hidden),
        f"{top}.norm.weight": (hidden,),
    }
    for layer in range(text["num_hidden_layers"]):
        name = f"{top}.layers.{layer}"
        shapes |= {
            f"{name}.input_layernorm.weight": (hidden,),
            f"{name}.post_attention_layernorm.weight": (hidden,),
            f"{name}.self_attn.q_proj.weight": (heads, hidden),
            f"{name}.self_attn.k_proj.weight": (kv_heads, hidden),
            f"{name}.self_attn.v_proj.weight": (kv_heads, hidden),
            f"{name}.self_attn.o_proj.weight": (hidden, heads),
            f"{name}.self_attn.q_norm.weight": (size,),
            f"{name}.self_attn.k_norm.weight": (size,),
            f"{name}.mlp.gate_proj.weight": (inner, hidden),
            f"{name}.mlp.up_proj.weight": (inner, hidden),
            f"{name}.mlp.down_proj.weight": (hidden, inner),
        }
    return shapes


def _vision_shapes(vision: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    merged = hidden * vision["spatial_merge_size"] ** 2
    side, frames = vision["patch_size"], vision["temporal_patch_size"]
    widths: dict[str, tuple[int, int]] = {}  # products, with biases: outputs and inputs
    norms: dict[str, int] = {}
    for layer in range(vision["depth"]):
        name = f"model.visual.blocks.{layer}"
        widths |= {
            f"{name}.attn.qkv": (3 * hidden, hidden),
            f"{name}.attn.proj": (hidden, hidden),
            f"{name}.mlp.linear_fc1": (inner, hidden),
            f"{name}.mlp.linear_fc2": (hidden, inner),
        }
        norms |= {f"{name}.norm1": hidden, f"{name}.norm2": hidden}
    mergers = {"model.visual.merger": hidden}
    for index in range(len(vision["deepstack_visual_indexes"])):
        mergers[f"model.visual.deepstack_merger_list.{index}"] = merged
    for name, normed in mergers.items():
        widths |= {f"{name}.linear_fc1": (merged, merged), f"{name}.linear_fc2": (out, merged)}
        norms[f"{name}.norm"] = normed
    shapes: dict[str, tuple[int, ...]] = {
        "model.visual.patch_embed.proj.weight": (hidden, vision["in_channels"], frames, side, side),
        "model.visual.patch_embed.proj.bias": (hidden,),
        "model.visual.pos_embed.weight": (vision["num_position_embeddings"], hidden),
    }
    for name, (outputs, inputs) in widths.items():
        shapes |= {f"{name}.weight": (outputs, inputs), f"{name}.bias": (outputs,)}
    for name, width in norms.items():
        shapes |= {f"{name}.weight": (width,), f"{name}.bias": (width,)}
    return shapes
