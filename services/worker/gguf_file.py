"""A GGUF file in Hugging Face terms: its config.json, and its tensors by their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

from kernels.linear.blocks import Blocks
from services.common.errors import InvalidArgument
from services.worker.gguf_blocks import WITHOUT_LOSS, blocks_of
from services.worker.gguf_reader import Reader

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SHORT_FLOATS = {gguf.GGMLQuantizationType.F16: torch.float16, gguf.GGMLQuantizationType.BF16: torch.bfloat16}


class GgufFile:
    """One GGUF file, mapped. `field` gives a metadata value, the rest speaks Hugging Face."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = Reader(path)
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"{path} cannot be read as GGUF: {error}", field="model") from error
        self.architecture: str = self.required("general.architecture")
        if self.architecture not in _ARCHITECTURES:
            served = ", ".join(_ARCHITECTURES)
            raise InvalidArgument(
                f"{path}: general.architecture = {self.architecture!r} is not served; these are: {served}",
                field="general.architecture",
            )
        parts = self.field("split.count")
        if parts is not None and parts > 1:
            raise InvalidArgument(
                f"{path} is one of {parts} parts, which are not served; llama-gguf-split --merge makes them one file",
                field="split.count",
            )
        self._tensors = {self._hugging_face_name(name): tensor for name, tensor in self._reader.tensors.items()}

    def field(self, key: str) -> Any:
        """A metadata value, or None."""
        return self._reader.value(key)

    def required(self, key: str) -> Any:
        """A metadata value that must be there."""
        value = self.field(key)
        if value is None:
            raise InvalidArgument(f"{self.path} lacks the metadata key {key}", field=key)
        return value

    def names(self) -> Set[str]:
        """Names of all tensors."""
        return self._tensors.keys()

    def get(self, name: str) -> torch.Tensor:
        """One tensor: float16 and bfloat16 as they are stored, everything else in float32."""
        stored = self._tensors[name]
        if stored.kind in WITHOUT_LOSS:  # the same values as the library's, in a third of its time
            blocks = self.blocks(name)
            if blocks is not None:
                return blocks.dequantize()
        if stored.kind in _SHORT_FLOATS:
            tensor = torch.from_numpy(stored.data.copy()).view(_SHORT_FLOATS[stored.kind])
        else:
            values = self._read(name, gguf.quants.dequantize)
            tensor = torch.from_numpy(values if values.flags.writeable else values.copy())
        order = self._order_of_rows(name)
        return tensor if order is None else tensor[order]

    def blocks(self, name: str) -> Blocks | None:
        """A quantized matrix as blocks; None where it is none, or does not fit."""
        blocks: Blocks | None = self._read(name, blocks_of)
        order = self._order_of_rows(name)
        return blocks if blocks is None or order is None else blocks.rows(order)

    def _read(self, name: str, read: Callable[[NDArray[np.uint8], Any], Any]) -> Any:
        stored = self._tensors[name]
        try:
            return read(stored.data, stored.kind)
        except NotImplementedError as error:
            raise InvalidArgument(
                f"{self.path}: tensor {stored.name} is {stored.kind.name}, which is not served", field="model"
            ) from error

    def config(self) -> dict[str, Any]:
        """What config.json would say."""
        size = self._number("attention.head_count")
        width = self._number("embedding_length")
        config: dict[str, Any] = {
            "architectures": [_ARCHITECTURES[self.architecture]],
            "model_type": self.architecture,
            "hidden_act": "silu",
            "vocab_size": self._tensors["model.embed_tokens.weight"].data.shape[0],
            "hidden_size": width,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": size,
            "num_key_value_heads": self._number("attention.head_count_kv", size),
            "head_dim": self._number("attention.key_length", width // size),
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": _short_float(self._number("attention.layer_norm_rms_epsilon")),
            "rope_theta": _short_float(self._number("rope.freq_base", 10000.0)),
            "tie_word_embeddings": "lm_head.weight" not in self._tensors,
            "dtype": "float32",
        }
        if self.architecture == "llama":
            config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in self._tensors
        config.update(self._special_ids())
        self._refuse_odd_rope()
        return config

    def _special_ids(self) -> dict[str, int]:
        ids = {"bos": "bos", "eos": "eos", "pad": "padding"}
        values = {name: self.field(f"tokenizer.ggml.{key}_token_id") for name, key in ids.items()}
        return {f"{name}_token_id": value for name, value in values.items() if value is not None}

    def _refuse_odd_rope(self) -> None:
        for key in ("rope.scaling.type", "rope.scale_linear"):
            value = self.field(f"{self.architecture}.{key}")
            if value not in (None, "none", 1.0):
                raise InvalidArgument(
                    f"{self.path}: {self.architecture}.{key} = {value!r} is not served",
                    field=f"{self.architecture}.{key}",
                )
        turned, size = self.field(f"{self.architecture}.rope.dimension_count"), self._number("attention.head_count")
        head_dim = self._number("attention.key_length", self._number("embedding_length") // size)
        if turned not in (None, head_dim):
            raise InvalidArgument(
                f"{self.path}: partial rotary embedding ({turned} of {head_dim}) is not served",
                field=f"{self.architecture}.rope.dimension_count",
            )

    def _number(self, key: str, default: Any = None) -> Any:
        name = f"{self.architecture}.{key}"
        value = self.required(name) if default is None else self.field(name)
        value = default if value is None else value
        if isinstance(value, list):
            raise InvalidArgument(f"{self.path}: {name} differs between layers, which is not served", field=name)
        return value

    def _hugging_face_name(self, name: str) -> str:
        if name in _TOP_NAMES:
            return _TOP_NAMES[name]
        parts = name.split(".")
        if len(parts) == 4 and parts[0] == "blk" and parts[2] in _LAYER_NAMES:
            return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
        raise InvalidArgument(
            f"{self.path}: tensor {name} has no place in the architecture {self.architecture}", field="model"
        )

    def _order_of_rows(self, name: str) -> torch.Tensor | None:
        """GGUF's llama stores the rows of a head as pairs (0, E, 1, E + 1 ...): where each is found.

        stored   0  E  1  E+1  2  E+2 ...        wanted   0  1  2 ... E  E+1  E+2 ...
        """
        if self.architecture != "llama" or not (".q_proj." in name or ".k_proj." in name):
            return None
        heads = self._number("attention.head_count")
        if ".k_proj." in name:
            heads = self._number("attention.head_count_kv", heads)
        return torch.arange(len(self._tensors[name].data)).view(heads, -1, 2).transpose(1, 2).flatten()


def _short_float(value: float) -> float:
    """GGUF holds float32: 1e-5 and not 9.999999747378752e-06."""
    return float(f"{value:.7g}")
