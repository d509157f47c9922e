"""What a step gave, as columns."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

from protos import common_pb2, worker_pb2
from services.common.errors import TriptychError
from services.worker.step import Candidate, StepOutput


def _pack(kind: str, values: Sequence[float]) -> bytes:
    """Little-endian bytes of a column: struct is faster than an array for what a step has."""
    return struct.pack(f"<{len(values)}{kind}", *values)


def encode_logprobs(positions: Iterable[tuple[Candidate, ...]]) -> common_pb2.Logprobs:
    """Columns of the candidates of each position."""
    lists = list(positions)
    entries = [candidate for candidates in lists for candidate in candidates]
    return common_pb2.Logprobs(
        count_i32le=_pack("i", [len(candidates) for candidates in lists]),
        token_id_i32le=_pack("i", [entry.token_id for entry in entries]),
        logprob_f32le=_pack("f", [entry.logprob for entry in entries]),
        rank_i32le=_pack("i", [entry.rank for entry in entries]),
    )


def encode_result(output: StepOutput, duration_us: int) -> worker_pb2.StepResult:
    """The answer to a step that ran."""
    results = output.results
    answer = worker_pb2.StepResult(
        step_id=output.step_id,
        status=worker_pb2.STEP_STATUS_OK,
        row_i32le=_pack("i", [result.row for result in results]),
        epoch_u64le=_pack("Q", [result.epoch for result in results]),
        row_status_u8=bytes([result.status for result in results]),
        token_count_i32le=_pack("i", [len(result.token_ids) for result in results]),
        token_id_i32le=_pack("i", [token for result in results for token in result.token_ids]),
        missing_media=output.missing_media,
        duration_us=duration_us,
    )
    if any(result.logprobs for result in results):
        lists = (result.logprobs or ((),) * len(result.token_ids) for result in results)
        answer.logprobs.CopyFrom(encode_logprobs(candidates for positions in lists for candidates in positions))
    for chunk in output.prompt_logprobs:
        answer.prompt_logprobs.append(
            worker_pb2.PromptLogprobs(
                row=chunk.row,
                epoch=chunk.epoch,
                first_position=chunk.first_position,
                logprobs=encode_logprobs(chunk.positions),
            )
        )
    for pooled in output.pooled:
        answer.pooled.append(
            worker_pb2.PooledVector(row=pooled.row, epoch=pooled.epoch, values_f32le=_pack("f", pooled.values))
        )
    return answer


def encode_failed(step_id: int, error: TriptychError) -> worker_pb2.StepResult:
    """The answer to a step that failed as a whole."""
    failure = common_pb2.Failure(
        code=error.code_number, message=error.message, field=error.field, reason=error.reason, error_id=error.error_id
    )
    return worker_pb2.StepResult(step_id=step_id, status=worker_pb2.STEP_STATUS_FAILED, failure=failure)


def encode_skipped(step_id: int) -> worker_pb2.StepResult:
    """The answer to a step behind a failed one."""
    return worker_pb2.StepResult(step_id=step_id, status=worker_pb2.STEP_STATUS_SKIPPED)
