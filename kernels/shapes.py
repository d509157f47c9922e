"""Models of known shapes, as their kernels see them: what examples of launches are made for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True, frozen=True)
class Shape:
    """What of a model the kernels see."""

    name: str
    dtype: torch.dtype
    hidden: int
    heads: int
    kv_heads: int
    size: int
    feed_forward: int
    vocabulary: int


SHAPES = (
    Shape("8B", torch.bfloat16, 4096, 32, 8, 128, 14336, 128256),  # Llama 3
    Shape("135M", torch.float16, 576, 9, 3, 64, 1536, 49152),  # SmolLM2: nothing but the head is a power of two
    Shape("wide head", torch.bfloat16, 2048, 8, 1, 256, 16384, 256000),  # Gemma
    Shape("float32", torch.float32, 1024, 16, 8, 128, 3072, 151936),  # Qwen3-0.6B on the exact path
)


def tensor(shape: Shape, *sizes: int) -> torch.Tensor:
    """One without memory, of the model's type: to compile for."""
    return torch.empty(*sizes, dtype=shape.dtype, device="meta")
