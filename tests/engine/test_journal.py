"""The log's lines about requests, and that a storm of preemptions cannot flood it."""

from __future__ import annotations

import logging
from array import array
from typing import Any

import pytest

from services.engine.events import FINISH_LENGTH, Failed, Owner, StepFailure, Tokens
from services.engine.journal import PREEMPTION_LINES, WINDOW_S, Journal
from services.engine.records import record_of
from services.engine.report import Preemption
from tests.engine.harness import make_spec


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    """What has been logged: (event, fields)."""
    caplog.set_level(logging.INFO, "triptych")
    return lambda: [(record.getMessage(), record.__dict__["fields"]) for record in caplog.records]


def preemptions(count: int) -> list[Preemption]:
    return [Preemption(f"v{number}", 0, "winner", 1, "kv_blocks") for number in range(count)]


def test_a_preemption_says_who_lost_to_whom_and_why(lines: Any) -> None:
    assert not Journal().preempted([Preemption("a", 2, "b", 1, "priority")], 5.0)
    assert lines() == [("preempted", {"request_id": "a", "choice": 2, "by": "b", "by_choice": 1, "reason": "priority"})]


def test_a_storm_is_cut_and_what_was_left_out_is_counted(lines: Any) -> None:
    journal = Journal()
    assert not journal.preempted(preemptions(PREEMPTION_LINES), 100.0)
    assert journal.preempted(preemptions(3), 100.5), "the first line left out asks for a reckoning"
    assert not journal.preempted(preemptions(4), 100.9)
    journal.tell_left_out()
    assert [event for event, _ in lines()] == ["preempted"] * PREEMPTION_LINES + ["preemptions left out of the log"]
    assert lines()[-1][1] == {"count": 7}
    assert not journal.preempted(preemptions(1), 100.0 + WINDOW_S)
    assert lines()[-1][0] == "preempted"
    assert journal.preempted(preemptions(PREEMPTION_LINES), 100.1 + WINDOW_S)
    assert journal.left_out == 1


def test_a_failure_of_ours_can_be_found_by_its_id(lines: Any) -> None:
    record = record_of(make_spec(7, [1, 2], traceparent=f"00-{'a' * 32}-{'b' * 16}-01"), 0.0)
    Journal().failed(Failed(Owner(1, 7), 0, StepFailure(13, "broke (error id e1)", "e1")), record)
    assert lines() == [
        (
            "request failed",
            {
                "request_id": "r7",
                "trace_id": "a" * 32,
                "choice": 0,
                "error_id": "e1",
                "message": "broke (error id e1)",
            },
        )
    ]


def test_a_fault_of_the_client_is_no_error_of_ours(lines: Any) -> None:
    Journal().failed(Failed(Owner(1, 7), 0, StepFailure(3, "your fault")), record_of(make_spec(7, [1]), 0.0))
    assert lines() == []


def test_one_line_at_the_end(lines: Any) -> None:
    record = record_of(make_spec(7, [1, 2]), 0.0)
    record.choices[0].add(Tokens(Owner(1, 7), 0, 0, array("i", [5, 6]), FINISH_LENGTH))
    Journal().finished(record)
    ((event, fields),) = lines()
    assert event == "request finished"
    assert (fields["request_id"], fields["prompt_tokens"], fields["output_tokens"]) == ("r7", 2, 2)
    assert (fields["queue_ms"], fields["finish"]) == (None, ["length"])
