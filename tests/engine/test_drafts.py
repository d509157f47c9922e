"""Drafts: what is proposed and when, and that no output changes through them."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from services.engine.drafts import Spare
from services.engine.events import FINISH_EOS, FINISH_LENGTH
from services.engine.plan import StepPlan
from services.engine.request import Replay
from tests.engine.fake_worker import LOGPROBS, PERIOD, undisturbed
from tests.engine.harness import Harness, make_config, make_spec

REFRAIN = [at % PERIOD for at in range(9)]
"""A prompt that already says what the worker will go on to say."""


def make_harness(drafts: int = 4, **given: Any) -> Harness:
    values = {"num_speculative_tokens": drafts, "max_speculative_tokens": drafts, "max_num_batched_tokens": 40}
    harness = Harness(make_config(**(values | given)))
    harness.worker.refrain = True
    return harness


def drafts_of(plans: Sequence[StepPlan]) -> list[list[int]]:
    """The drafts of every row that has some."""
    found = []
    for plan in plans:
        at = 0
        for count in plan.draft_counts:
            if count:
                found.append(plan.draft_ids[at : at + count].tolist())
            at += count
    return found


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("drafts", [1, 3, 5])
@pytest.mark.parametrize("prompt", [[1, 1, 1], [7] * 48, REFRAIN, [3, 1, 4, 1, 5], [9]])
def test_outputs_are_those_without_drafts_in_fewer_steps(depth: int, drafts: int, prompt: list[int]) -> None:
    harness = make_harness(drafts, steps_in_flight=depth)
    harness.submit(make_spec(1, prompt, 80))
    harness.run()
    assert harness.tokens(1) == undisturbed(prompt, 1, 80, refrain=True)
    counters = harness.core.counters
    assert counters.draft_tokens_accepted > 0
    assert len([plan for plan in harness.plans if plan.rows]) < 80
    assert counters.drafts == len(drafts_of(harness.plans))
    assert counters.draft_tokens == sum(map(len, drafts_of(harness.plans)))
    assert sum(counters.drafts_accepted_at) == counters.draft_tokens_accepted
    assert counters.drafts_accepted_at == sorted(counters.drafts_accepted_at, reverse=True)
    assert len(counters.drafts_accepted_at) <= drafts


def test_a_repeated_token_is_drafted_on_and_on() -> None:
    harness = make_harness(4)
    harness.worker.refrain = False
    harness.submit(make_spec(1, [7] * 48, 10, num_speculative_tokens=3))
    harness.plan()
    harness.plan()
    harness.apply()
    harness.apply()
    request = harness.core.scheduler.running[0]
    request.tokens[-1] = 7  # as if the model had gone on with it
    plan = harness.core.schedule(1.0)
    assert plan is not None
    assert drafts_of([plan]) == [[7, 7, 7]]
    assert plan.num_tokens.tolist() == [4]


def test_drafts_are_what_followed_the_newest_of_the_longest_repeats() -> None:
    harness = make_harness(2, steps_in_flight=1)
    output = undisturbed([5, 6, 30, 31, 6, 40, 5, 6], 1, 1, refrain=True)
    prompt = [5, 6, *output, 31, 32, 6, *output, 41, 42, 5, 6]
    harness.submit(make_spec(1, prompt, 5))
    harness.turn()
    request = harness.core.scheduler.running[0]
    request.tokens[-1] = output[0]
    plan = harness.core.schedule(1.0)
    assert plan is not None
    assert drafts_of([plan]) == [[31, 32]]


@pytest.mark.parametrize(("default", "most", "wish", "longest"), [
    (0, 4, None, 0),
    (0, 4, 3, 3),
    (0, 4, 9, 4),
    (4, 4, 0, 0),
    (2, 4, None, 2),
    (2, 4, 4, 4),
    (0, 0, 5, 0),
])  # fmt: skip
def test_a_request_may_ask_for_drafts_and_do_without(default: int, most: int, wish: int | None, longest: int) -> None:
    harness = make_harness(num_speculative_tokens=default, max_speculative_tokens=most)
    harness.submit(make_spec(1, REFRAIN, 40, num_speculative_tokens=wish))
    harness.run()
    assert max(map(len, drafts_of(harness.plans)), default=0) == longest
    assert harness.tokens(1) == undisturbed(REFRAIN, 1, 40, refrain=True)


@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_drafts_stop_short_of_the_longest_output(max_tokens: int) -> None:
    harness = make_harness(5)
    harness.submit(make_spec(1, REFRAIN, max_tokens))
    harness.run()
    assert harness.tokens(1) == undisturbed(REFRAIN, 1, max_tokens, refrain=True)
    assert harness.heard[1, 0].finish == FINISH_LENGTH
    limit = len(REFRAIN) + max_tokens
    for plan in harness.plans:
        assert all(start + count < limit for start, count in zip(plan.num_computed, plan.num_tokens, strict=True))


def test_an_end_inside_accepted_drafts_is_the_last_token_told() -> None:
    """The end is made an end only after it has been drafted, since no end is drafted."""
    prompt = REFRAIN
    full = undisturbed(prompt, 1, 40, refrain=True)
    harness = make_harness(5, steps_in_flight=1)
    harness.submit(make_spec(1, prompt, 40, logprobs=1, sampling=LOGPROBS))
    while not drafts_of(harness.plans):
        assert harness.turn() or harness.plans
    while True:
        plan = harness.plan()
        assert plan is not None
        outcome = harness.outcomes[-1]
        if outcome.token_counts[0] > 2:
            break
        harness.apply()
    told = len(harness.tokens(1))
    request = harness.core.scheduler.running[0]
    request.ends[full[told + 1]] = FINISH_EOS
    harness.apply()
    assert harness.tokens(1) == full[: told + 2]
    assert harness.heard[1, 0].finish == FINISH_EOS
    assert len(harness.heard[1, 0].logprobs) > 0
    assert not harness.core.has_work


def test_an_end_is_never_drafted() -> None:
    harness = make_harness(5)
    harness.submit(make_spec(1, REFRAIN, 40, eos_ids=frozenset({2}), min_tokens=30))
    harness.run()
    assert drafts_of(harness.plans)
    assert not any(2 in draft for draft in drafts_of(harness.plans))
    assert harness.tokens(1) == undisturbed(REFRAIN, 1, 40, frozenset({2}), 30, refrain=True)


@pytest.mark.parametrize("drafts", [0, 1, 3, 5])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_in_flight_is_forgotten_when_its_request_is_preempted_twice(drafts: int, depth: int) -> None:
    harness = make_harness(max(drafts, 1), num_speculative_tokens=drafts, steps_in_flight=depth)
    harness.submit(make_spec(1, REFRAIN, 60, logprobs=1, sampling=LOGPROBS))
    preempted = 0
    while harness.core.has_work:
        plan = harness.plan()
        busy = plan is not None and (bool(plan.draft_counts) or not drafts)
        if busy and preempted < 8:
            for _ in range(2):
                harness.core.preempt_all()
                preempted += 1
                harness.plan()
        if harness.outcomes:
            harness.apply()
    assert preempted == 8
    assert harness.tokens(1) == undisturbed(REFRAIN, 1, 60, refrain=True)
    assert sum(len(position) for position in harness.heard[1, 0].logprobs) == 2 * 60
    harness.check_idle()


def test_drafts_take_no_block_that_others_may_need() -> None:
    """A pool in which everybody just fits: with drafts too nobody is preempted."""
    lengths = {}
    for drafts in (0, 5):
        harness = make_harness(5, num_speculative_tokens=drafts, num_blocks=16, output_reserve_blocks=1)
        for handle in range(4):
            harness.submit(make_spec(handle, REFRAIN[:4], 12, seed=handle))
        harness.run()
        assert harness.core.counters.preemptions == 0
        lengths[drafts] = [harness.tokens(handle) for handle in range(4)]
    assert lengths[0] == lengths[5]


@pytest.mark.parametrize("reserve", [0, 1])
@pytest.mark.parametrize("windows", [(None,), (None, 6)])
def test_a_step_preempts_as_often_with_drafts_as_without(reserve: int, windows: tuple[int | None, ...]) -> None:
    """Each step is planned twice, the second time by a copy of the core that has no room for drafts."""
    num_blocks = 10 * len(windows)
    harness = make_harness(5, num_blocks=num_blocks, output_reserve_blocks=reserve, kv_windows=windows)
    for handle in range(4):
        harness.submit(make_spec(handle, REFRAIN[: 3 + handle], 20, seed=handle))
    while harness.core.has_work:
        twin = copy.deepcopy(harness.core)
        twin._drafts._spare = lambda: Spare(1, 0, 0)
        twin.schedule(harness.now)
        harness.plan()
        assert harness.core.counters.preemptions == twin.counters.preemptions
        if harness.outcomes and (harness.core.steps_in_flight == 2 or harness.plan() is None):
            harness.apply()
    assert harness.core.counters.preemptions > 0
    assert drafts_of(harness.plans)
    for handle in range(4):
        assert harness.tokens(handle) == undisturbed(REFRAIN[: 3 + handle], handle, 20, refrain=True)


def test_the_prefix_index_has_the_names_that_it_has_without_drafts() -> None:
    names = {}
    for drafts in (0, 5):
        harness = make_harness(5, num_speculative_tokens=drafts, block_size=2, num_blocks=64)
        harness.submit(make_spec(1, REFRAIN, 61))
        harness.run()
        names[drafts] = {name for name in harness.core.kv.pool.names if name is not None}
    assert names[5] <= names[0]
    assert len(names[5]) >= len(names[0]) - 3, "what the last step accepted may be missing"


def test_drafts_leave_everybody_a_token_of_the_budget() -> None:
    harness = make_harness(5, max_num_batched_tokens=6)
    for handle in range(4):
        harness.submit(make_spec(handle, REFRAIN, 30))
    turns = 0
    while all(handle not in harness.started for handle in range(4)) or len(harness.running()) < 4:
        turns += 1
        assert harness.turn()
        assert turns < 50
    told = [len(harness.tokens(handle)) for handle in range(4)]
    for _ in range(8):
        harness.turn()
    assert all(len(harness.tokens(handle)) > before for handle, before in enumerate(told))


def test_without_repetition_two_steps_are_in_flight_all_the_time() -> None:
    harness = make_harness(4)
    harness.worker.refrain = False
    prompt = list(range(40))
    harness.submit(make_spec(1, prompt, 60))
    single = 0
    while harness.turn():
        single += harness.core.steps_in_flight == 0 and harness.core.has_work
    assert single <= harness.core.counters.drafts + 6


def test_drafts_get_rare_while_they_are_of_no_use() -> None:
    """The worker says what it wants: a draft agrees once in 50 times, where 0.59 was hoped after two tokens."""
    harness = make_harness(4, max_model_len=2000, num_blocks=600)
    harness.worker.refrain = False
    prompt = [at % 5 for at in range(50)] + list(range(50)) * 4
    harness.submit(make_spec(1, prompt, 400))
    harness.run()
    assert harness.tokens(1) == undisturbed(prompt, 1, 400)
    assert 0 < harness.core.counters.drafts < 40


def test_the_index_goes_with_the_request() -> None:
    harness = make_harness(4)
    harness.submit(make_spec(1, REFRAIN, 40, n=2))
    for _ in range(4):
        harness.turn()
    first = harness.core.scheduler.running[0]
    assert first.ngrams is not None
    harness.core.preempt_all()
    assert first.ngrams is not None
    assert not first.draft
    harness.abort(1, first.choice)
    assert first.ngrams is None
    harness.run()


def test_a_worker_that_gives_more_tokens_than_it_may_fails_the_row() -> None:
    harness = make_harness(4, num_speculative_tokens=0)
    harness.submit(make_spec(1, [1, 2, 3], 20))
    harness.plan()
    outcome = harness.outcomes[-1]
    outcome.token_counts[0] = 2
    outcome.token_ids.append(9)
    harness.apply()
    assert harness.heard[1, 0].failed is not None
    assert harness.tokens(1) == []


def test_drafts_begin_where_a_replay_ended() -> None:
    full = undisturbed(REFRAIN, 1, 40, refrain=True)
    harness = make_harness(4)
    harness.submit(make_spec(1, REFRAIN, 40, replay=(Replay(array("i", full[:13])),)))
    harness.run()
    assert harness.tokens(1) == full
    assert drafts_of(harness.plans)


def test_drafts_fill_a_step_up_to_the_limit_that_is_set() -> None:
    harness = make_harness(4, speculative_limit=6)
    for handle in (1, 2, 3):
        harness.submit(make_spec(handle, REFRAIN, 40))
    harness.run()
    for handle in (1, 2, 3):
        assert harness.tokens(handle) == undisturbed(REFRAIN, 1, 40, refrain=True)
    drafting = [plan for plan in harness.plans if sum(plan.draft_counts)]
    assert drafting
    assert all(sum(plan.draft_counts) <= 6 - 3 for plan in drafting if len(plan.rows) == 3)
    assert all(sum(plan.num_tokens) <= 6 for plan in drafting if len(plan.new_rows) == 0)


def test_a_step_that_is_full_has_no_drafts_until_it_is_smaller() -> None:
    harness = make_harness(4, speculative_limit=3)
    for handle, length in ((1, 90), (2, 24), (3, 24)):
        harness.submit(make_spec(handle, REFRAIN, length))
    harness.run()
    assert harness.tokens(1) == undisturbed(REFRAIN, 1, 90, refrain=True)
    assert {len(plan.rows) for plan in harness.plans if sum(plan.draft_counts)} <= {1, 2}
    assert harness.core.counters.draft_tokens_accepted > 0


@pytest.mark.parametrize(
    ("shared", "batch", "longest"),
    [
        (1, None, 2),  # 0.28 x 0.59 is more than 0.15, and x 0.7 less
        (2, None, 9),
        (2, 0, 0),
        (3, 0, 1),
        (4, 0, 2),  # 0.78 x 0.85 is more than 0.65, and x 0.88 less
        (9, 0, 4),  # 0.9 x 0.9 x 0.9 x 0.92 is, too
        (24, 0, 12),
        (2, 5, 4),  # so many at next to no cost
    ],
)
def test_a_draft_is_as_long_as_it_is_likely(shared: int, batch: int | None, longest: int) -> None:
    harness = make_harness(12, ngram_min=1, speculative_batch=batch, steps_in_flight=1, max_num_batched_tokens=80)
    repeated = list(range(shared))
    harness.submit(make_spec(1, [49, *repeated, *range(30, 49), *repeated[:-1]], 30))
    harness.turn()
    harness.core.scheduler.running[0].tokens[-1] = repeated[-1]
    plan = harness.core.schedule(1.0)
    assert plan is not None
    assert drafts_of([plan]) == ([list(range(30, 30 + longest))] if longest else [])


@pytest.mark.parametrize(("others", "ahead"), [(0, False), (2, True)])
def test_a_step_is_planned_behind_drafts_where_they_are_few(others: int, ahead: bool) -> None:
    """One draft at a time is at least one to every two only for a choice that runs alone."""
    harness = make_harness(1)
    harness.submit(make_spec(1, REFRAIN, 60))
    for handle in range(2, 2 + others):
        harness.submit(make_spec(handle, REFRAIN, 60, num_speculative_tokens=0))
    behind = 0
    while harness.core.has_work:
        plan = harness.plan()
        if plan is not None and plan.draft_counts and len(plan.rows) == 1 + others:
            behind += harness.plan() is not None
        if harness.outcomes:
            harness.apply()
    assert (behind > 0) == ahead
    assert harness.core.counters.drafts > 0
    assert harness.tokens(1) == undisturbed(REFRAIN, 1, 60, refrain=True)
