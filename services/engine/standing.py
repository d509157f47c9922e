"""What the worker group is and holds once it stands. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class ModelCard:
    """ModelInfo of the contract, field by field."""

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int  # that the model was made for
    fingerprint: str
    dtype: str
    capabilities: tuple[str, ...]
    created_s: int


@dataclass(slots=True, frozen=True)
class TextFile:
    """A text file of the model with the hash that its worker gave for it."""

    name: str
    sha256: bytes
    content: bytes


@dataclass(slots=True, frozen=True)
class Standing:
    """A worker group that can execute, and the memory that it has given to the KV cache."""

    model: ModelCard
    device: str
    kv_windows: tuple[int | None, ...]  # per KV group, tokens that attention looks back over; None is all
    num_blocks: int
    block_size: int  # tokens
    bytes_per_block: int
    max_model_len: int  # of the model, cut by the settings; the KV capacity is not counted in
    text_files: tuple[TextFile, ...]

    @property
    def kv_capacity_tokens(self) -> int:
        """Tokens that all KV blocks hold."""
        return self.num_blocks * self.block_size
