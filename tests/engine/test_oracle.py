"""The engine decides at every step what a second implementation of docs/scheduling.md decides."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.harness import make_config, make_spec
from tests.engine.oracle.lockstep import Differ, Lockstep
from tests.engine.oracle.workload import POLICIES, Action, Workload, random_workload

SAMPLE = 40
"""Workloads of each policy and depth in `make test`."""
ALL = 1000
"""The same in `make test-slow`."""


def run(seeds: range, policy: str, depth: int) -> None:
    for seed in seeds:
        try:
            Lockstep(random_workload(seed, policy, depth)).run()
        except Differ as difference:
            pytest.fail(f"seed {seed}, policy {policy}, {depth} in flight, {difference}")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_engine_decides_as_the_definition_says(policy: str, depth: int) -> None:
    run(range(SAMPLE), policy, depth)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_engine_decides_as_the_definition_says_thousands_of_times(policy: str, depth: int) -> None:
    run(range(SAMPLE, ALL), policy, depth)


def submit(handle: int, prompt: list[int], max_tokens: int = 1, **given: Any) -> Action:
    return Action("submit", spec=make_spec(handle, prompt, max_tokens, **given))


TURN, PLAN = Action("turn"), Action("plan")

FOUND = {
    "one that got its place in a step keeps it, though a more urgent one comes next": Workload(
        make_config(max_num_seqs=8, num_blocks=5, output_reserve_blocks=0, max_model_len=12),
        "fair",
        1.0,
        (
            submit(1, [1, 2, 3, 4, 1, 1, 1, 0, 0]),
            TURN,
            submit(2, [2, 1, 2, 1, 2, 0, 0, 2, 1], n=3, priority=-1),
            submit(3, [1], 2, priority=3),
        ),
    ),
    "blocks that only those who leave share count as free": Workload(
        make_config(max_num_batched_tokens=16, max_num_seqs=3, block_size=2, num_blocks=7, output_reserve_blocks=0),
        "priority",
        60.0,
        (submit(1, [1, 0, 1, 2], n=3), TURN, PLAN, submit(2, [0, 2, 0, 2, 2, 0, 1, 1, 1, 1, 1], priority=-1)),
    ),
    "who takes a place takes blocks only for what it computes": Workload(
        make_config(
            max_num_batched_tokens=3,
            block_size=2,
            num_blocks=6,
            output_reserve_blocks=0,
            steps_in_flight=1,
            enable_prefix_caching=False,
        ),
        "priority",
        60.0,
        (submit(1, [1, 2]), submit(2, [2, 1, 2, 0, 2], 2, n=2, priority=-1)),
    ),
}
"""Workloads on which the engine once decided otherwise, made as small as they can be."""


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found(what: str) -> None:
    Lockstep(FOUND[what]).run()
