"""Cursors: whatever a stream takes, and whenever it breaks, the gateway can put the tokens together."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidArgument
from services.engine.events import (
    FINISH_EOS,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_NONE,
    Failed,
    LogprobColumns,
    Owner,
    Pooled,
    PromptLogprobs,
    Started,
    StepFailure,
    Tokens,
)
from services.engine.records import Record, record_of
from services.engine.request import Replay, RequestSpec
from services.engine.sessions import FRAME_TOKENS, Outgoing, Session, Sessions

OWNER = Owner(1, 5)
SPEC = RequestSpec(
    owner=OWNER,
    token=b"t" * 16,
    request_id="r",
    prompt=array("i", [1]),
    sampling=b"",
    n=1,
    max_tokens=100,
    min_tokens=0,
    eos_ids=frozenset(),
    stop_ids=frozenset(),
    seed=0,
    logprobs=None,
    prompt_logprobs=None,
)


def a_session(spec: RequestSpec = SPEC) -> tuple[Sessions, Session, Record]:
    sessions = Sessions()
    session = sessions.open(1, "g")
    session.attach()
    record = record_of(spec, 0.0)
    session.accept(record)
    session.take()
    return sessions, session, record


def tokens(
    first: int, *ids: int, finish: int = FINISH_NONE, choice: int = 0, top: int | None = None, handle: int = 5
) -> Tokens:
    logprobs = None
    if top is not None:
        entries = [token for token in ids for _ in range(top)]
        logprobs = LogprobColumns(
            array("i", [top] * len(ids)),
            array("i", entries),
            array("f", map(float, entries)),
            array("i", range(1, len(entries) + 1)),
        )
    return Tokens(Owner(1, handle), choice, first, array("i", ids), finish, logprobs)


def rows(out: Outgoing) -> list[tuple[int, int, int, list[int], int]]:
    result, position = [], 0
    for index, count in enumerate(out.rows.token_counts):
        ids = out.rows.token_ids[position : position + count].tolist()
        position += count
        result.append(
            (
                out.rows.handles[index],
                out.rows.choices[index],
                out.rows.first_indexes[index],
                ids,
                out.rows.finishes[index],
            )
        )
    assert position == len(out.rows.token_ids)
    return result


def test_steps_merge_until_the_stream_takes_them() -> None:
    _, session, record = a_session()
    session.tell(tokens(0, 10), record, 0.5)
    session.tell(tokens(1, 11), record, 0.5)
    assert session.wake.is_set()
    assert rows(session.take()) == [(5, 0, 0, [10, 11], FINISH_NONE)]
    assert not session.wake.is_set()
    session.tell(tokens(2, 12, finish=FINISH_EOS), record, 0.5)
    assert rows(session.take()) == [(5, 0, 2, [12], FINISH_EOS)]
    assert session.records == {}


def test_the_handle_is_free_once_the_end_has_been_taken() -> None:
    sessions, session, record = a_session()
    with pytest.raises(InvalidArgument):
        session.check_free(5)
    session.tell(tokens(0, finish=FINISH_EOS), record, 0.5)
    with pytest.raises(InvalidArgument):
        session.check_free(5)
    assert sessions.live == 1
    session.take()
    session.check_free(5)
    assert sessions.live == 0
    assert sessions.idle.is_set()


def test_a_new_stream_is_told_all_that_is_live_again() -> None:
    _, session, record = a_session(replace(SPEC, n=2))
    session.tell(Started(OWNER, 4, 0.1), record, 0.5)
    session.tell(PromptLogprobs(OWNER, 0, LogprobColumns(array("i"), array("i"), array("f"), array("i"))), record, 0.5)
    session.tell(tokens(0, 10, 11, finish=FINISH_LENGTH), record, 0.5)
    session.tell(tokens(0, 20, choice=1), record, 0.5)
    assert len(rows(session.take())) == 2
    session.attach()
    again = session.take()
    assert rows(again) == [(5, 0, 0, [10, 11], FINISH_LENGTH), (5, 1, 0, [20], FINISH_NONE)]
    assert len(again.started) == len(again.prompt_logprobs) == 1
    session.tell(tokens(1, 21, choice=1), record, 0.5)
    assert rows(session.take()) == [(5, 1, 1, [21], FINISH_NONE)]


def test_what_came_while_no_stream_was_there_is_kept() -> None:
    _, session, record = a_session()
    session.tell(tokens(0, 10), record, 0.5)
    session.take()
    assert session.detach(session.stream)
    session.tell(tokens(1, 11, finish=FINISH_LENGTH), record, 0.5)
    session.attach()
    assert list(session.records) == [5]
    assert rows(session.take()) == [(5, 0, 0, [10, 11], FINISH_LENGTH)]


def test_an_older_stream_does_not_detach_a_newer_one() -> None:
    _, session, _ = a_session()
    old = session.stream
    session.attach()
    assert not session.detach(old)
    assert session.attached


def test_a_replay_begins_where_it_ended() -> None:
    spec = replace(SPEC, n=2, replay=(Replay(array("i", [1, 2, 3])), Replay(array("i", [4]), FINISH_EOS)))
    _, session, record = a_session(spec)
    session.tell(tokens(3, 9), record, 0.5)
    assert rows(session.take()) == [(5, 0, 3, [9], FINISH_NONE)]
    assert record.output_tokens == 5
    session.attach()
    assert rows(session.take()) == [(5, 0, 3, [9], FINISH_NONE), (5, 1, 1, [], FINISH_EOS)]
    session.tell(tokens(4, 8, finish=FINISH_LENGTH), record, 0.5)
    assert rows(session.take()) == [(5, 0, 4, [8], FINISH_LENGTH)]
    assert session.records == {}


def test_a_replay_that_was_complete_leaves_nothing() -> None:
    _, session, _ = a_session(replace(SPEC, replay=(Replay(array("i", [1]), FINISH_EOS),)))
    assert session.records == {}


def test_acknowledged_tokens_are_forgotten() -> None:
    _, session, record = a_session(replace(SPEC, logprobs=1))
    choice = record.choices[0]
    session.tell(tokens(0, 10, 11, 12, top=2), record, 0.5)
    choice.acknowledge(3)
    assert choice.base == 0, "what was never told cannot have been received"
    session.take()
    session.tell(tokens(3, 13, top=2), record, 0.5)
    choice.acknowledge(2)
    assert (choice.base, choice.tokens.tolist(), choice.sent) == (2, [12, 13], 1)
    choice.acknowledge(1)
    assert choice.base == 2
    out = session.take()
    assert rows(out) == [(5, 0, 3, [13], FINISH_NONE)]
    assert out.rows.logprobs is not None
    assert out.rows.logprobs.token_ids.tolist() == [13, 13]
    session.attach()
    out = session.take()
    assert rows(out) == [(5, 0, 2, [12, 13], FINISH_NONE)]
    assert out.rows.logprobs is not None
    assert out.rows.logprobs.token_ids.tolist() == [12, 12, 13, 13]
    assert record.output_tokens == 4


def test_choices_without_logprobs_have_empty_positions_beside_those_with() -> None:
    sessions, session, plain = a_session()
    asking = record_of(replace(SPEC, owner=Owner(1, 6), logprobs=0), 0.0)
    session.accept(asking)
    session.tell(tokens(0, 10, 11), plain, 0.5)
    session.tell(tokens(0, 20, top=1, handle=6), asking, 0.5)
    session.tell(tokens(2, 12, handle=5), plain, 0.5)
    out = session.take()
    assert [row[3] for row in rows(out)] == [[10, 11, 12], [20]]
    assert out.rows.logprobs is not None
    assert out.rows.logprobs.counts.tolist() == [0, 0, 0, 1]
    session.tell(tokens(1, 21, top=1, handle=6), asking, 0.5)
    session.tell(tokens(3, 13), plain, 0.5)
    out = session.take()
    assert out.rows.logprobs is not None
    assert out.rows.logprobs.counts.tolist() == [1, 0]
    assert sessions.find(Owner(1, 6)) == (session, asking)


def test_a_failure_ends_each_choice_that_had_not_ended() -> None:
    _, session, record = a_session(replace(SPEC, n=2))
    failure = StepFailure(13, "broke", "e")
    session.tell(tokens(0, 10, finish=FINISH_EOS), record, 0.5)
    ended = session.tell(Failed(OWNER, None, failure), record, 0.5)
    assert [choice.index for choice in ended] == [1]
    assert record.finished
    out = session.take()
    assert out.failed == [Failed(OWNER, 1, failure)]
    assert record.choices[1].finish == FINISH_ERROR
    assert session.records == {}


def test_tokens_before_a_failure_are_told_without_an_end() -> None:
    _, session, record = a_session()
    session.tell(tokens(0, 10), record, 0.5)
    session.tell(Failed(OWNER, 0, StepFailure(13, "broke")), record, 0.5)
    out = session.take()
    assert rows(out) == [(5, 0, 0, [10], FINISH_NONE)]
    assert len(out.failed) == 1


def test_a_failure_without_tokens_is_no_row() -> None:
    _, session, record = a_session()
    session.tell(Failed(OWNER, None, StepFailure(13, "broke")), record, 0.5)
    out = session.take()
    assert (rows(out), len(out.failed), out.has_outputs) == ([], 1, False)


def test_a_lot_is_told_in_several_frames() -> None:
    _, session, record = a_session()
    many = array("i", range(FRAME_TOKENS * 2 + 10))
    session.tell(Tokens(OWNER, 0, 0, many, FINISH_LENGTH), record, 0.5)
    told: list[int] = []
    for last in (False, False, True):
        ((_, _, first, ids, finish),) = rows(session.take())
        assert first == len(told)
        assert finish == (FINISH_LENGTH if last else FINISH_NONE)
        assert session.wake.is_set() != last
        told += ids
    assert told == many.tolist()


def test_a_lot_of_logprobs_is_told_in_several_frames() -> None:
    _, session, record = a_session(replace(SPEC, logprobs=20))
    session.tell(tokens(0, *range(4000), top=21), record, 0.5)
    told: list[int] = []
    entries = 0
    while session.wake.is_set():
        out = session.take()
        assert out.rows.logprobs is not None
        assert len(out.rows.logprobs.token_ids) <= FRAME_TOKENS
        told += out.rows.token_ids
        entries += len(out.rows.logprobs.token_ids)
    assert told == list(range(4000))
    assert entries == 4000 * 21


def test_a_vector_ends_its_request_and_is_told_again_until_it_has_been_taken() -> None:
    _, session, record = a_session(replace(SPEC, pooling="mean"))
    vector = array("f", [0.6, 0.8])
    (ended,) = session.tell(Pooled(OWNER, vector), record, 0.5)
    assert (ended.finish, record.finished, record.output_tokens) == (FINISH_EOS, True, 0)
    assert record.first_token_at == 0.5
    session.attach()
    out = session.take()
    assert out.has_outputs
    assert (out.pooled, rows(out)) == ([Pooled(OWNER, vector)], [])
    assert session.records == {}
    assert not session.take().has_outputs


def test_many_vectors_are_told_in_several_frames() -> None:
    sessions = Sessions()
    session = sessions.open(1, "g")
    session.attach()
    vector = array("f", [0.5]) * 4096
    for handle in range(20):
        record = record_of(replace(SPEC, owner=Owner(1, handle), pooling="last"), 0.0)
        session.accept(record)
        session.tell(Pooled(Owner(1, handle), vector), record, 0.5)
    told = []
    while session.wake.is_set():
        out = session.take()
        assert sum(len(pooled.values) for pooled in out.pooled) <= FRAME_TOKENS
        told += [pooled.owner.handle for pooled in out.pooled]
    assert told == list(range(20))
    assert sessions.live == 0


def test_rejections_and_draining_are_told_once() -> None:
    _, session, _ = a_session()
    session.reject(9, InvalidArgument("no"))
    session.drain(2.5)
    out = session.take()
    assert (len(out.rejected), out.draining, out.grace_s) == (1, True, 2.5)
    out = session.take()
    assert (len(out.rejected), out.draining, out.has_outputs) == (0, False, False)


def test_requests_are_found_by_token_and_owner() -> None:
    sessions, session, record = a_session()
    assert sessions.by_token(SPEC.token) is record
    assert sessions.by_token(b"") is None
    assert sessions.find(Owner(2, 5)) is None
    assert sessions.find(Owner(1, 6)) is None
    assert sessions.unfinished() == [record]
    sessions.close(session)
    assert sessions.live == 0


@given(st.lists(st.sampled_from(("token", "take", "attach", "acknowledge")), max_size=40), st.integers(0, 3))
def test_any_order_of_steps_takes_and_breaks_gives_the_same_tokens(actions: list[str], top: int) -> None:
    _, session, record = a_session(replace(SPEC, logprobs=top or None))
    made = 0
    have: list[int] = []
    entries: list[int] = []

    def take() -> None:
        out = session.take()
        flat = out.rows.logprobs.token_ids.tolist() if out.rows.logprobs else []
        for _, _, first, ids, _ in rows(out):
            assert first <= len(have)
            fresh = ids[len(have) - first :]
            have.extend(fresh)
            entries.extend(flat[(len(ids) - len(fresh)) * top :])

    for action in actions:
        if action == "token":
            session.tell(tokens(made, 1000 + made, top=top or None), record, 0.5)
            made += 1
        elif action == "take":
            take()
        elif action == "attach":
            session.attach()
        else:
            record.choices[0].acknowledge(len(have))
    take()
    assert have == list(range(1000, 1000 + made))
    assert entries == [token for token in have for _ in range(top)]
