"""Who is who: this process, the model, its text files."""

from __future__ import annotations

from protos import common_pb2
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
