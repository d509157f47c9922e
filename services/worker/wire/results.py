"""What a step gave, as columns."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from protos import common_pb2, worker_pb2
from services.common.errors import TriptychError
from services.worker.step import Candidate, StepOutput


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
