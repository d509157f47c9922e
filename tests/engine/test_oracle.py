"""The engine decides at every step what a second implementation of docs/scheduling.md decides."""

from __future__ import annotations

import pytest

from tests.engine.oracle.lockstep import Differ, Lockstep
from tests.engine.oracle.workload import POLICIES, random_workload

SAMPLE = 60
"""Workloads of each policy and depth in `make test`."""
ALL = 2000
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
