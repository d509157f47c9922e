"""Steps to the worker, and what it answers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from protos import common_pb2, worker_pb2
from services.common.errors import InvalidArgument, Unimplemented
from services.engine.events import LogprobColumns, StepFailure
from services.engine.plan import NewRow, PromptLogprobsChunk, StepMasks, StepOutcome, StepPlan
from services.engine.request import MediaItem
from services.engine.wire.columns import HASH_BYTES, to_bytes, to_column

_POOLINGS = {"mean": common_pb2.POOLING_MEAN, "last": common_pb2.POOLING_LAST}


def step_message(plan: StepPlan) -> worker_pb2.ExecuteRequest:
    """A plan as the worker takes it."""
    step = worker_pb2.Step(
        step_id=plan.step_id,
        resync=plan.resync,
        freed_row_i32le=to_bytes(plan.freed_rows),
        new_rows=[_new_row(row) for row in plan.new_rows],
        row_i32le=to_bytes(plan.rows),
        num_tokens_i32le=to_bytes(plan.num_tokens),
        num_computed_i32le=to_bytes(plan.num_computed),
        flags_u8=bytes(plan.flags),
        first_writable_i32le=to_bytes(plan.first_writable),
        block_count_i32le=to_bytes(plan.block_counts),
        block_id_i32le=to_bytes(plan.block_ids),
        draft_count_i32le=to_bytes(plan.draft_counts),
        draft_id_i32le=to_bytes(plan.draft_ids),
        encode=[worker_pb2.EncodeItem(media=_media_ref(item), source=item.source) for item in plan.encode],
        dropped_media=plan.dropped_media,
    )
    return worker_pb2.ExecuteRequest(step=step)


def _new_row(row: NewRow) -> worker_pb2.NewRow:
    return worker_pb2.NewRow(
        row=row.row,
        epoch=row.epoch,
        token_id_i32le=to_bytes(row.tokens),
        prompt_len=row.prompt_len,
        sampling=common_pb2.SamplingParams.FromString(row.sampling),
        seed=row.seed,
        media=[_media_ref(item) for item in row.media],
        request_id=row.request_id,
        traceparent=row.traceparent,
        pooling=None if row.pooling is None else _POOLINGS[row.pooling],
    )


def _media_ref(item: MediaItem) -> common_pb2.MediaRef:
    return common_pb2.MediaRef(
        hash=item.hash,
        modality=item.modality,
        offset=item.offset,
        length=item.length,
        embeddings=item.embeddings,
        grid=item.grid,
    )


def masks_message(masks: StepMasks) -> worker_pb2.ExecuteRequest:
    """The grammar masks of a step that has been sent."""
    return worker_pb2.ExecuteRequest(
        masks=worker_pb2.StepMasks(
            step_id=masks.step_id, row_i32le=to_bytes(masks.rows), drop_u8=masks.drop, mask_u32le=masks.masks
        )
    )


def to_outcome(result: worker_pb2.StepResult) -> StepOutcome:
    """A result as the core takes it. Raises InvalidArgument where its columns do not fit together.

    The worker does nothing meanwhile, and code that has not run since the last step is slow: what most results lack
    is asked for, and not gone through.
    """
    rows = to_column(result.row_i32le, "i", "row_i32le")
    epochs = to_column(result.epoch_u64le, "Q", "epoch_u64le")
    counts = to_column(result.token_count_i32le, "i", "token_count_i32le")
    token_ids = to_column(result.token_id_i32le, "i", "token_id_i32le")
    if not len(rows) == len(epochs) == len(result.row_status_u8) == len(counts):
        raise InvalidArgument("the columns of the result differ in length", field="row_i32le")
    if counts and (min(counts) < 0 or sum(counts) != len(token_ids)):
        raise InvalidArgument("token_count_i32le does not add up to the tokens", field="token_count_i32le")
    if result.proposed_count_i32le:
        raise Unimplemented("drafts of the worker's own are not taken by this engine", field="proposed_count_i32le")
    missing_media = tuple(result.missing_media) if result.missing_media else ()
    if missing_media and any(len(each) != HASH_BYTES for each in missing_media):
        raise InvalidArgument(f"missing_media has a hash that is not of {HASH_BYTES} bytes", field="missing_media")
    logprobs = to_logprobs(result.logprobs, len(token_ids)) if result.HasField("logprobs") else None
    return StepOutcome(
        step_id=result.step_id,
        status=result.status,
        failure=_step_failure(result.failure) if result.HasField("failure") else None,
        rows=rows,
        epochs=epochs,
        row_status=result.row_status_u8,
        token_counts=counts,
        token_ids=token_ids,
        logprobs=logprobs,
        prompt_logprobs=_prompt_logprobs(result.prompt_logprobs) if result.prompt_logprobs else (),
        pooled=_pooled(result.pooled) if result.pooled else {},
        missing_media=missing_media,
        duration_us=result.duration_us,
    )


def _prompt_logprobs(chunks: Sequence[worker_pb2.PromptLogprobs]) -> tuple[PromptLogprobsChunk, ...]:
    return tuple(
        PromptLogprobsChunk(chunk.row, chunk.epoch, chunk.first_position, to_logprobs(chunk.logprobs, None))
        for chunk in chunks
    )


def _pooled(vectors: Sequence[worker_pb2.PooledVector]) -> dict[int, array[float]]:
    return {each.epoch: to_column(each.values_f32le, "f", "pooled.values_f32le") for each in vectors}


def to_logprobs(message: common_pb2.Logprobs, positions: int | None) -> LogprobColumns:
    """Log probabilities whose columns fit together, and are of so many positions where it is known."""
    columns = LogprobColumns(
        counts=to_column(message.count_i32le, "i", "logprobs.count_i32le"),
        token_ids=to_column(message.token_id_i32le, "i", "logprobs.token_id_i32le"),
        logprobs=to_column(message.logprob_f32le, "f", "logprobs.logprob_f32le"),
        ranks=to_column(message.rank_i32le, "i", "logprobs.rank_i32le"),
    )
    entries = len(columns.token_ids)
    if positions is not None and len(columns.counts) != positions:
        raise InvalidArgument("logprobs has not one position per token", field="logprobs.count_i32le")
    if not sum(columns.counts) == entries == len(columns.logprobs) == len(columns.ranks):
        raise InvalidArgument("the columns of logprobs differ in length", field="logprobs.count_i32le")
    return columns


def _step_failure(failure: common_pb2.Failure) -> StepFailure:
    return StepFailure(failure.code, failure.message, failure.error_id if failure.HasField("error_id") else None)
