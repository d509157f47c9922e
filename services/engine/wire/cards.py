"""Who is who: this process, the model, its text files."""

from __future__ import annotations

from collections.abc import Iterable

from protos import common_pb2, worker_pb2
from services.common.errors import InvalidArgument
from services.engine.standing import ModelCard, TextFile

CONTRACT_VERSION = 1


def peer(name: str, incarnation: int, version: str) -> common_pb2.Peer:
    """This process, as it introduces itself."""
    return common_pb2.Peer(
        role="engine",
        name=name,
        incarnation=incarnation,
        contract_min=CONTRACT_VERSION,
        contract_max=CONTRACT_VERSION,
        version=version,
    )


def to_card(model: common_pb2.ModelInfo, name: str) -> ModelCard:
    """A worker's model under the name that the engine serves it by."""
    return ModelCard(
        name=name,
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        fingerprint=model.fingerprint,
        dtype=model.dtype,
        capabilities=tuple(model.capabilities),
        created_s=model.created_s,
    )


def to_windows(groups: Iterable[worker_pb2.KvGroup]) -> tuple[int | None, ...]:
    """How far each KV group looks back. Raises InvalidArgument where a model has no group or one sees nothing."""
    windows = tuple(group.sliding_window if group.HasField("sliding_window") else None for group in groups)
    if not windows or 0 in windows:
        raise InvalidArgument("the model has no KV group, or one with a window of 0", field="kv_groups")
    return windows


def model_message(card: ModelCard) -> common_pb2.ModelInfo:
    """The model as gateways are told."""
    return common_pb2.ModelInfo(
        name=card.name,
        architecture=card.architecture,
        vocab_size=card.vocab_size,
        max_model_len=card.max_model_len,
        fingerprint=card.fingerprint,
        dtype=card.dtype,
        capabilities=card.capabilities,
        created_s=card.created_s,
    )


def text_file_message(file: TextFile) -> common_pb2.TextFileInfo:
    """A text file by name, length and hash."""
    return common_pb2.TextFileInfo(name=file.name, size=len(file.content), sha256=file.sha256)
