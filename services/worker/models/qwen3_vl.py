"""Qwen3-VL: Qwen3 whose positions have three axes, and the encoder of what it sees."""

from __future__ import annotations

import math
from dataclasses import replace

from services.worker.models import qwen3
from services.worker.models.config import ConfigKeys, ModelConfig, VisionConfig

_TIME, _HEIGHT, _WIDTH = 0, 1, 2
_GELUS = {"gelu_pytorch_tanh": False, "gelu": True}
_VISION_KEYS = frozenset(
    (
        "deepstack_visual_indexes",
        "depth",
        "dtype",
        "hidden_act",
        "hidden_size",
        "in_channels",
        "initializer_range",
        "intermediate_size",
        "model_type",
        "num_heads",
        "num_position_embeddings",
        "out_hidden_size",
        "patch_size",
        "rope_parameters",
        "spatial_merge_size",
        "temporal_patch_size",
        "torch_dtype",
        "transformers_version",
    )
)


def read_config(keys: ConfigKeys) -> ModelConfig:
    """Qwen3VLForConditionalGeneration: text_config as Qwen3's, vision_config, and the ids that stand for embeddings."""
    text = keys.section("text_config", needed=True)
    given = {"architectures": list(keys.texts("architectures"))}
    for key in ("tie_word_embeddings", "dtype", "torch_dtype", "quantization_config"):
        if keys.has(key):  # what is said of all holds for the text too
            given[key] = keys.raw(key)
    text = text.with_keys(**given)
    config = qwen3.read_config(text)
    if any(window is not None for window in config.windows):
        raise text.refuse("sliding_window", "a sliding window is not served beside vision")
    axes = _axes(text, config.head_dim // 2)
    vision = _read_vision(keys, config)
    return replace(config, rope=replace(config.rope, axes=axes), vision=vision)


def _axes(text: ConfigKeys, pairs: int) -> tuple[int, ...]:
    """Which axis turns each pair: height and width take every third one, as many times as mrope_section says."""
    rope = text.section("rope_parameters" if text.has("rope_parameters") else "rope_scaling")
    if not rope.flag("mrope_interleaved", True):
        raise rope.refuse("mrope_interleaved", "only interleaved sections are served")
    sections = rope.integers("mrope_section") or (24, 20, 20)
    if len(sections) != 3 or sum(sections) != pairs:
        raise rope.refuse("mrope_section", f"must be three numbers whose sum is half of head_dim ({pairs})")
    axes = [_TIME] * pairs
    for axis in (_HEIGHT, _WIDTH):
        last = axis + 3 * (sections[axis] - 1)
        if last >= pairs:
            raise rope.refuse("mrope_section", f"axis {axis} reaches pair {last}, of {pairs}")
        axes[axis : 3 * sections[axis] : 3] = [axis] * sections[axis]
    return tuple(axes)


def _read_vision(keys: ConfigKeys, text: ModelConfig) -> VisionConfig:
    vision = keys.section("vision_config", needed=True)
    vision.refuse_others(_VISION_KEYS)
    activation = vision.text("hidden_act", "gelu_pytorch_tanh")
    if activation not in _GELUS:
        raise vision.refuse("hidden_act", f"only {' and '.join(_GELUS)} are served")
    rope = vision.section("rope_parameters")
    if rope.text("rope_type", "axial") not in ("axial", "default"):
        raise rope.refuse("rope_type", "only axial is served")
    hidden, heads = vision.integer("hidden_size"), vision.integer("num_heads")
    if hidden % (4 * heads):
        raise vision.refuse("num_heads", f"heads of hidden_size ({hidden}) must be multiples of 4: two axes turn pairs")
    positions = vision.integer("num_position_embeddings")
    if math.isqrt(positions) ** 2 != positions:
        raise vision.refuse("num_position_embeddings", "must be a square")
    output = vision.integer("out_hidden_size")
    if output != text.hidden_size:
        raise vision.refuse("out_hidden_size", f"must be the text's hidden_size ({text.hidden_size})")
    depth, deepstack = vision.integer("depth"), vision.integers("deepstack_visual_indexes")
    if len(set(deepstack)) != len(deepstack) or len(deepstack) > text.num_layers or max(deepstack, default=0) >= depth:
        raise vision.refuse(
            "deepstack_visual_indexes",
            f"must be different blocks of {depth}, at most as many as the text has layers ({text.num_layers})",
        )
    return VisionConfig(
        image_id=_token(keys, "image_token_id", text),
        video_id=_token(keys, "video_token_id", text),
        depth=depth,
        hidden_size=hidden,
        intermediate_size=vision.integer("intermediate_size"),
        num_heads=heads,
        output_size=output,
        channels=vision.integer("in_channels", 3),
        patch=vision.integer("patch_size"),
        frames=vision.integer("temporal_patch_size", 2),
        merge=vision.integer("spatial_merge_size", 2),
        grid=math.isqrt(positions),
        exact_gelu=_GELUS[activation],
        rope_theta=rope.number("rope_theta", 10000.0),
        deepstack=deepstack,
    )


def _token(keys: ConfigKeys, key: str, text: ModelConfig) -> int:
    value = keys.integer(key, least=0)
    if value >= text.vocab_size:
        raise keys.refuse(key, f"must be below text_config.vocab_size ({text.vocab_size})")
    return value
