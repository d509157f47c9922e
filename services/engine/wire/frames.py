"""What a gateway is told, as frames of its stream."""

from __future__ import annotations

from collections.abc import Iterator

from protos import common_pb2, engine_pb2
from services.common.errors import TriptychError
from services.engine.cache_events import CacheMessage
from services.engine.events import Failed, LogprobColumns
from services.engine.report import Load
from services.engine.sessions import Outgoing, Rows
from services.engine.wire.columns import to_bytes


def frames(out: Outgoing, step_id: int) -> Iterator[engine_pb2.AttachResponse]:
    """The outputs first, then the ends of what failed, then refusals: all that `out` tells."""
    if out.draining:
        grace_ms = None if out.grace_s is None else int(out.grace_s * 1000)
        yield engine_pb2.AttachResponse(draining=engine_pb2.Draining(grace_ms=grace_ms))
    if out.has_outputs:
        yield engine_pb2.AttachResponse(outputs=_outputs(out, step_id))
    for failed in out.failed:
        yield engine_pb2.AttachResponse(failed=_failed(failed))
    for handle, error in out.rejected:
        yield engine_pb2.AttachResponse(rejected=engine_pb2.Rejected(handle=handle, failure=failure_message(error)))


def _outputs(out: Outgoing, step_id: int) -> engine_pb2.StepOutputs:
    rows: Rows = out.rows
    return engine_pb2.StepOutputs(
        step_id=step_id,
        handle_u32le=to_bytes(rows.handles),
        choice_u32le=to_bytes(rows.choices),
        first_index_u32le=to_bytes(rows.first_indexes),
        token_count_u32le=to_bytes(rows.token_counts),
        token_id_i32le=to_bytes(rows.token_ids),
        finish_u8=bytes(rows.finishes),
        logprobs=_logprobs(rows.logprobs) if rows.logprobs is not None else None,
        started=[
            engine_pb2.Started(
                handle=event.owner.handle, cached_tokens=event.cached_tokens, queue_us=int(event.queue_s * 1e6)
            )
            for event in out.started
        ],
        prompt_logprobs=[
            engine_pb2.PromptLogprobsOutput(
                handle=event.owner.handle,
                first_position=event.first_position,
                logprobs=_logprobs(event.columns),
            )
            for event in out.prompt_logprobs
        ],
        pooled=[
            engine_pb2.PooledOutput(handle=event.owner.handle, values_f32le=to_bytes(event.values))
            for event in out.pooled
        ],
    )


def _logprobs(columns: LogprobColumns) -> common_pb2.Logprobs:
    return common_pb2.Logprobs(
        count_i32le=to_bytes(columns.counts),
        token_id_i32le=to_bytes(columns.token_ids),
        logprob_f32le=to_bytes(columns.logprobs),
        rank_i32le=to_bytes(columns.ranks),
    )


def _failed(event: Failed) -> engine_pb2.Failed:
    told = event.failure
    failure = common_pb2.Failure(
        code=told.code, message=told.message, error_id=told.error_id, field=told.field, reason=told.reason
    )
    return engine_pb2.Failed(handle=event.owner.handle, choice=event.choice, failure=failure)


def failure_message(error: TriptychError) -> common_pb2.Failure:
    """An error as it travels inside a stream."""
    return common_pb2.Failure(
        code=error.code_number,
        message=error.message,
        field=error.field,
        reason=error.reason,
        retry_after_ms=error.retry_after_ms,
        error_id=error.error_id,
    )


def cache_message(message: CacheMessage) -> engine_pb2.WatchCacheResponse:
    """What has happened to the prefix index."""
    return engine_pb2.WatchCacheResponse(
        sequence=message.sequence,
        cleared=message.cleared,
        stored_hashes=message.stored,
        stored_parents=message.parents,
        removed_hashes=message.removed,
    )


def load_message(load: Load, silence_s: float) -> common_pb2.Load:
    """How busy the engine is."""
    return common_pb2.Load(
        running=load.running,
        waiting=load.waiting,
        waiting_tokens=load.waiting_tokens,
        running_tokens=load.running_tokens,
        free_blocks=load.free_blocks,
        total_blocks=load.total_blocks,
        silence_ms=int(silence_s * 1000),
    )
