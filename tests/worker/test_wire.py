"""Frames to steps and results to frames: the right values, and every column that can be wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from protos import common_pb2, worker_pb2
from services.common.channel import CHUNK_BYTES
from services.common.errors import InvalidArgument, TriptychError, Unimplemented
from services.worker import wire
from services.worker.step import (
    POOLS,
    ROW_OK,
    Candidate,
    MediaItem,
    Pooled,
    PromptLogprobs,
    RowResult,
    SamplingParams,
    StepOutput,
)
from tests.worker.columns import SHAPE, frame, new_row, pack, unpack

BOUNDS = wire.Bounds(SHAPE, kv_groups=1, vocab_size=100)


def test_a_whole_step() -> None:
    message = frame(7, [(2, 0, 3), (0, 9, 1)], [new_row(2, [4, 5, 6], epoch=2**63, prompt_len=2)], freed=[1, 2])
    message.first_writable_i32le = pack(0, 10)
    decoded = wire.decode_step(message, BOUNDS, 7.5)
    assert (decoded.step_id, decoded.resync) == (7, False)
    assert decoded.freed_rows.tolist() == [1, 2]
    assert decoded.rows.tolist() == [2, 0]
    assert decoded.num_tokens.tolist() == [3, 1]
    assert decoded.num_computed.tolist() == [0, 9]
    assert decoded.flags.tolist() == [1, 1]
    assert decoded.first_writable.tolist() == [0, 10]
    assert decoded.block_counts.tolist() == [5, 0]
    assert decoded.block_ids.tolist() == [0, 1, 2, 3, 4]
    (new,) = decoded.new_rows
    assert (new.row, new.epoch, new.tokens.tolist(), new.prompt_len) == (2, 2**63, [4, 5, 6], 2)
    assert (new.sampling, new.request_id, new.traceparent, new.fault) == (
        SamplingParams(seed=7),
        "request-2",
        None,
        None,
    )


def test_an_empty_step_frees_rows() -> None:
    assert wire.decode_step(worker_pb2.Step(step_id=1, freed_row_i32le=pack(3)), BOUNDS, 7.5).freed_rows.tolist() == [3]


def test_sampling_parameters() -> None:
    message = common_pb2.SamplingParams(
        max_tokens=9,
        min_tokens=2,
        eos_token_ids=[1],
        stop_token_ids=[2, 3],
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        min_p=0.25,
        repetition_penalty=1.5,
        frequency_penalty=-2.0,
        presence_penalty=2.0,
        logit_bias=[common_pb2.LogitBias(token_id=5, bias=-100)],
        allowed_token_ids=[1, 9],
        banned_sequences=[common_pb2.TokenIds(ids=[1, 2])],
        seed=1,
        logprobs=0,
        prompt_logprobs=20,
    )
    assert wire.decode_sampling(message, 2**64 - 1, 100) == SamplingParams(
        seed=2**64 - 1,
        min_tokens=2,
        eos_ids=(1,),
        stop_ids=(2, 3),
        temperature=0.0,
        top_p=0.5,
        top_k=7,
        min_p=0.25,
        repetition_penalty=1.5,
        frequency_penalty=-2.0,
        presence_penalty=2.0,
        logit_bias=((5, -100.0),),
        allowed_ids=(1, 9),
        banned_sequences=((1, 2),),
        logprobs=0,
        prompt_logprobs=20,
    )


Change = Callable[[Any], None]


def put(name: str, value: Any) -> Change:
    return lambda message: setattr(message, name, value)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("row_i32le", put("row_i32le", b"\0\0\0")),
        ("row_i32le", put("row_i32le", pack(0, 0))),
        ("row_i32le", put("row_i32le", pack(0, SHAPE.max_num_seqs))),
        ("row_i32le", put("row_i32le", pack(-1, 0))),
        ("num_tokens_i32le", put("num_tokens_i32le", pack(3))),
        ("num_tokens_i32le", put("num_tokens_i32le", pack(3, 0))),
        ("num_tokens_i32le", put("num_tokens_i32le", pack(3, -1))),
        ("num_tokens_i32le", put("num_tokens_i32le", pack(3, SHAPE.max_num_batched_tokens))),
        ("num_computed_i32le", put("num_computed_i32le", pack(0, -1))),
        ("num_computed_i32le", put("num_computed_i32le", pack(0, SHAPE.max_model_len))),
        ("num_computed_i32le", put("num_computed_i32le", pack(SHAPE.max_model_len - 2, 0))),
        ("num_computed_i32le", put("num_computed_i32le", b"")),
        ("flags_u8", put("flags_u8", b"\1")),
        ("flags_u8", put("flags_u8", b"\1\x08")),
        ("first_writable_i32le", put("first_writable_i32le", pack(1))),
        ("block_count_i32le", put("block_count_i32le", pack(5))),
        ("block_count_i32le", put("block_count_i32le", pack(5, -1))),
        ("block_id_i32le", put("block_id_i32le", pack(1, 2))),
        ("block_id_i32le", put("block_id_i32le", pack(0, 1, 2, 3, SHAPE.num_blocks))),
        ("block_id_i32le", put("block_id_i32le", pack(0, 1, 2, 3, -1))),
        ("freed_row_i32le", put("freed_row_i32le", pack(99))),
        ("draft_count_i32le", put("draft_count_i32le", b"\1")),
        ("draft_count_i32le", put("draft_count_i32le", pack(0))),
        ("draft_count_i32le", put("draft_count_i32le", pack(0, -1))),
        ("draft_count_i32le", put("draft_count_i32le", pack(0, 1))),
        ("draft_count_i32le", put("draft_count_i32le", pack(3, 0))),
        ("draft_count_i32le", put("draft_id_i32le", pack(1))),
        ("draft_id_i32le", put("draft_count_i32le", pack(2, 0))),
        ("new_rows", lambda message: message.new_rows.add(row=99)),
        ("new_rows.row", lambda message: message.new_rows.append(message.new_rows[0])),
        ("new_rows.prompt_len", lambda message: setattr(message.new_rows[0], "prompt_len", 0)),
        ("new_rows.prompt_len", lambda message: setattr(message.new_rows[0], "prompt_len", 4)),
        ("new_rows.token_id_i32le", lambda message: setattr(message.new_rows[0], "token_id_i32le", b"\1")),
    ],
)  # fmt: skip
def test_a_malformed_column_is_named(field: str, change: Change) -> None:
    message = frame(1, [(2, 0, 3), (0, 9, 1)], [new_row(2, [4, 5, 6])])
    change(message)
    with pytest.raises(InvalidArgument) as caught:
        wire.decode_step(message, BOUNDS, 7.5)
    assert caught.value.field == field
    assert field.rsplit(".", maxsplit=1)[-1] in caught.value.message


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("flags_u8", put("flags_u8", b"\1\x04")),
        ("encode", lambda message: message.encode.add()),
        ("dropped_media", lambda message: message.dropped_media.append(b"0" * 32)),
    ],
)
def test_what_is_not_built_is_refused_by_name(field: str, change: Change) -> None:
    message = frame(1, [(2, 0, 3), (0, 9, 1)], [new_row(2, [4, 5, 6])])
    change(message)
    with pytest.raises(Unimplemented) as caught:
        wire.decode_step(message, BOUNDS, 7.5)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("named", "sampling"),
    [
        ("logprobs", {"logprobs": 21}),
        ("prompt_logprobs", {"prompt_logprobs": 21}),
        ("temperature", {"temperature": math.nan}),
        ("temperature", {"temperature": -0.5}),
        ("temperature", {"temperature": math.inf}),
        ("top_p", {"top_p": 0.0}),
        ("top_p", {"top_p": 1.5}),
        ("min_p", {"min_p": -0.1}),
        ("repetition_penalty", {"repetition_penalty": 0.0}),
        ("frequency_penalty", {"frequency_penalty": 2.5}),
        ("presence_penalty", {"presence_penalty": math.nan}),
        ("logit_bias", {"logit_bias": [common_pb2.LogitBias(token_id=100, bias=1)]}),
        ("logit_bias", {"logit_bias": [common_pb2.LogitBias(token_id=1, bias=math.nan)]}),
        ("allowed_token_ids", {"allowed_token_ids": [100]}),
        ("stop_token_ids", {"stop_token_ids": [2**31]}),
        ("eos_token_ids", {"eos_token_ids": [100]}),
        ("banned_sequences", {"banned_sequences": [common_pb2.TokenIds(ids=[1, 100])]}),
    ],
)
def test_a_bad_request_is_at_fault_alone(named: str, sampling: dict[str, Any]) -> None:
    message = frame(1, [(2, 0, 1), (0, 0, 1)], [new_row(2, [4], **sampling), new_row(0, [4])])
    bad, good = wire.decode_step(message, BOUNDS, 7.5).new_rows
    assert bad.fault is not None
    assert named in bad.fault
    assert good.fault is None


def test_ids_outside_the_vocabulary_and_media_are_faults() -> None:
    for ids in ([100], [-1]):
        (new,) = wire.decode_step(frame(1, [(0, 0, 1)], [new_row(0, ids)]), BOUNDS, 7.5).new_rows
        assert "token_id_i32le" in (new.fault or "")
    message = frame(1, [(0, 0, 1)], [new_row(0, [1])])
    message.new_rows[0].media.add(modality="image")
    assert "media" in (wire.decode_step(message, BOUNDS, 7.5).new_rows[0].fault or "")


DRAFTED = {"draft_count_i32le": pack(2, 0, 1), "draft_id_i32le": pack(7, 99, 8)}


def drafted(**changes: Any) -> Any:
    message = frame(1, [(2, 9, 3), (0, 9, 1), (1, 9, 2)])
    for name, value in (DRAFTED | changes).items():
        setattr(message, name, value)
    return message


def test_drafts() -> None:
    decoded = wire.decode_step(drafted(), BOUNDS, 7.5)
    assert decoded.draft_counts.tolist() == [2, 0, 1]
    assert decoded.draft_ids.tolist() == [7, 99, 8]
    without = wire.decode_step(drafted(draft_count_i32le=pack(0, 0, 0), draft_id_i32le=b""), BOUNDS, 7.5)
    assert len(without.draft_counts) == len(without.draft_ids) == 0


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("draft_id_i32le", {"draft_id_i32le": pack(7, 100, 8)}),
        ("draft_id_i32le", {"draft_id_i32le": pack(7, -1, 8)}),
        ("draft_id_i32le", {"draft_id_i32le": pack(7, 9)}),
        ("draft_id_i32le", {"draft_id_i32le": pack(7, 9, 8, 8)}),
        ("draft_count_i32le", {"draft_count_i32le": pack(2, 1, 0)}),
        ("draft_count_i32le", {"flags_u8": b"\1\1\0"}),
        ("num_computed_i32le", {"num_computed_i32le": pack(SHAPE.max_model_len - 2, 9, 9)}),
    ],
)
def test_drafts_that_do_not_fit_are_named(field: str, changes: dict[str, bytes]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        wire.decode_step(drafted(**changes), BOUNDS, 7.5)
    assert caught.value.field == field


def test_some_rows_of_a_step() -> None:
    message = drafted(first_writable_i32le=pack(1, 2, 3), block_count_i32le=pack(1, 0, 0, 2, 0, 1), flags_u8=b"\1\0\1")
    message.block_id_i32le = pack(11, 12, 13, 14)
    some = wire.decode_step(message, replace(BOUNDS, kv_groups=2), 7.5).only(np.array([True, False, True]))
    assert (some.rows.tolist(), some.num_tokens.tolist(), some.num_computed.tolist()) == ([2, 1], [3, 2], [9, 9])
    assert (some.flags.tolist(), some.first_writable.tolist()) == ([1, 1], [1, 3])
    assert (some.block_counts.tolist(), some.block_ids.tolist()) == ([1, 0, 0, 1], [11, 14])
    assert (some.draft_counts.tolist(), some.draft_ids.tolist()) == ([2, 1], [7, 99, 8])
    plain = wire.decode_step(frame(1, [(2, 9, 3), (0, 9, 1)]), BOUNDS, 7.5).only(np.array([False, True]))
    assert (plain.rows.tolist(), plain.draft_counts.tolist(), plain.draft_ids.tolist()) == ([0], [], [])


MEDIA = replace(BOUNDS, media=True)
ITEM: dict[str, Any] = {
    "hash": b"h" * 32,
    "modality": "image",
    "offset": 1,
    "length": 3,
    "embeddings": 2,
    "grid": [1, 4, 2],
}


def test_media() -> None:
    message = frame(1, [(0, 0, 2)], [new_row(0, [4, 5, 6, 7, 8, 9])])
    message.new_rows[0].media.add(**ITEM)
    message.new_rows[0].media.add(**{**ITEM, "offset": 4, "length": 2})
    message.encode.add(media=common_pb2.MediaRef(**ITEM), source="127.0.0.1:9")
    message.dropped_media.append(b"x" * 32)
    decoded = wire.decode_step(message, MEDIA, 7.5)
    item = MediaItem(b"h" * 32, "image", 1, 3, 2, (1, 4, 2))
    assert decoded.encode == (replace(item, source="127.0.0.1:9"),)
    assert decoded.dropped_media == (b"x" * 32,)
    assert decoded.new_rows[0].media == (item, replace(item, offset=4, length=2))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("dropped_media", lambda message: message.dropped_media.append(b"x" * 31)),
        ("encode.media.hash", lambda message: message.encode.add(media=common_pb2.MediaRef(**{**ITEM, "hash": b""}))),
        ("encode.media", lambda message: message.encode.add(media=common_pb2.MediaRef(**{**ITEM, "embeddings": 4}))),
        ("encode.media", lambda message: message.encode.add()),
        (
            "encode.media.grid",
            lambda message: message.encode.add(media=common_pb2.MediaRef(**{**ITEM, "grid": [1, 4]})),
        ),
        (
            "encode.media.grid",
            lambda message: message.encode.add(media=common_pb2.MediaRef(**{**ITEM, "grid": [0, 4, 2]})),
        ),
        (
            "encode.media.grid",
            lambda message: message.encode.add(media=common_pb2.MediaRef(**{**ITEM, "modality": "audio"})),
        ),
    ],
)
def test_malformed_media_are_named(field: str, change: Change) -> None:
    message = frame(1, [(0, 0, 1)], [new_row(0, [4])])
    change(message)
    with pytest.raises(InvalidArgument) as caught:
        wire.decode_step(message, MEDIA, 7.5)
    assert caught.value.field == field


@pytest.mark.parametrize("offsets", [(3,), (1, 3), (2, 0)])
def test_media_that_do_not_lie_in_the_prompt_one_after_another_are_a_fault(offsets: tuple[int, ...]) -> None:
    message = frame(1, [(0, 0, 2)], [new_row(0, [4, 5, 6, 7, 8, 9], prompt_len=5)])
    for offset in offsets:
        message.new_rows[0].media.add(**{**ITEM, "offset": offset})
    (new,) = wire.decode_step(message, MEDIA, 7.5).new_rows
    assert "media at" in (new.fault or "")


def test_results() -> None:
    results = (
        RowResult(3, 2**63 + 5, 0, (17,), ((Candidate(17, -0.5, 2), Candidate(4, -0.25, 1)),)),
        RowResult(1, 6, 1),
        RowResult(0, 7, 0, (18,)),
    )
    prompt = PromptLogprobs(3, 9, 0, ((), (Candidate(5, -1.0, 1),)))
    message = wire.encode_result(StepOutput(12, results, (prompt,)), duration_us=99)
    assert (message.step_id, message.status, message.duration_us) == (12, worker_pb2.STEP_STATUS_OK, 99)
    assert unpack(message.row_i32le) == [3, 1, 0]
    assert np.frombuffer(message.epoch_u64le, "<u8").tolist() == [2**63 + 5, 6, 7]
    assert message.row_status_u8 == b"\0\1\0"
    assert unpack(message.token_count_i32le) == [1, 0, 1]
    assert unpack(message.token_id_i32le) == [17, 18]
    assert unpack(message.logprobs.count_i32le) == [2, 0]
    assert unpack(message.logprobs.token_id_i32le) == [17, 4]
    assert np.frombuffer(message.logprobs.logprob_f32le, "<f4").tolist() == [-0.5, -0.25]
    assert unpack(message.logprobs.rank_i32le) == [2, 1]
    (chunk,) = message.prompt_logprobs
    assert (chunk.row, chunk.epoch, chunk.first_position) == (3, 9, 0)
    assert unpack(chunk.logprobs.count_i32le) == [0, 1]
    bare = wire.encode_result(StepOutput(1, results[2:], missing_media=(b"h" * 32,)), 0)
    assert not bare.HasField("logprobs")
    assert list(bare.missing_media) == [b"h" * 32]


def test_failures() -> None:
    failed = wire.encode_failed(4, InvalidArgument("no", field="row_i32le"))
    assert (failed.status, failed.failure.code, failed.failure.field) == (worker_pb2.STEP_STATUS_FAILED, 3, "row_i32le")
    assert wire.encode_failed(4, TriptychError("x", error_id="ab")).failure.error_id == "ab"
    assert wire.encode_skipped(5).status == worker_pb2.STEP_STATUS_SKIPPED


def test_text_files_in_pieces() -> None:
    files = {"big": bytes(range(256)) * 9000, "empty": b"", "small": b"x"}
    joined: dict[str, bytes] = {}
    for message in wire.text_file_chunks(files):
        chunk = message.chunk
        assert len(chunk.data) <= CHUNK_BYTES
        assert chunk.offset == len(joined.get(chunk.file.name, b""))
        joined[chunk.file.name] = joined.get(chunk.file.name, b"") + chunk.data
        assert chunk.file.size == len(files[chunk.file.name])
    assert joined == files


@pytest.mark.parametrize(
    "missing", ["num_blocks", "block_size", "max_num_seqs", "max_model_len", "max_num_batched_tokens"]
)
def test_a_shape_needs_every_number(missing: str) -> None:
    numbers = dict.fromkeys(("num_blocks", "block_size", "max_num_seqs", "max_model_len", "max_num_batched_tokens"), 8)
    numbers[missing] = 0
    with pytest.raises(InvalidArgument, match=missing):
        wire.decode_shape(worker_pb2.InitCacheRequest(engine_incarnation=1, **numbers))


@pytest.mark.parametrize(
    ("pooling", "meant"), [(None, None), (common_pb2.POOLING_MEAN, "mean"), (common_pb2.POOLING_LAST, "last")]
)
def test_how_a_row_pools(pooling: Any, meant: str | None) -> None:
    message = frame(1, [(2, 0, 3)], [new_row(2, [4, 5, 6])])
    if pooling is not None:
        message.new_rows[0].pooling = pooling
    (row,) = wire.decode_step(message, BOUNDS, 7.5).new_rows
    assert (row.pooling, row.fault) == (meant, None)


def test_an_unknown_way_of_pooling_fails_the_row_alone() -> None:
    message = frame(1, [(2, 0, 3)], [new_row(2, [4, 5, 6])])
    message.new_rows[0].pooling = common_pb2.POOLING_UNSPECIFIED
    (row,) = wire.decode_step(message, BOUNDS, 7.5).new_rows
    assert row.fault == "pooling 0 is no way of pooling"


def test_pooled_vectors_where_the_runner_makes_them() -> None:
    message = frame(1, [(2, 0, 3)], [new_row(2, [4, 5, 6])])
    message.flags_u8 = bytes([POOLS])
    with pytest.raises(Unimplemented, match="pooled vectors"):
        wire.decode_step(message, BOUNDS, 7.5)
    assert wire.decode_step(message, replace(BOUNDS, pools=True), 7.5).flags.tolist() == [POOLS]
    output = StepOutput(1, (RowResult(2, 9, ROW_OK),), pooled=(Pooled(2, 9, (0.5, -1.0)),))
    (vector,) = wire.encode_result(output, 0).pooled
    assert (vector.row, vector.epoch) == (2, 9)
    assert np.frombuffer(vector.values_f32le, "<f4").tolist() == [0.5, -1.0]
