"""What a decoder is (ModelConfig), and reading it from the keys of a config.json.

Knows no tensor. A key whose value asks for something that is not built is refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

from services.common.errors import InvalidArgument


@dataclass(slots=True, frozen=True)
class RopeConfig:
    """How positions become angles. Fields that a kind does not use keep their defaults."""

    kind: str  # "default", "linear", "llama3" or "yarn"
    theta: float
    factor: float = 1.0
    original_max_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    axes: tuple[int, ...] = ()  # per rotated pair: it turns with time (0), height (1) or width (2); empty: one position


@dataclass(slots=True, frozen=True)
class VisionConfig:
    """The encoder of images and videos that a decoder reads, and which ids stand for what it makes."""

    image_id: int
    video_id: int
    depth: int  # blocks
    hidden_size: int
    intermediate_size: int
    num_heads: int
    output_size: int  # the decoder's hidden size
    channels: int
    patch: int  # pixels of a patch's side
    frames: int  # of a patch
    merge: int  # patches of an embedding's side
    grid: int  # learned positions of a side
    exact_gelu: bool  # in blocks; else the one by tanh
    rope_theta: float
    deepstack: tuple[int, ...]  # blocks whose states go to the decoder's first layers, in the order of their mergers
    largest_frame: int | None = None  # patches that the processor makes of one image at most

    @property
    def patch_bytes(self) -> int:
        """Values of one patch."""
        return self.channels * self.frames * self.patch**2

    @property
    def merged(self) -> int:
        """Patches of an embedding."""
        return self.merge**2

    @property
    def parts(self) -> int:
        """Vectors that one embedding is made of: itself, and one for each of the decoder's first layers."""
        return 1 + len(self.deepstack)


@dataclass(slots=True, frozen=True)
class ModelConfig:
    """One decoder of the Llama family."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_model_len: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    windows: tuple[int | None, ...]  # per layer: how many last tokens it sees, None for all
    rope: RopeConfig
    dtype: str  # as the checkpoint names it
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    vision: VisionConfig | None = None

    @property
    def num_layers(self) -> int:
        """How many layers."""
        return len(self.windows)

    @property
    def kv_width(self) -> int:
        """Elements of one token's keys in one layer; its values have as many."""
        return self.num_kv_heads * self.head_dim


class ConfigKeys:
    """Typed access to a config.json; an error names the key."""

    def __init__(self, raw: Mapping[str, Any], prefix: str = "") -> None:
        self._raw = raw
        self._prefix = prefix

    def refuse(self, key: str, why: str) -> InvalidArgument:
        """The error for a key whose value cannot be honoured."""
        name = self._prefix + key
        return InvalidArgument(f"config.json: {name} = {self._raw.get(key)!r}: {why}", field=name)

    def has(self, key: str) -> bool:
        """True where the key is there and not null."""
        return self._raw.get(key) is not None

    def lacks(self, key: str) -> bool:
        """True where the key is not there at all: null says something else."""
        return key not in self._raw

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.refuse(key, f"must be a whole number of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A number."""
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(key, "must be a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.refuse(key, "must be true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.refuse(key, "must be a string")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers of at least 0; empty where unset."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise self.refuse(key, "must be a list of whole numbers of at least 0")
        return tuple(value)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings; empty where unset."""
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(key, "must be a list of strings")
        return tuple(value)

    def section(self, key: str, *, needed: bool = False) -> ConfigKeys:
        """A nested object; empty where unset, or an error where it is needed."""
        value = self._get(key, None if needed else {})
        if not isinstance(value, Mapping):
            raise self.refuse(key, "must be an object")
        return ConfigKeys(value, f"{self._prefix}{key}.")

    def with_keys(self, **others: Any) -> ConfigKeys:
        """The same with these keys beside or in place of its own."""
        return ConfigKeys({**self._raw, **others}, self._prefix)

    def raw(self, key: str) -> Any:
        """What is there; None where unset."""
        return self._raw.get(key)

    def refuse_others(self, known: Set[str]) -> None:
        """Raises InvalidArgument for a key that is none of these, and not null."""
        for key in self._raw:
            if key not in known and self.has(key):
                raise self.refuse(key, "is not known")

    def _get(self, key: str, default: Any) -> Any:
        value = self._raw.get(key)
        if value is None:
            value = default
        if value is None:
            raise InvalidArgument(f"config.json lacks {self._prefix}{key}", field=self._prefix + key)
        return value


def read_decoder(
    keys: ConfigKeys,
    *,
    head_dim: int | None = None,
    windows: tuple[int | None, ...] | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
) -> ModelConfig:
    """The keys that the whole family shares; an architecture's own are arguments. `head_dim` is its default."""
    if keys.has("quantization_config"):
        raise keys.refuse("quantization_config", "quantized checkpoints are not served")
    activation = keys.text("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise keys.refuse("hidden_act", "only silu is served")
    hidden_size = keys.integer("hidden_size")
    num_heads = keys.integer("num_attention_heads")
    num_kv_heads = keys.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise keys.refuse("num_key_value_heads", f"must divide num_attention_heads ({num_heads})")
    if head_dim is None and not keys.has("head_dim") and hidden_size % num_heads:
        raise keys.refuse("num_attention_heads", f"must divide hidden_size ({hidden_size}) where head_dim is unset")
    size = keys.integer("head_dim", head_dim or hidden_size // num_heads)
    if size % 2:
        raise keys.refuse("head_dim", "must be even: rotary embedding turns pairs")
    layers = keys.integer("num_hidden_layers")
    max_model_len = keys.integer("max_position_embeddings")
    return ModelConfig(
        architecture=keys.texts("architectures")[0],
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=size,
        max_model_len=max_model_len,
        rms_norm_eps=keys.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=keys.flag("tie_word_embeddings", False),
        windows=windows if windows is not None else (None,) * layers,
        rope=read_rope(keys, max_model_len),
        dtype=keys.text("dtype", keys.text("torch_dtype", "float32")),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def read_rope(keys: ConfigKeys, max_model_len: int) -> RopeConfig:
    """`rope_parameters`, or the older `rope_theta` with `rope_scaling` (whose kind may be spelled `type`)."""
    if keys.number("partial_rotary_factor", 1.0) != 1.0:
        raise keys.refuse("partial_rotary_factor", "partial rotary embedding is not served")
    spelling = "rope_parameters" if keys.has("rope_parameters") else "rope_scaling"
    scaling = keys.section(spelling)
    if scaling.number("partial_rotary_factor", 1.0) != 1.0:
        raise scaling.refuse("partial_rotary_factor", "partial rotary embedding is not served")
    theta = scaling.number("rope_theta", keys.number("rope_theta", 10000.0))
    kind_key = "rope_type" if scaling.has("rope_type") else "type"
    kind = scaling.text(kind_key, "default")
    original = scaling.integer("original_max_position_embeddings", max_model_len)
    if kind == "default":
        return RopeConfig(kind, theta)
    if kind == "linear":
        return RopeConfig(kind, theta, factor=scaling.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            kind,
            theta,
            factor=scaling.number("factor"),
            original_max_len=original,
            low_freq_factor=scaling.number("low_freq_factor"),
            high_freq_factor=scaling.number("high_freq_factor"),
        )
    if kind == "yarn":
        for key in ("mscale", "mscale_all_dim"):
            if scaling.has(key):
                raise scaling.refuse(key, "is not served")
        return RopeConfig(
            kind,
            theta,
            factor=scaling.number("factor", max_model_len / original),
            original_max_len=original,
            attention_factor=scaling.number("attention_factor") if scaling.has("attention_factor") else None,
            beta_fast=scaling.number("beta_fast", 32.0),
            beta_slow=scaling.number("beta_slow", 1.0),
            truncate=scaling.flag("truncate", True),
        )
    raise scaling.refuse(kind_key, "only default, linear, llama3 and yarn are served")


def read_layer_windows(keys: ConfigKeys) -> tuple[int | None, ...]:
    """Qwen's spelling: use_sliding_window with layer_types, or with max_window_layers full layers first."""
    layers = keys.integer("num_hidden_layers")
    kinds = keys.texts("layer_types")
    if kinds and len(kinds) != layers:
        raise keys.refuse("layer_types", f"must have one entry per layer ({layers})")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise keys.refuse("layer_types", f"{kind} is not served")
    if not keys.flag("use_sliding_window", False) or not keys.has("sliding_window"):
        return (None,) * layers
    window = keys.integer("sliding_window")
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    full = keys.integer("max_window_layers", 28, least=0)
    return tuple(window if layer >= full else None for layer in range(layers))
