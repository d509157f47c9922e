"""Columns of the engine's frames: the right rows, and a clear refusal of any that do not fit."""

from __future__ import annotations

import math
import struct
from typing import Literal

import pytest

from protos import common_pb2, engine_pb2
from services.common.errors import InvalidArgument
from services.gateway import wire
from services.gateway.request import Constraint, FinishReason, GenerateSpec, SamplingParams, TokenLogprob


def u32(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def outputs(**changes: object) -> engine_pb2.StepOutputs:
    columns: dict[str, object] = {
        "handle_u32le": u32(7, 7, 9),
        "choice_u32le": u32(0, 1, 0),
        "first_index_u32le": u32(4, 0, 2),
        "token_count_u32le": u32(2, 0, 1),
        "token_id_i32le": u32(100, 101, 102),
        "finish_u8": bytes([0, 4, 1]),
        **changes,
    }
    return engine_pb2.StepOutputs(**columns)  # type: ignore[arg-type]


def test_rows_take_their_tokens_in_order() -> None:
    got = [(*row[:3], list(row[3]), row[4]) for row in wire.rows(outputs())]
    assert got == [
        (7, 0, 4, [100, 101], FinishReason.NONE),
        (7, 1, 0, [], FinishReason.LENGTH),
        (9, 0, 2, [102], FinishReason.EOS),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"handle_u32le": u32(7, 7)},
        {"handle_u32le": u32(7, 7, 9)[:-1]},
        {"token_count_u32le": u32(2, 0, 2)},
        {"token_id_i32le": u32(100, 101)},
        {"finish_u8": bytes([0, 0])},
        {"finish_u8": bytes([0, 0, 99])},
        {"logprobs": common_pb2.Logprobs(count_i32le=u32(0))},
        {"logprobs": common_pb2.Logprobs(count_i32le=u32(1, 1, 1))},
    ],
)
def test_columns_that_do_not_fit_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(wire.WireError):
        list(wire.rows(outputs(**change)))


def test_log_probabilities_stand_with_their_tokens() -> None:
    message = common_pb2.Logprobs(
        count_i32le=u32(2, 0, 1),
        token_id_i32le=u32(100, 5, 102),
        logprob_f32le=struct.pack("<3f", -0.5, -math.inf, -2.0),
        rank_i32le=u32(1, 1, 3),
    )
    got = [row[5] for row in wire.rows(outputs(logprobs=message))]
    assert got == [
        [(TokenLogprob(100, -0.5, 1), TokenLogprob(5, -math.inf, 1)), ()],
        [],
        [(TokenLogprob(102, -2.0, 3),)],
    ]


def test_a_failure_keeps_its_details() -> None:
    error = wire.failure(
        common_pb2.Failure(code=3, message="too long", field="prompt", reason="R", retry_after_ms=5, error_id="e")
    )
    assert isinstance(error, InvalidArgument)
    assert (error.message, error.field, error.reason) == ("too long", "prompt", "R")
    assert (error.retry_after_ms, error.error_id) == (5, "e")
    assert wire.failure(common_pb2.Failure(code=3, message="x")).field is None


def test_an_engine_of_another_contract_is_refused() -> None:
    hello = engine_pb2.EngineServiceHelloResponse(engine=common_pb2.Peer(name="e", contract_min=2, contract_max=3))
    with pytest.raises(wire.WireError, match="2 to 3"):
        wire.engine_info(hello, {})


@pytest.mark.parametrize(
    ("wanted", "sent"),
    [
        (Constraint("json_schema", "{}"), common_pb2.Constraint(json_schema="{}")),
        (Constraint("regex", "a+"), common_pb2.Constraint(regex="a+")),
        (Constraint("lark", "start: x"), common_pb2.Constraint(lark="start: x")),
        (Constraint("json_object", ""), common_pb2.Constraint(json_object=True)),
        (
            Constraint("lark", "start: x", (7, 8)),
            common_pb2.Constraint(lark="start: x", starts_after=common_pb2.TokenIds(ids=[7, 8])),
        ),
    ],
)
def test_a_constraint_goes_with_its_request(wanted: Constraint, sent: common_pb2.Constraint) -> None:
    params = SamplingParams(max_tokens=1, seed=1, constraint=wanted)
    assert wire.sampling(params).constraint == sent
    assert not wire.sampling(SamplingParams(max_tokens=1, seed=1)).HasField("constraint")


@pytest.mark.parametrize(
    ("pooling", "sent"), [("mean", common_pb2.POOLING_MEAN), ("last", common_pb2.POOLING_LAST), (None, None)]
)
def test_a_request_for_a_vector_says_how(pooling: Literal["mean", "last"] | None, sent: int | None) -> None:
    spec = GenerateSpec("id", "m", (1, 2), SamplingParams(max_tokens=1, seed=1), pooling=pooling)
    submit = wire.submit(3, b"t" * 16, spec, None, []).submit
    assert (submit.pooling if submit.HasField("pooling") else None) == sent


def test_a_vector_is_read_whole_or_refused() -> None:
    assert list(wire.pooled(engine_pb2.PooledOutput(values_f32le=struct.pack("<2f", 0.5, -1.0))).values) == [0.5, -1.0]
    with pytest.raises(wire.WireError):
        wire.pooled(engine_pb2.PooledOutput(values_f32le=b"\0" * 7))
