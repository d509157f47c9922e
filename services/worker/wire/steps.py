"""A Step into a StepInput, checked column by column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protos import common_pb2, worker_pb2
from services.common.errors import InvalidArgument, TriptychError, Unimplemented
from services.worker.step import (
    MASKED,
    POOLS,
    SAMPLES,
    CacheShape,
    Int32,
    LoadedModel,
    MediaItem,
    NewRow,
    SamplingParams,
    StepInput,
)
from services.worker.wire.columns import NONE, column, distinct, within
from services.worker.wire.media import decode_hash, decode_media
from services.worker.wire.sampling import decode_sampling

_POOLINGS: dict[int, str] = {common_pb2.POOLING_MEAN: "mean", common_pb2.POOLING_LAST: "last"}


@dataclass(slots=True, frozen=True)
class Bounds:
    """What the ids and counts of a step must stay below or within."""

    shape: CacheShape
    kv_groups: int
    vocab_size: int
    pools: bool = False  # whether the runner makes pooled vectors
    media: bool = False  # whether it encodes media


def bounds_of(shape: CacheShape, model: LoadedModel) -> Bounds:
    """What steps of this model over this cache must keep to."""
    return Bounds(shape, len(model.kv_groups), model.vocab_size, model.pools, model.media)


def decode_step(step: worker_pb2.Step, bounds: Bounds, received_s: float) -> StepInput:
    """The step, checked; it came at `received_s`. Raises InvalidArgument or Unimplemented naming the column."""
    shape = bounds.shape
    rows = column(step.row_i32le, "row_i32le")
    distinct(within(rows, 0, shape.max_num_seqs, "row_i32le"), "row_i32le")
    count = len(rows)
    num_tokens = column(step.num_tokens_i32le, "num_tokens_i32le", count)
    within(num_tokens, 1, shape.max_model_len + 1, "num_tokens_i32le")
    total = sum(num_tokens.tolist())
    if total > shape.max_num_batched_tokens:
        most = shape.max_num_batched_tokens
        raise InvalidArgument(f"num_tokens_i32le adds up to {total}, above {most}", field="num_tokens_i32le")
    num_computed = column(step.num_computed_i32le, "num_computed_i32le", count)
    within(num_computed, 0, shape.max_model_len, "num_computed_i32le")
    within(num_computed + num_tokens, 1, shape.max_model_len + 1, "num_computed_i32le")
    flags = _flags(step.flags_u8, count, bounds)
    first_writable = np.zeros(count, np.int32)
    if step.first_writable_i32le:
        first_writable = column(step.first_writable_i32le, "first_writable_i32le", count)
    block_counts = column(step.block_count_i32le, "block_count_i32le", count * bounds.kv_groups)
    within(block_counts, 0, shape.num_blocks + 1, "block_count_i32le")
    block_ids = column(step.block_id_i32le, "block_id_i32le", sum(block_counts.tolist()))
    draft_counts, draft_ids = _drafts(step, num_tokens, flags, bounds)
    encode, dropped_media = _media(step, bounds)
    freed = column(step.freed_row_i32le, "freed_row_i32le")
    return StepInput(
        step_id=step.step_id,
        received_s=received_s,
        resync=step.resync,
        freed_rows=within(freed, 0, shape.max_num_seqs, "freed_row_i32le"),
        new_rows=_new_rows(step.new_rows, bounds),
        rows=rows,
        num_tokens=num_tokens,
        num_computed=num_computed,
        flags=flags,
        first_writable=first_writable,
        block_counts=block_counts,
        block_ids=within(block_ids, 0, shape.num_blocks, "block_id_i32le"),
        draft_counts=draft_counts,
        draft_ids=draft_ids,
        encode=encode,
        dropped_media=dropped_media,
    )


def _flags(data: bytes, count: int, bounds: Bounds) -> NDArray[np.uint8]:
    if len(data) != count:
        raise InvalidArgument(f"flags_u8 has {len(data)} elements, not {count}", field="flags_u8")
    for flags in set(data):
        if flags & POOLS and not bounds.pools:
            raise Unimplemented("flags_u8 asks for pooled vectors, which this worker does not have", field="flags_u8")
        if flags & (MASKED | SAMPLES) == MASKED:
            raise InvalidArgument("flags_u8 has a row that waits for a mask and does not sample", field="flags_u8")
    return np.frombuffer(data, np.uint8)


def _drafts(step: worker_pb2.Step, num_tokens: Int32, flags: NDArray[np.uint8], bounds: Bounds) -> tuple[Int32, Int32]:
    """Draft tokens per row and their ids; both empty where no row has any."""
    if not step.draft_count_i32le and not step.draft_id_i32le:
        return NONE, NONE
    counts = column(step.draft_count_i32le, "draft_count_i32le", len(num_tokens))
    within(counts, 0, bounds.shape.max_model_len, "draft_count_i32le")
    listed = counts.tolist()
    rows = list(zip(listed, num_tokens.tolist(), flags.tolist(), strict=True))
    if any(drafts >= tokens for drafts, tokens, _ in rows):
        raise InvalidArgument(
            "draft_count_i32le has a row whose tokens are all drafts: the token before them is computed too",
            field="draft_count_i32le",
        )
    if any(drafts and not asked & SAMPLES for drafts, _, asked in rows):
        raise InvalidArgument("draft_count_i32le has drafts on a row that does not sample", field="draft_count_i32le")
    ids = column(step.draft_id_i32le, "draft_id_i32le", sum(listed))
    within(ids, 0, bounds.vocab_size, "draft_id_i32le")
    return (counts, ids) if len(ids) else (NONE, NONE)


def _media(step: worker_pb2.Step, bounds: Bounds) -> tuple[tuple[MediaItem, ...], tuple[bytes, ...]]:
    """Items to encode, and hashes to forget."""
    if not step.encode and not step.dropped_media:
        return (), ()
    for name, present in (("encode", bool(step.encode)), ("dropped_media", bool(step.dropped_media))):
        if present and not bounds.media:
            raise Unimplemented(f"{name} is not supported by this worker", field=name)
    return (
        tuple(decode_media(item.media, "encode.media", item.source) for item in step.encode),
        tuple(decode_hash(item, "dropped_media") for item in step.dropped_media),
    )


def _new_rows(messages: Sequence[worker_pb2.NewRow], bounds: Bounds) -> tuple[NewRow, ...]:
    if not messages:
        return ()
    rows = tuple(_new_row(message, bounds) for message in messages)
    distinct(np.array([row.row for row in rows], np.int32), "new_rows.row")
    return rows


def _new_row(message: worker_pb2.NewRow, bounds: Bounds) -> NewRow:
    if message.row >= bounds.shape.max_num_seqs:
        raise InvalidArgument(f"new_rows.row {message.row} is not below {bounds.shape.max_num_seqs}", field="new_rows")
    tokens = column(message.token_id_i32le, "new_rows.token_id_i32le")
    if not 1 <= message.prompt_len <= len(tokens) <= bounds.shape.max_model_len:
        raise InvalidArgument(
            f"new_rows.prompt_len {message.prompt_len} with {len(tokens)} ids and a context of"
            f" {bounds.shape.max_model_len} tokens",
            field="new_rows.prompt_len",
        )
    fault: str | None = None
    params = SamplingParams(seed=message.seed)
    media: tuple[MediaItem, ...] = ()
    pooling: str | None = None
    try:
        within(tokens, 0, bounds.vocab_size, "token_id_i32le")
        media = _media_of(message, bounds)
        params = decode_sampling(message.sampling, message.seed, bounds.vocab_size)
        pooling = _pooling_of(message)
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
        media=media,
        pooling=pooling,
        fault=fault,
    )


def _pooling_of(message: worker_pb2.NewRow) -> str | None:
    if not message.HasField("pooling"):
        return None
    if message.pooling not in _POOLINGS:
        raise InvalidArgument(f"pooling {message.pooling} is no way of pooling", field="pooling")
    return _POOLINGS[message.pooling]


def _media_of(message: worker_pb2.NewRow, bounds: Bounds) -> tuple[MediaItem, ...]:
    """The items of a prompt, in order of their places. Raises for what does not lie in it one after another."""
    if message.media and not bounds.media:
        raise Unimplemented("media are not supported by this worker", field="media")
    items = tuple(decode_media(item, "media") for item in message.media)
    end = 0
    for item in items:
        if item.offset < end or item.offset + item.length > message.prompt_len:
            raise InvalidArgument(
                f"media at [{item.offset}, {item.offset + item.length}) does not lie behind position {end}"
                f" in a prompt of {message.prompt_len} tokens",
                field="media",
            )
        end = item.offset + item.length
    return items
