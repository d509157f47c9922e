"""Virtual time: what happens when, to the microsecond, in runs small enough to work out by hand."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from services.cli.simulate.clock import Stuck
from services.engine.core import EngineCore
from tests.sim.watch import watch

TEN_MS = {"step_ms": 10, "prefill_us_per_token": 0, "decode_us_per_row": 0, "encoder_us_per_embedding": 0}
SMALL = {"max_num_batched_tokens": 100, "max_num_seqs": 4, "max_model_len": 1000, "num_blocks": 100, "block_size": 4}


def run(
    *requests: dict[str, Any], cost: dict[str, float] | None = None, static: int | None = None, **limits: Any
) -> Any:
    document = {"limits": SMALL | limits, "cost": TEN_MS | (cost or {}), "requests": list(requests)}
    return watch(document, static)


def test_a_request_alone_takes_a_step_per_token() -> None:
    seen = run({"arrival": 1.5, "prompt_tokens": 3, "output_tokens": 3})
    assert [(step.start_ms, step.end_ms) for step in seen.steps] == [(1500, 1510), (1510, 1520), (1520, 1530)]
    assert (seen.ms("R1", "wait"), seen.ms("R1", "first_token"), seen.ms("R1", "end")) == (0, 1510, 1530)


def test_a_step_costs_what_is_in_it() -> None:
    cost = {"step_ms": 1, "prefill_us_per_token": 100, "decode_us_per_row": 7, "encoder_us_per_embedding": 10}
    seen = run(
        {"prompt_tokens": 8, "output_tokens": 3},
        {"arrival": 0.0001, "prompt_tokens": 20, "output_tokens": 1, "media": [{"embeddings": 6, "offset": 2}]},
        cost=cost,
        steps_in_flight=1,
    )
    assert [step.scheduled for step in seen.steps] == [{"R1": 8}, {"R1": 1, "R2": 20}, {"R1": 1}]
    durations = [step.end_ms - step.start_ms for step in seen.steps]
    assert durations == pytest.approx([1 + 0.8, 1 + 0.007 + 2.0 + 0.06, 1 + 0.007])


@pytest.mark.parametrize(("in_flight", "period_ms"), [(1, 12), (2, 10)])
def test_a_second_step_in_flight_hides_the_way_to_the_worker(in_flight: int, period_ms: int) -> None:
    seen = run({"prompt_tokens": 3, "output_tokens": 9}, cost={"hop_us": 1000}, steps_in_flight=in_flight)
    starts = [step.start_ms for step in seen.steps]
    assert starts == [1 + period_ms * at for at in range(9)]
    assert seen.ms("R1", "end") == starts[-1] + 10 + 1


def test_a_step_is_planned_when_there_is_room_in_flight() -> None:
    first = {"prompt_tokens": 4, "output_tokens": 5}
    late = {"arrival": 0.012, "prompt_tokens": 4, "output_tokens": 1}
    entered = {flight: run(first, late, steps_in_flight=flight).live["R2"].first_step for flight in (1, 2)}
    # At 12 ms the second step runs. With two in flight the third has been planned already, at 10 ms.
    assert entered == {1: 3, 2: 4}


def test_time_jumps_over_idleness() -> None:
    seen = run({"prompt_tokens": 4, "output_tokens": 1}, {"arrival": 3600, "prompt_tokens": 4, "output_tokens": 1})
    assert [step.start_ms for step in seen.steps] == [0, 3_600_000]


def test_who_waits_past_the_deadline_expires() -> None:
    seen = run(
        {"prompt_tokens": 4, "output_tokens": 10},
        {"prompt_tokens": 4, "output_tokens": 1, "deadline_ms": 25},
        {"arrival": 0.05, "prompt_tokens": 4, "output_tokens": 1, "deadline_ms": 60},
        max_num_seqs=1,
    )
    assert [seen.live[name].finish for name in ("R1", "R2", "R3")] == ["length", "expired", "length"]
    assert "deadline" in seen.live["R2"].reason
    assert seen.ms("R2", "end") == 30  # told at the next step's end
    assert not any("R2" in step.scheduled for step in seen.steps)


def test_refusals_keep_their_reason() -> None:
    seen = run(
        {"prompt_tokens": 4, "output_tokens": 2, "count": 4},
        {"name": "huge", "prompt_tokens": 5000, "output_tokens": 1},
        max_num_seqs=1,
        max_waiting_requests=2,
    )
    assert [seen.live[name].finish for name in ("R1", "R2", "R3", "R4", "huge")] == [
        *["length"] * 2,
        *["refused"] * 3,
    ]
    assert "limit of 2" in seen.live["R3"].reason
    assert "5000 tokens" in seen.live["huge"].reason


def test_shared_prefixes_are_found_and_nothing_else_is() -> None:
    shared = {"name": "system", "tokens": 40}
    seen = run(
        {"prompt_tokens": 48, "output_tokens": 1, "shared_prefix": shared},
        {"prompt_tokens": 48, "output_tokens": 1},
        {"arrival": 1, "prompt_tokens": 48, "output_tokens": 1, "shared_prefix": shared},
        {"arrival": 2, "prompt_tokens": 48, "output_tokens": 1},
        {"arrival": 3, "prompt_tokens": 48, "output_tokens": 1, "shared_prefix": {"name": "other", "tokens": 40}},
        {"arrival": 4, "prompt_tokens": 42, "output_tokens": 1, "shared_prefix": {"name": "system", "tokens": 30}},
    )
    assert [seen.live[f"R{number}"].cached_tokens for number in range(1, 7)] == [0, 0, 40, 0, 0, 28]


def test_media_of_one_name_are_encoded_once() -> None:
    film = {"embeddings": 20, "name": "film"}
    seen = run(
        {"prompt_tokens": 30, "output_tokens": 1, "media": [film]},
        {"arrival": 1, "prompt_tokens": 30, "output_tokens": 1, "media": [film]},
        {"arrival": 2, "prompt_tokens": 30, "output_tokens": 1, "media": [{"embeddings": 20}]},
    )
    assert [step.embeddings for step in seen.steps] == [20, 0, 20]


def test_preempted_requests_are_named_and_come_back() -> None:
    seen = run(
        {"prompt_tokens": 20, "output_tokens": 60, "count": 3},
        num_blocks=30,
        output_reserve_blocks=0,
        enable_prefix_caching=False,
    )
    preempted = [name for step in seen.steps for name in step.preempted]
    assert preempted
    assert preempted[0] == "R3"
    assert {name: preempted.count(name) for name in seen.live} == {
        name: live.preemptions for name, live in seen.live.items()
    }
    assert all(live.outputs == 60 for live in seen.live.values())


def test_the_urgent_take_a_place_from_the_rest() -> None:
    seen = run(
        {"prompt_tokens": 4, "output_tokens": 20, "priority": 5},
        {"name": "urgent", "arrival": 0.05, "prompt_tokens": 4, "output_tokens": 2, "priority": 0},
        max_num_seqs=1,
        policy="priority",
    )
    assert [step.preempted for step in seen.steps if step.preempted] == [["R1"]]
    assert seen.ms("urgent", "end") < seen.ms("R1", "end")


def test_a_static_batch_ends_before_the_next_begins() -> None:
    requests = {"prompt_tokens": 4, "output_tokens": {"choice": [1, 2, 5]}, "count": 10}
    seen = run(requests, static=4)
    batches = [seen.order[at : at + 4] for at in range(0, 10, 4)]
    for batch, following in itertools.pairwise(batches):
        assert max(seen.ms(name, "end") for name in batch) == seen.ms(following[0], "wait")
    assert seen.steps[0].waiting == 6
    late = run(
        {"prompt_tokens": 4, "output_tokens": 3}, {"arrival": 0.001, "prompt_tokens": 4, "output_tokens": 1}, static=4
    )
    assert late.ms("R2", "wait") == 29


def test_an_expired_request_does_not_open_a_static_batch() -> None:
    seen = run(
        {"prompt_tokens": 4, "output_tokens": 10},
        {"prompt_tokens": 4, "output_tokens": 1, "deadline_ms": 25},
        {"prompt_tokens": 4, "output_tokens": 1},
        static=1,
    )
    assert [seen.live[name].finish for name in ("R1", "R2", "R3")] == ["length", "expired", "length"]


def test_what_can_never_run_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineCore, "schedule", lambda self, now: None)
    with pytest.raises(Stuck, match="R1 waits for ever: is next to run"):
        run({"prompt_tokens": 4, "output_tokens": 1})
    seen = run({"prompt_tokens": 4, "output_tokens": 1, "deadline_ms": 7})
    assert (seen.live["R1"].finish, seen.ms("R1", "end")) == ("expired", 7)
    assert not math.isnan(seen.ms("R1", "end"))
