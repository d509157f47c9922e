"""Protobuf to plain data and back: golden bytes, round trips, and what is malformed."""

from __future__ import annotations

import struct
from array import array
from dataclasses import replace
from typing import Any

import pytest

from protos import common_pb2, engine_pb2, worker_pb2
from services.common.errors import InvalidArgument, TriptychError, Unimplemented
from services.engine.events import (
    FINISH_EOS,
    FINISH_LENGTH,
    FINISH_NONE,
    Failed,
    LogprobColumns,
    Owner,
    Pooled,
    PromptLogprobs,
    Started,
    StepFailure,
)
from services.engine.plan import NewRow, StepMasks, StepPlan
from services.engine.report import Load
from services.engine.request import Constraint, MediaItem
from services.engine.sessions import Outgoing
from services.engine.standing import ModelCard
from services.engine.wire import columns, frames, steps, submits

MODEL = ModelCard("m", "llama", 100, 1000, "f", "float32", ("generate", "image", "video"), 1)
PICTURE = MediaItem(b"h" * 32, "image", 0, 2, 2, (1, 4, 2), "10.0.0.1:7")
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def le(*values: float, code: str = "i") -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


def a_submit(**changes: Any) -> engine_pb2.Submit:
    fields: dict[str, Any] = {
        "handle": 7,
        "token": b"t" * 16,
        "request_id": "r",
        "prompt_id_i32le": le(5, 6, 7),
        "sampling": common_pb2.SamplingParams(max_tokens=9, seed=3),
    }
    return engine_pb2.Submit(**(fields | changes))


def a_media(**changes: Any) -> common_pb2.MediaRef:
    fields: dict[str, Any] = {"hash": b"h" * 32, "modality": "image", "offset": 0, "length": 2, "embeddings": 2}
    return common_pb2.MediaRef(**(fields | {"grid": [1, 4, 2]} | changes))


def a_constraint(**fields: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(max_tokens=9, min_tokens=2, constraint=common_pb2.Constraint(**fields))


def spec_of(submit: engine_pb2.Submit) -> Any:
    return submits.to_spec(submit, 11, model=MODEL, max_n=4, blob_address="10.0.0.1:7")


def test_columns_are_little_endian() -> None:
    assert columns.to_bytes(array("i", [1, -2])) == b"\x01\0\0\0\xfe\xff\xff\xff"
    assert columns.to_bytes(array("Q", [2**40])) == struct.pack("<Q", 2**40)
    assert columns.to_column(le(3, 4), "i", "x") == array("i", [3, 4])


def test_columns_are_swapped_on_a_big_endian_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "_SWAP", True)
    column = array("i", [1])
    assert columns.to_bytes(column) == b"\0\0\0\x01"
    assert column == array("i", [1]), "the caller's column stays as it is"
    assert columns.to_column(b"\0\0\0\x01", "i", "x") == array("i", [1])


def test_a_column_of_broken_length_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument) as refused:
        columns.to_column(b"12345", "i", "some_i32le")
    assert refused.value.field == "some_i32le"


def test_the_least_submit() -> None:
    spec = spec_of(a_submit())
    assert spec.owner == Owner(11, 7)
    assert spec.prompt == array("i", [5, 6, 7])
    assert (spec.n, spec.max_tokens, spec.min_tokens, spec.seed, spec.priority) == (1, 9, 0, 3, 0)
    assert spec.logprobs is None
    assert spec.prompt_logprobs is None
    assert spec.deadline_s is None
    assert spec.traceparent is None
    assert spec.replay == ()
    assert spec.media == ()
    assert spec.num_speculative_tokens is None


def test_the_fullest_submit() -> None:
    sampling = common_pb2.SamplingParams(
        n=2,
        max_tokens=9,
        min_tokens=1,
        eos_token_ids=[2],
        stop_token_ids=[3, 4],
        temperature=0.5,
        seed=2**63 + 1,
        logprobs=0,
        prompt_logprobs=20,
        num_speculative_tokens=0,
        logit_bias=[common_pb2.LogitBias(token_id=1, bias=-1)],
    )
    spec = spec_of(
        a_submit(
            sampling=sampling,
            priority=-2,
            tenant="t",
            cache_salt="s",
            deadline_ms=1500,
            gateway_state=b"g",
            traceparent=PARENT,
            media=[a_media(embeddings=1), a_media(modality="video", hash=b"v" * 32, offset=2, length=1, embeddings=1)],
            replay=[
                engine_pb2.ChoiceReplay(token_id_i32le=le(8, 9)),
                engine_pb2.ChoiceReplay(token_id_i32le=le(2), finish_reason=common_pb2.FINISH_REASON_EOS),
            ],
        )
    )
    assert (spec.n, spec.min_tokens, spec.eos_ids, spec.stop_ids) == (2, 1, frozenset({2}), frozenset({3, 4}))
    assert (spec.seed, spec.logprobs, spec.prompt_logprobs) == (2**63 + 1, 0, 20)
    assert (spec.priority, spec.tenant, spec.cache_salt, spec.deadline_s) == (-2, "t", "s", 1.5)
    assert (spec.gateway_state, spec.traceparent, spec.num_speculative_tokens) == (b"g", PARENT, 0)
    assert spec.media == (
        MediaItem(b"h" * 32, "image", 0, 2, 1, (1, 4, 2), "10.0.0.1:7"),
        MediaItem(b"v" * 32, "video", 2, 1, 1, (1, 4, 2), "10.0.0.1:7"),
    )
    assert [(replay.token_ids.tolist(), replay.finish) for replay in spec.replay] == [
        ([8, 9], FINISH_NONE),
        ([2], FINISH_EOS),
    ]
    assert common_pb2.SamplingParams.FromString(spec.sampling) == sampling, "the worker gets all of it"


@pytest.mark.parametrize(
    ("fields", "kind", "text"),
    [
        ({"json_object": True}, "json_object", ""),
        ({"json_schema": "{}"}, "json_schema", "{}"),
        ({"regex": "a+"}, "regex", "a+"),
        ({"lark": 'start: "a"'}, "lark", 'start: "a"'),
    ],
)
def test_a_constraint_stays_in_the_engine(fields: dict[str, Any], kind: str, text: str) -> None:
    spec = spec_of(a_submit(sampling=a_constraint(**fields, starts_after=common_pb2.TokenIds(ids=[7, 8]))))
    assert spec.constraint == Constraint(kind, text, (7, 8))
    assert spec.min_tokens == 2
    passed = common_pb2.SamplingParams.FromString(spec.sampling)
    assert passed == common_pb2.SamplingParams(max_tokens=9), "masks say when the output may end"


@pytest.mark.parametrize(
    ("changes", "kind", "field"),
    [
        ({"token": b"short"}, InvalidArgument, "token"),
        ({"prompt_id_i32le": b"abc"}, InvalidArgument, "prompt"),
        ({"gateway_state": bytes(64 * 1024 + 1)}, InvalidArgument, "gateway_state"),
        ({"sampling": common_pb2.SamplingParams(n=5)}, InvalidArgument, "n"),
        ({"sampling": common_pb2.SamplingParams(stop_token_ids=[100])}, InvalidArgument, "stop_token_ids"),
        ({"sampling": common_pb2.SamplingParams(eos_token_ids=[4_000_000_000])}, InvalidArgument, "eos_token_ids"),
        ({"sampling": common_pb2.SamplingParams(logprobs=21)}, InvalidArgument, "logprobs"),
        ({"sampling": common_pb2.SamplingParams(prompt_logprobs=21)}, InvalidArgument, "prompt_logprobs"),
        ({"replay": [engine_pb2.ChoiceReplay(token_id_i32le=b"1")]}, InvalidArgument, "replay[0]"),
        ({"media": [a_media(modality="audio")]}, Unimplemented, "media[0].modality"),
        ({"media": [a_media(modality="generate")]}, Unimplemented, "media[0].modality"),
        ({"media": [a_media(hash=b"h" * 31)]}, InvalidArgument, "media[0].hash"),
        ({"media": [a_media(length=0)]}, InvalidArgument, "media[0].length"),
        ({"media": [a_media(embeddings=3)]}, InvalidArgument, "media[0].embeddings"),
        ({"media": [a_media(embeddings=0)]}, InvalidArgument, "media[0].embeddings"),
        ({"media": [a_media(grid=[])]}, InvalidArgument, "media[0].grid"),
        ({"media": [a_media(grid=[2, 4])]}, InvalidArgument, "media[0].grid"),
        ({"media": [a_media(grid=[1, 2, 2, 2])]}, InvalidArgument, "media[0].grid"),
        ({"media": [a_media(modality="video", grid=[0, 2, 2])]}, InvalidArgument, "media[0].grid"),
        ({"media": [a_media(offset=2)]}, InvalidArgument, "media[0].offset"),
        ({"media": [a_media(), a_media(offset=1, length=1, embeddings=1)]}, InvalidArgument, "media[1].offset"),
        ({"media": [a_media(offset=1), a_media(length=1, embeddings=1)]}, InvalidArgument, "media[1].offset"),
        ({"media": [a_media()] * 1025}, InvalidArgument, "media"),
        ({"pooling": common_pb2.POOLING_MEAN}, Unimplemented, "pooling"),
        ({"sampling": a_constraint()}, InvalidArgument, "constraint"),
        ({"sampling": a_constraint(json_object=False)}, InvalidArgument, "constraint.json_object"),
        (
            {"sampling": a_constraint(regex="a", starts_after=common_pb2.TokenIds(ids=[100]))},
            InvalidArgument,
            "constraint.starts_after",
        ),
    ],
)
def test_a_submit_is_refused_by_field(changes: dict[str, Any], kind: type[TriptychError], field: str) -> None:
    with pytest.raises(kind) as refused:
        spec_of(a_submit(**changes))
    assert refused.value.field == field


EMBEDS = replace(MODEL, capabilities=(*MODEL.capabilities, "embed"))


@pytest.mark.parametrize(("pooling", "meant"), [(common_pb2.POOLING_MEAN, "mean"), (common_pb2.POOLING_LAST, "last")])
def test_a_submit_that_asks_for_a_vector(pooling: Any, meant: str) -> None:
    spec = submits.to_spec(a_submit(pooling=pooling), 11, model=EMBEDS, max_n=4)
    assert (spec.pooling, spec.max_tokens) == (meant, 1)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"pooling": common_pb2.POOLING_UNSPECIFIED}, "pooling"),
        ({"sampling": common_pb2.SamplingParams(n=2)}, "n"),
        ({"sampling": common_pb2.SamplingParams(logprobs=0)}, "logprobs"),
        ({"sampling": common_pb2.SamplingParams(prompt_logprobs=0)}, "prompt_logprobs"),
        ({"sampling": a_constraint(regex="a")}, "constraint"),
        ({"replay": [engine_pb2.ChoiceReplay(token_id_i32le=le(1))]}, "replay"),
    ],
)
def test_what_only_tokens_can_have_is_refused_beside_a_vector(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        submits.to_spec(a_submit(**{"pooling": common_pb2.POOLING_LAST, **changes}), 11, model=EMBEDS, max_n=4)
    assert refused.value.field == field


def test_a_row_is_told_how_it_pools() -> None:
    plan = StepPlan(step_id=9)
    for row, pooling in enumerate((None, "mean", "last")):
        plan.new_rows.append(NewRow(row, 5, array("i", [4]), 1, b"", 0, "", None, pooling=pooling))
    new = steps.step_message(plan).step.new_rows
    assert [row.HasField("pooling") for row in new] == [False, True, True]
    assert [row.pooling for row in new[1:]] == [common_pb2.POOLING_MEAN, common_pb2.POOLING_LAST]


def test_vectors_come_by_epoch_and_go_by_handle() -> None:
    message = worker_pb2.PooledVector(row=1, epoch=2**60, values_f32le=le(0.5, -0.25, code="f"))
    outcome = steps.to_outcome(worker_pb2.StepResult(step_id=1, status=1, pooled=[message]))
    assert outcome.pooled == {2**60: array("f", [0.5, -0.25])}
    (frame,) = frames.frames(Outgoing(pooled=[Pooled(Owner(1, 7), outcome.pooled[2**60])]), 3)
    assert list(frame.outputs.pooled) == [engine_pb2.PooledOutput(handle=7, values_f32le=message.values_f32le)]
    message.values_f32le += b"x"
    with pytest.raises(InvalidArgument, match="pooled"):
        steps.to_outcome(worker_pb2.StepResult(step_id=1, status=1, pooled=[message]))


def test_a_malformed_trace_is_ignored() -> None:
    assert spec_of(a_submit(traceparent="nonsense")).traceparent is None


def test_a_plan_becomes_a_step() -> None:
    sampling = common_pb2.SamplingParams(max_tokens=4, temperature=0.7)
    plan = StepPlan(step_id=9, resync=True)
    plan.freed_rows.append(3)
    plan.new_rows.append(
        NewRow(1, 2**60, array("i", [1, 2, 3]), 2, sampling.SerializeToString(), 2**64 - 1, "r", PARENT)
    )
    plan.new_rows.append(NewRow(2, 5, array("i", [4]), 1, b"", 0, "", None, (PICTURE,)))
    for column, value in ((plan.rows, 1), (plan.num_tokens, 3), (plan.num_computed, 0), (plan.first_writable, 2)):
        column.append(value)
    plan.flags.append(1)
    plan.block_counts.append(2)
    plan.block_ids.extend([8, 9])
    plan.draft_counts.append(2)
    plan.draft_ids.extend([5, 6])
    plan.encode.append(PICTURE)
    plan.dropped_media.append(b"g" * 32)
    step = steps.step_message(plan).step
    assert step == worker_pb2.Step(
        step_id=9,
        resync=True,
        freed_row_i32le=le(3),
        new_rows=[
            worker_pb2.NewRow(
                row=1,
                epoch=2**60,
                token_id_i32le=le(1, 2, 3),
                prompt_len=2,
                sampling=sampling,
                seed=2**64 - 1,
                request_id="r",
                traceparent=PARENT,
            ),
            worker_pb2.NewRow(
                row=2,
                epoch=5,
                token_id_i32le=le(4),
                prompt_len=1,
                sampling=common_pb2.SamplingParams(),
                media=[a_media()],
            ),
        ],
        row_i32le=le(1),
        num_tokens_i32le=le(3),
        num_computed_i32le=le(0),
        flags_u8=b"\x01",
        first_writable_i32le=le(2),
        block_count_i32le=le(2),
        block_id_i32le=le(8, 9),
        draft_count_i32le=le(2),
        draft_id_i32le=le(5, 6),
        encode=[worker_pb2.EncodeItem(media=a_media(), source="10.0.0.1:7")],
        dropped_media=[b"g" * 32],
    )


def test_a_step_that_only_frees_rows() -> None:
    plan = StepPlan(step_id=3, freed_rows=array("i", [4, 7]))
    assert steps.step_message(plan).step == worker_pb2.Step(step_id=3, freed_row_i32le=le(4, 7))


def test_masks_become_a_frame() -> None:
    masks = StepMasks(7, array("i", [3, 1]), b"\0\1", le(-1, 5))
    assert steps.masks_message(masks).masks == worker_pb2.StepMasks(
        step_id=7, row_i32le=le(3, 1), drop_u8=b"\0\1", mask_u32le=le(-1, 5)
    )


def a_result(**changes: Any) -> worker_pb2.StepResult:
    fields: dict[str, Any] = {
        "step_id": 4,
        "status": worker_pb2.STEP_STATUS_OK,
        "row_i32le": le(0, 2),
        "epoch_u64le": le(2**50, 6, code="Q"),
        "row_status_u8": b"\0\1",
        "token_count_i32le": le(1, 0),
        "token_id_i32le": le(42),
        "duration_us": 17,
    }
    return worker_pb2.StepResult(**(fields | changes))


def a_logprobs(*counts: int) -> common_pb2.Logprobs:
    entries = sum(counts)
    return common_pb2.Logprobs(
        count_i32le=le(*counts),
        token_id_i32le=le(*range(entries)),
        logprob_f32le=struct.pack(f"<{entries}f", *[-0.5] * entries),
        rank_i32le=le(*range(1, entries + 1)),
    )


def test_a_result_becomes_an_outcome() -> None:
    outcome = steps.to_outcome(
        a_result(
            logprobs=a_logprobs(2),
            prompt_logprobs=[worker_pb2.PromptLogprobs(row=0, epoch=3, first_position=1, logprobs=a_logprobs(1, 1))],
        )
    )
    assert (outcome.step_id, outcome.status, outcome.failure, outcome.duration_us) == (4, 1, None, 17)
    assert outcome.rows.tolist() == [0, 2]
    assert outcome.epochs.tolist() == [2**50, 6]
    assert outcome.row_status == b"\0\1"
    assert outcome.token_counts.tolist() == [1, 0]
    assert outcome.token_ids.tolist() == [42]
    assert outcome.logprobs is not None
    assert outcome.logprobs.ranks.tolist() == [1, 2]
    assert outcome.logprobs.logprobs.tolist() == [-0.5, -0.5]
    (chunk,) = outcome.prompt_logprobs
    assert (chunk.row, chunk.epoch, chunk.first_position, chunk.columns.counts.tolist()) == (0, 3, 1, [1, 1])


def test_a_failed_step_says_why() -> None:
    failure = common_pb2.Failure(code=13, message="no", error_id="e")
    outcome = steps.to_outcome(worker_pb2.StepResult(step_id=1, status=2, failure=failure))
    assert outcome.failure == StepFailure(13, "no", "e")
    assert steps.to_outcome(worker_pb2.StepResult(failure=common_pb2.Failure())).failure == StepFailure(0, "", None)


@pytest.mark.parametrize(
    "changes",
    [
        {"row_i32le": b"123"},
        {"row_i32le": le(0)},
        {"epoch_u64le": le(1, code="Q")},
        {"row_status_u8": b""},
        {"token_count_i32le": le(1)},
        {"token_count_i32le": le(2, 0)},
        {"token_count_i32le": le(-1, 2)},
        {"token_id_i32le": b""},
        {"missing_media": [b"short"]},
        {"logprobs": a_logprobs(1, 1)},
        {"logprobs": common_pb2.Logprobs(count_i32le=le(1), token_id_i32le=le(1))},
        {"prompt_logprobs": [worker_pb2.PromptLogprobs(logprobs=common_pb2.Logprobs(count_i32le=le(1)))]},
    ],
)
def test_a_result_that_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        steps.to_outcome(a_result(**changes))


def test_drafts_of_the_workers_own_are_refused_by_name() -> None:
    with pytest.raises(Unimplemented) as caught:
        steps.to_outcome(a_result(proposed_count_i32le=le(1, 0)))
    assert caught.value.field == "proposed_count_i32le"


def test_what_is_told_comes_outputs_first() -> None:
    out = Outgoing(draining=True)
    columns = LogprobColumns(array("i", [0, 1]), array("i", [5]), array("f", [-1.0]), array("i", [1]))
    out.rows.handles.append(4_000_000_000)
    out.rows.choices.append(1)
    out.rows.first_indexes.append(6)
    out.rows.token_counts.append(2)
    out.rows.token_ids.extend([8, 9])
    out.rows.finishes.append(FINISH_LENGTH)
    out.rows.logprobs = columns
    out.started.append(Started(Owner(1, 2), 16, 0.25))
    out.prompt_logprobs.append(PromptLogprobs(Owner(1, 2), 3, columns))
    out.failed.append(Failed(Owner(1, 5), 0, StepFailure(13, "broke", "e")))
    out.rejected.append((6, InvalidArgument("bad", field="n", reason="R", retry_after_ms=5)))
    draining, outputs, failed, rejected = frames.frames(out, 77)
    assert draining.WhichOneof("frame") == "draining"
    logprobs = common_pb2.Logprobs(
        count_i32le=le(0, 1), token_id_i32le=le(5), logprob_f32le=struct.pack("<f", -1), rank_i32le=le(1)
    )
    assert outputs.outputs == engine_pb2.StepOutputs(
        step_id=77,
        handle_u32le=le(4_000_000_000, code="I"),
        choice_u32le=le(1),
        first_index_u32le=le(6),
        token_count_u32le=le(2),
        token_id_i32le=le(8, 9),
        finish_u8=b"\x04",
        logprobs=logprobs,
        started=[engine_pb2.Started(handle=2, cached_tokens=16, queue_us=250_000)],
        prompt_logprobs=[engine_pb2.PromptLogprobsOutput(handle=2, first_position=3, logprobs=logprobs)],
    )
    assert failed.failed == engine_pb2.Failed(
        handle=5, choice=0, failure=common_pb2.Failure(code=13, message="broke", error_id="e")
    )
    assert rejected.rejected == engine_pb2.Rejected(
        handle=6, failure=common_pb2.Failure(code=3, message="bad", field="n", reason="R", retry_after_ms=5)
    )


def test_draining_says_for_how_long() -> None:
    (unlimited,) = frames.frames(Outgoing(draining=True), 1)
    assert not unlimited.draining.HasField("grace_ms")
    (limited,) = frames.frames(Outgoing(draining=True, grace_s=1.5), 1)
    assert limited.draining.grace_ms == 1500


def test_nothing_to_tell_is_no_frame() -> None:
    assert list(frames.frames(Outgoing(), 1)) == []


def test_the_load_in_milliseconds() -> None:
    load = frames.load_message(Load(1, 2, 3, 4, 5, 6), 0.25)
    assert load == common_pb2.Load(
        running=1, waiting=2, waiting_tokens=3, running_tokens=4, free_blocks=5, total_blocks=6, silence_ms=250
    )
