"""Protobuf to plain steps and back. Everything that a frame can get wrong is refused here, by column.

A frame whose columns do not fit together is refused as a whole. A request that cannot be served
(an id outside the vocabulary, a feature that is not built) gets a fault instead: its row fails alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from protos import common_pb2, worker_pb2
from services.common.channel import CHUNK_BYTES
from services.common.errors import InvalidArgument, TriptychError, Unimplemented
from services.worker.step import (
    MASKED,
    POOLS,
    CacheShape,
    Candidate,
    Int32,
    LoadedModel,
    MemoryPlan,
    NewRow,
    SamplingParams,
    StepInput,
    StepOutput,
)

MAX_LOGPROBS = 20
_NO_INTS = np.zeros(0, np.int32)


@dataclass(slots=True, frozen=True)
class Bounds:
    """What the ids and counts of a step must stay below or within."""

    shape: CacheShape
    kv_groups: int
    vocab_size: int
    pools: bool = False  # whether the runner makes pooled vectors


def bounds_of(shape: CacheShape, model: LoadedModel) -> Bounds:
    """What steps of this model over this cache must keep to."""
    return Bounds(shape, len(model.kv_groups), model.vocab_size, model.pools)


def _column(data: bytes, name: str, length: int | None = None) -> Int32:
    if len(data) % 4:
        raise InvalidArgument(f"{name} has {len(data)} bytes, not a multiple of 4", field=name)
    column = np.frombuffer(data, np.dtype("<i4")).astype(np.int32, copy=False)
    if length is not None and len(column) != length:
        raise InvalidArgument(f"{name} has {len(column)} elements, not {length}", field=name)
    return column


def _within(column: Int32, low: int, limit: int, name: str) -> Int32:
    """The column, if each element is in [low, limit)."""
    if len(column) and not (low <= int(column.min()) and int(column.max()) < limit):
        raise InvalidArgument(f"{name} has an element outside [{low}, {limit})", field=name)
    return column


def _distinct(column: Int32, name: str) -> Int32:
    if len(np.unique(column)) != len(column):
        raise InvalidArgument(f"{name} names a row twice", field=name)
    return column


def decode_step(step: worker_pb2.Step, bounds: Bounds) -> StepInput:
    """The step, checked. Raises InvalidArgument or Unimplemented naming the column."""
    _refuse_unbuilt(step)
    shape = bounds.shape
    rows = _column(step.row_i32le, "row_i32le")
    _distinct(_within(rows, 0, shape.max_num_seqs, "row_i32le"), "row_i32le")
    count = len(rows)
    num_tokens = _column(step.num_tokens_i32le, "num_tokens_i32le", count)
    _within(num_tokens, 1, shape.max_model_len + 1, "num_tokens_i32le")
    total = int(num_tokens.sum())
    if total > shape.max_num_batched_tokens:
        most = shape.max_num_batched_tokens
        raise InvalidArgument(f"num_tokens_i32le adds up to {total}, above {most}", field="num_tokens_i32le")
    num_computed = _column(step.num_computed_i32le, "num_computed_i32le", count)
    _within(num_computed, 0, shape.max_model_len, "num_computed_i32le")
    _within(num_computed + num_tokens, 1, shape.max_model_len + 1, "num_computed_i32le")
    if len(step.flags_u8) != count:
        raise InvalidArgument(f"flags_u8 has {len(step.flags_u8)} elements, not {count}", field="flags_u8")
    flags = np.frombuffer(step.flags_u8, np.uint8)
    for bit, wish in ((MASKED, "grammar masks"), (0 if bounds.pools else POOLS, "pooled vectors")):
        if (flags & bit).any():
            raise Unimplemented(f"flags_u8 asks for {wish}, which this worker does not have", field="flags_u8")
    first_writable = np.zeros(count, np.int32)
    if step.first_writable_i32le:
        first_writable = _column(step.first_writable_i32le, "first_writable_i32le", count)
    block_counts = _column(step.block_count_i32le, "block_count_i32le", count * bounds.kv_groups)
    _within(block_counts, 0, shape.num_blocks + 1, "block_count_i32le")
    block_ids = _column(step.block_id_i32le, "block_id_i32le", int(block_counts.sum()))
    freed = _column(step.freed_row_i32le, "freed_row_i32le")
    return StepInput(
        step_id=step.step_id,
        resync=step.resync,
        freed_rows=_within(freed, 0, shape.max_num_seqs, "freed_row_i32le"),
        new_rows=_new_rows(step.new_rows, bounds),
        rows=rows,
        num_tokens=num_tokens,
        num_computed=num_computed,
        flags=flags,
        first_writable=first_writable,
        block_counts=block_counts,
        block_ids=_within(block_ids, 0, shape.num_blocks, "block_id_i32le"),
        draft_counts=_NO_INTS,
        draft_ids=_NO_INTS,
    )


def _refuse_unbuilt(step: worker_pb2.Step) -> None:
    drafts = _column(step.draft_count_i32le, "draft_count_i32le")
    for name, present in (
        ("draft_count_i32le", bool(drafts.any())),
        ("draft_id_i32le", bool(step.draft_id_i32le)),
        ("encode", bool(step.encode)),
        ("dropped_media", bool(step.dropped_media)),
    ):
        if present:
            raise Unimplemented(f"{name} is not supported by this worker", field=name)


def _new_rows(messages: Iterable[worker_pb2.NewRow], bounds: Bounds) -> tuple[NewRow, ...]:
    rows = tuple(_new_row(message, bounds) for message in messages)
    _distinct(np.array([row.row for row in rows], np.int32), "new_rows.row")
    return rows


def _new_row(message: worker_pb2.NewRow, bounds: Bounds) -> NewRow:
    if message.row >= bounds.shape.max_num_seqs:
        raise InvalidArgument(f"new_rows.row {message.row} is not below {bounds.shape.max_num_seqs}", field="new_rows")
    tokens = _column(message.token_id_i32le, "new_rows.token_id_i32le")
    if not 1 <= message.prompt_len <= len(tokens) <= bounds.shape.max_model_len:
        raise InvalidArgument(
            f"new_rows.prompt_len {message.prompt_len} with {len(tokens)} ids and a context of"
            f" {bounds.shape.max_model_len} tokens",
            field="new_rows.prompt_len",
        )
    fault: str | None = None
    params = SamplingParams(seed=message.seed)
    try:
        _within(tokens, 0, bounds.vocab_size, "token_id_i32le")
        if message.media:
            raise Unimplemented("media are not supported by this worker", field="media")
        params = decode_sampling(message.sampling, message.seed, bounds.vocab_size)
    except TriptychError as error:
        fault = error.message
    return NewRow(
        row=message.row,
        epoch=message.epoch,
        tokens=tokens,
        prompt_len=message.prompt_len,
        sampling=params,
        request_id=message.request_id,
        traceparent=message.traceparent if message.HasField("traceparent") else None,
        fault=fault,
    )


def decode_sampling(params: common_pb2.SamplingParams, seed: int, vocab_size: int) -> SamplingParams:
    """The parameters with their defaults. Raises InvalidArgument or Unimplemented naming the field."""
    if params.HasField("constraint"):
        raise Unimplemented("sampling.constraint is not supported by this worker", field="constraint")

    def ids(values: Iterable[int], name: str) -> tuple[int, ...]:
        result = tuple(values)
        if any(value >= vocab_size for value in result):
            raise InvalidArgument(f"sampling.{name} has an id outside [0, {vocab_size})", field=name)
        return result

    def number(name: str, low: float, high: float, default: float) -> float:
        value = float(getattr(params, name)) if params.HasField(name) else default
        if not low <= value <= high:  # NaN compares false
            raise InvalidArgument(f"sampling.{name} is {value}, not within [{low}, {high}]", field=name)
        return value

    bias = tuple((item.token_id, item.bias) for item in params.logit_bias)
    ids((token for token, _ in bias), "logit_bias")
    if not all(-100 <= value <= 100 for _, value in bias):
        raise InvalidArgument("sampling.logit_bias is not within [-100, 100]", field="logit_bias")
    top = {"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs}
    for name, value in top.items():
        if value > MAX_LOGPROBS:
            raise InvalidArgument(f"sampling.{name} is {value}, above {MAX_LOGPROBS}", field=name)
    return SamplingParams(
        seed=seed,
        min_tokens=params.min_tokens,
        eos_ids=ids(params.eos_token_ids, "eos_token_ids"),
        stop_ids=ids(params.stop_token_ids, "stop_token_ids"),
        temperature=number("temperature", 0, 1e6, 1.0),
        top_p=number("top_p", 2.0**-149, 1, 1.0),
        top_k=params.top_k,
        min_p=number("min_p", 0, 1, 0.0),
        repetition_penalty=number("repetition_penalty", 9e-7, 1e6, 1.0),
        frequency_penalty=number("frequency_penalty", -2, 2, 0.0),
        presence_penalty=number("presence_penalty", -2, 2, 0.0),
        logit_bias=bias,
        allowed_ids=ids(params.allowed_token_ids, "allowed_token_ids"),
        banned_sequences=tuple(ids(item.ids, "banned_sequences") for item in params.banned_sequences if item.ids),
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
    )


def encode_logprobs(positions: Iterable[tuple[Candidate, ...]]) -> common_pb2.Logprobs:
    """Columns of the candidates of each position."""
    lists = list(positions)
    entries = [candidate for candidates in lists for candidate in candidates]
    return common_pb2.Logprobs(
        count_i32le=np.array([len(candidates) for candidates in lists], "<i4").tobytes(),
        token_id_i32le=np.array([entry.token_id for entry in entries], "<i4").tobytes(),
        logprob_f32le=np.array([entry.logprob for entry in entries], "<f4").tobytes(),
        rank_i32le=np.array([entry.rank for entry in entries], "<i4").tobytes(),
    )


def encode_result(output: StepOutput, duration_us: int) -> worker_pb2.StepResult:
    """The answer to a step that ran."""
    results = output.results
    with_logprobs = any(result.logprobs for result in results)
    return worker_pb2.StepResult(
        step_id=output.step_id,
        status=worker_pb2.STEP_STATUS_OK,
        row_i32le=np.array([result.row for result in results], "<i4").tobytes(),
        epoch_u64le=np.array([result.epoch for result in results], "<u8").tobytes(),
        row_status_u8=bytes(result.status for result in results),
        token_count_i32le=np.array([len(result.token_ids) for result in results], "<i4").tobytes(),
        token_id_i32le=np.array([token for result in results for token in result.token_ids], "<i4").tobytes(),
        logprobs=encode_logprobs(
            candidates for result in results for candidates in (result.logprobs or ((),) * len(result.token_ids))
        )
        if with_logprobs
        else None,
        prompt_logprobs=[
            worker_pb2.PromptLogprobs(
                row=chunk.row,
                epoch=chunk.epoch,
                first_position=chunk.first_position,
                logprobs=encode_logprobs(chunk.positions),
            )
            for chunk in output.prompt_logprobs
        ],
        pooled=[
            worker_pb2.PooledVector(
                row=pooled.row, epoch=pooled.epoch, values_f32le=np.array(pooled.values, "<f4").tobytes()
            )
            for pooled in output.pooled
        ],
        duration_us=duration_us,
    )


def encode_failed(step_id: int, error: TriptychError) -> worker_pb2.StepResult:
    """The answer to a step that failed as a whole."""
    failure = common_pb2.Failure(
        code=error.code_number, message=error.message, field=error.field, reason=error.reason, error_id=error.error_id
    )
    return worker_pb2.StepResult(step_id=step_id, status=worker_pb2.STEP_STATUS_FAILED, failure=failure)


def encode_skipped(step_id: int) -> worker_pb2.StepResult:
    """The answer to a step behind a failed one."""
    return worker_pb2.StepResult(step_id=step_id, status=worker_pb2.STEP_STATUS_SKIPPED)


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
    )


def plan_response(plan: MemoryPlan) -> worker_pb2.PlanMemoryResponse:
    """The memory sum."""
    return worker_pb2.PlanMemoryResponse(
        weight_bytes=plan.weight_bytes,
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
    )
    for name in ("num_blocks", "block_size", "max_num_seqs", "max_model_len", "max_num_batched_tokens"):
        if not getattr(shape, name):
            raise InvalidArgument(f"{name} must be at least 1", field=name)
    return shape
