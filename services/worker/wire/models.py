"""The model, its text files and its memory, as an engine is told of them."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

from protos import common_pb2, worker_pb2
from services.common.channel import CHUNK_BYTES
from services.common.errors import InvalidArgument
from services.worker.step import CacheShape, LoadedModel, MemoryPlan


def text_file_infos(files: dict[str, bytes]) -> list[common_pb2.TextFileInfo]:
    """Name, size and hash of each file, in order."""
    return [
        common_pb2.TextFileInfo(name=name, size=len(content), sha256=sha256(content).digest())
        for name, content in files.items()
    ]


def text_file_chunks(files: dict[str, bytes]) -> Iterator[worker_pb2.WorkerServiceGetTextFilesResponse]:
    """The files in pieces of at most 1 MiB; an empty file is one empty piece."""
    for info, content in zip(text_file_infos(files), files.values(), strict=True):
        for offset in range(0, len(content) or 1, CHUNK_BYTES):
            chunk = common_pb2.TextFileChunk(file=info, offset=offset, data=content[offset : offset + CHUNK_BYTES])
            yield worker_pb2.WorkerServiceGetTextFilesResponse(chunk=chunk)


def model_info(model: LoadedModel, created_s: int) -> common_pb2.ModelInfo:
    """What clients, gateway and engine are told of the model."""
    fingerprint = sha256()
    for name in ("config.json", "tokenizer.json"):
        fingerprint.update(sha256(model.text_files.get(name, b"")).digest())
    return common_pb2.ModelInfo(
        name=model.architecture,  # the engine has a better one wherever the model has a path
        architecture=model.architecture,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        fingerprint=fingerprint.hexdigest(),
        dtype=model.dtype,
        capabilities=model.capabilities,
        created_s=created_s,
    )


def load_response(model: LoadedModel, created_s: int) -> worker_pb2.LoadResponse:
    """What was loaded."""
    return worker_pb2.LoadResponse(
        model=model_info(model, created_s),
        weight_bytes=model.weight_bytes,
        kv_groups=[
            worker_pb2.KvGroup(
                layers=group.layers, sliding_window=group.sliding_window, bytes_per_token=group.bytes_per_token
            )
            for group in model.kv_groups
        ],
        text_files=text_file_infos(model.text_files),
        weights=[worker_pb2.WeightMemory(type=kind, bytes=size) for kind, size in model.weight_memory.items()],
    )


def plan_response(plan: MemoryPlan) -> worker_pb2.PlanMemoryResponse:
    """The memory sum."""
    return worker_pb2.PlanMemoryResponse(
        weight_bytes=plan.weight_bytes,
        process_bytes=plan.process_bytes,
        step_bytes=plan.step_bytes,
        kv_cache_bytes=plan.kv_cache_bytes,
        bytes_per_block=plan.bytes_per_block,
        num_blocks=plan.num_blocks,
        summary=plan.summary,
    )


def decode_shape(request: worker_pb2.PlanMemoryRequest | worker_pb2.InitCacheRequest) -> CacheShape:
    """The shape that the engine asks for. Raises InvalidArgument naming a field that is 0."""
    blocks = request.num_blocks if isinstance(request, worker_pb2.InitCacheRequest) else 1
    shape = CacheShape(
        num_blocks=blocks,
        block_size=request.block_size,
        max_num_seqs=request.max_num_seqs,
        max_model_len=request.max_model_len,
        max_num_batched_tokens=request.max_num_batched_tokens,
        encoder_budget=request.encoder_budget if isinstance(request, worker_pb2.PlanMemoryRequest) else 0,
        encoder_cache_size=request.encoder_cache_size if isinstance(request, worker_pb2.PlanMemoryRequest) else 0,
    )
    for name in ("num_blocks", "block_size", "max_num_seqs", "max_model_len", "max_num_batched_tokens"):
        if not getattr(shape, name):
            raise InvalidArgument(f"{name} must be at least 1", field=name)
    return shape
