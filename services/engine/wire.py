"""Protobuf on one side, plain data on the other. What is malformed is refused here, by field.

Columns are little-endian on the wire and native inside; only a big-endian host swaps.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator
from typing import Any

from protos import common_pb2, engine_pb2, worker_pb2
from services.common import tracing
from services.common.errors import InvalidArgument, TriptychError, Unimplemented
from services.engine.events import Failed, LogprobColumns, Owner, StepFailure
from services.engine.plan import NewRow, PromptLogprobsChunk, StepOutcome, StepPlan
from services.engine.report import Load
from services.engine.request import Replay, RequestSpec
from services.engine.sessions import Outgoing, Rows
from services.engine.standing import ModelCard, TextFile

CONTRACT_VERSION = 1
_SWAP = sys.byteorder == "big"
_TOKEN_BYTES = 16
_GATEWAY_STATE_LIMIT = 64 * 1024
_LOGPROBS_LIMIT = 20


def to_bytes(column: array[Any]) -> bytes:
    """A column as the wire has it."""
    if _SWAP:
        column = column[:]
        column.byteswap()
    return column.tobytes()


def to_column(data: bytes, typecode: str, field: str) -> array[Any]:
    """A column from the wire. Raises InvalidArgument where the length is not whole."""
    column = array(typecode)
    if len(data) % column.itemsize:
        raise InvalidArgument(f"{field}: {len(data)} bytes are not whole {column.itemsize}-byte elements", field=field)
    column.frombytes(data)
    if _SWAP:
        column.byteswap()
    return column


def to_spec(submit: engine_pb2.Submit, gateway: int, *, vocab_size: int, max_n: int) -> RequestSpec:
    """A Submit as the core takes it. Raises for what is malformed or not built, naming the field.

    Whether it can ever run is for the core to say.
    """
    _refuse_unbuilt(submit)
    if len(submit.token) != _TOKEN_BYTES:
        raise InvalidArgument(f"token has {len(submit.token)} bytes instead of {_TOKEN_BYTES}", field="token")
    if len(submit.gateway_state) > _GATEWAY_STATE_LIMIT:
        raise InvalidArgument(f"gateway_state is longer than {_GATEWAY_STATE_LIMIT} bytes", field="gateway_state")
    sampling = submit.sampling
    n = sampling.n if sampling.HasField("n") else 1
    if n > max_n:
        raise InvalidArgument(f"n is {n}, above {max_n}", field="n")
    return RequestSpec(
        owner=Owner(gateway, submit.handle),
        token=submit.token,
        request_id=submit.request_id,
        prompt=to_column(submit.prompt_id_i32le, "i", "prompt"),
        sampling=sampling.SerializeToString(),
        n=n,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        eos_ids=_id_set(sampling.eos_token_ids, "eos_token_ids", vocab_size),
        stop_ids=_id_set(sampling.stop_token_ids, "stop_token_ids", vocab_size),
        seed=sampling.seed,
        logprobs=_top("logprobs", sampling.logprobs) if sampling.HasField("logprobs") else None,
        prompt_logprobs=_top("prompt_logprobs", sampling.prompt_logprobs)
        if sampling.HasField("prompt_logprobs")
        else None,
        priority=submit.priority,
        tenant=submit.tenant,
        cache_salt=submit.cache_salt,
        deadline_s=submit.deadline_ms / 1000 if submit.HasField("deadline_ms") else None,
        gateway_state=submit.gateway_state,
        replay=tuple(
            Replay(to_column(choice.token_id_i32le, "i", f"replay[{index}]"), choice.finish_reason)
            for index, choice in enumerate(submit.replay)
        ),
        traceparent=tracing.valid(submit.traceparent) if submit.HasField("traceparent") else None,
    )


def _refuse_unbuilt(submit: engine_pb2.Submit) -> None:
    if submit.media:
        raise Unimplemented("media in the prompt is not served by this engine", field="media")
    if submit.HasField("pooling"):
        raise Unimplemented("pooled vectors are not served by this engine", field="pooling")
    if submit.sampling.HasField("constraint"):
        raise Unimplemented("grammars are not served by this engine", field="constraint")


def _id_set(ids: Iterable[int], field: str, vocab_size: int) -> frozenset[int]:
    found = frozenset(ids)
    if found and max(found) >= vocab_size:
        raise InvalidArgument(f"{field} has an id outside [0, {vocab_size})", field=field)
    return found


def _top(field: str, value: int) -> int:
    if value > _LOGPROBS_LIMIT:
        raise InvalidArgument(f"{field} is {value}, above {_LOGPROBS_LIMIT}", field=field)
    return value


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
        request_id=row.request_id,
        traceparent=row.traceparent,
    )


def to_outcome(result: worker_pb2.StepResult) -> StepOutcome:
    """A result as the core takes it. Raises InvalidArgument where its columns do not fit together."""
    rows = to_column(result.row_i32le, "i", "row_i32le")
    epochs = to_column(result.epoch_u64le, "Q", "epoch_u64le")
    counts = to_column(result.token_count_i32le, "i", "token_count_i32le")
    token_ids = to_column(result.token_id_i32le, "i", "token_id_i32le")
    if not len(rows) == len(epochs) == len(result.row_status_u8) == len(counts):
        raise InvalidArgument("the columns of the result differ in length", field="row_i32le")
    if counts and (min(counts) < 0 or sum(counts) != len(token_ids)):
        raise InvalidArgument("token_count_i32le does not add up to the tokens", field="token_count_i32le")
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
        prompt_logprobs=tuple(
            PromptLogprobsChunk(chunk.row, chunk.epoch, chunk.first_position, to_logprobs(chunk.logprobs, None))
            for chunk in result.prompt_logprobs
        ),
        duration_us=result.duration_us,
    )


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


def frames(out: Outgoing, step_id: int) -> Iterator[engine_pb2.AttachResponse]:
    """The outputs first, then the ends of what failed, then refusals: all that `out` tells."""
    if out.draining:
        yield engine_pb2.AttachResponse(draining=engine_pb2.Draining())
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
    )


def _logprobs(columns: LogprobColumns) -> common_pb2.Logprobs:
    return common_pb2.Logprobs(
        count_i32le=to_bytes(columns.counts),
        token_id_i32le=to_bytes(columns.token_ids),
        logprob_f32le=to_bytes(columns.logprobs),
        rank_i32le=to_bytes(columns.ranks),
    )


def _failed(event: Failed) -> engine_pb2.Failed:
    failure = common_pb2.Failure(
        code=event.failure.code, message=event.failure.message, error_id=event.failure.error_id
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


def text_file_message(file: TextFile) -> common_pb2.TextFileInfo:
    """A text file by name, length and hash."""
    return common_pb2.TextFileInfo(name=file.name, size=len(file.content), sha256=file.sha256)
