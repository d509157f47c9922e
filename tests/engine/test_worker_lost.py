"""A worker dies over a step: who was in it is replayed, and who kills workers again and again fails alone."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.fake_worker import entries, undisturbed
from tests.engine.harness import Harness, make_config, make_spec

INTERNAL = 13


def run_until_death(harness: Harness, poisoned: Collection[int], turns: int = 500) -> list[list[int]]:
    """Turns until all is done. A worker dies where a poisoned request computes; who was in each such step."""
    deaths: list[list[int]] = []
    for _ in range(turns):
        harness.now += 1.0
        while (plan := harness.core.schedule(harness.now)) is not None:
            harness.outcomes.append(harness.worker.execute(plan))
            handles = [entry[0].owner.handle for entry in entries(plan)]
            if set(poisoned) & set(handles):
                harness.outcomes.pop()
                while harness.outcomes:
                    harness.apply()
                deaths.append(handles)
                harness.lose_worker(blame=True)
        if not harness.core.has_work:
            return deaths
        if harness.outcomes:
            harness.apply()
    raise AssertionError("it does not end")


def test_who_killed_two_workers_alone_fails_with_an_id() -> None:
    harness = Harness()
    harness.submit(make_spec(1, [1, 2, 3]))
    assert run_until_death(harness, [1]) == [[1], [1]]
    failed = harness.heard[1, 0].failed
    assert failed is not None
    assert failed.failure.code == INTERNAL
    assert failed.failure.error_id is not None
    assert failed.failure.error_id in failed.failure.message
    harness.check_idle()


def test_of_several_only_the_guilty_one_fails() -> None:
    harness = Harness(make_config(max_num_batched_tokens=16))
    for handle in (1, 2, 3):
        harness.submit(make_spec(handle, [handle, 2, 3], max_tokens=6))
    deaths = run_until_death(harness, [2])
    assert deaths == [[1, 2, 3], [1, 2, 3], [2]], "twice together, then each alone"
    assert [handle for handle in (1, 2, 3) if harness.heard[handle, 0].failed] == [2]
    for handle in (1, 3):
        assert harness.tokens(handle) == undisturbed([handle, 2, 3], 1, 6)
    harness.check_idle()


def test_one_death_makes_nobody_suspect() -> None:
    harness = Harness()
    for handle in (1, 2):
        harness.submit(make_spec(handle, [handle]))
    assert harness.plan() is not None
    harness.lose_worker(blame=True)
    plan = harness.plan()
    assert plan is not None
    assert len(plan.rows) == 2
    harness.apply()
    harness.run()


def test_deaths_far_apart_are_not_added_up() -> None:
    harness = Harness(make_config(max_num_batched_tokens=64))
    harness.submit(make_spec(1, [1, 2], max_tokens=40))
    for _ in range(8):
        for _ in range(4):
            harness.turn()
        assert harness.outcomes, "a step is out"
        harness.lose_worker(blame=True)
    harness.run()
    assert harness.tokens(1) == undisturbed([1, 2], 1, 40)


@pytest.mark.parametrize("blame", [False, True])
def test_an_end_that_nobody_is_blamed_for_is_counted_for_nobody(blame: bool) -> None:
    harness = Harness()
    harness.submit(make_spec(1, [1, 2]))
    for _ in range(5):
        harness.plan()
        harness.lose_worker(blame)
        if harness.heard[1, 0].ended:
            break
    assert harness.heard[1, 0].ended == blame


def test_a_worker_that_dies_with_nothing_to_do_blames_nobody() -> None:
    harness = Harness()
    harness.submit(make_spec(1, [1, 2]))
    for _ in range(5):
        harness.lose_worker(blame=True)
    harness.run()
    assert harness.tokens(1) == undisturbed([1, 2], 1, 4)


def test_a_request_that_ended_while_its_step_was_out_is_not_failed_after_its_end() -> None:
    harness = Harness()
    harness.submit(make_spec(1, [1, 2]))
    harness.plan()
    harness.lose_worker(blame=True)
    harness.plan()
    harness.abort(1)
    harness.lose_worker(blame=True)
    assert harness.heard[1, 0].failed is None
    harness.check_idle()


@given(
    poisoned=st.sets(st.integers(1, 6), max_size=3),
    lengths=st.lists(st.integers(1, 20), min_size=6, max_size=6),
    budget=st.integers(4, 32),
)
def test_whoever_does_not_kill_workers_ends_as_if_alone(poisoned: set[int], lengths: list[int], budget: int) -> None:
    harness = Harness(make_config(max_num_batched_tokens=budget))
    prompts = {handle: [handle, *range(length)] for handle, length in enumerate(lengths, 1)}
    for handle, prompt in prompts.items():
        harness.submit(make_spec(handle, prompt, max_tokens=5))
    deaths = run_until_death(harness, poisoned, turns=2000)
    assert len(deaths) <= 3 * len(poisoned) + 2
    for handle, prompt in prompts.items():
        if handle in poisoned:
            assert harness.heard[handle, 0].failed is not None
        else:
            assert harness.tokens(handle) == undisturbed(prompt, 1, 5)
    harness.check_idle()
