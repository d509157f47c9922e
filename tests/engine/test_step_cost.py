"""What a step costs the scheduler, counted in lines of Python that run: a time would depend on the machine.

What one line does in C is not seen; `python -m tests.bench.scheduler` measures it.
"""

from __future__ import annotations

from functools import partial

import pytest

from services.cli.simulate.worker import outcome_of
from services.engine.core import EngineCore
from tests.engine.harness import make_config, make_spec
from tests.lines import lines_in

RUNNING = 16
STEPS = 8
"""Measured steps: each row takes a new block in every fourth, so that all runs see as many."""
ENGINE = "/services/engine/"
"""Whose lines are counted."""


def lines_of_steps(context: int, waiting: int) -> int:
    """Lines of steps in which nothing but decodes run, while nobody in the line can start."""
    num_blocks = RUNNING * (context // 4 + 16)  # prompts, and a reserve that is as large as all outputs
    core = EngineCore(
        make_config(
            max_num_batched_tokens=RUNNING * context,
            max_num_seqs=2 * RUNNING,
            max_model_len=4 * num_blocks,
            num_blocks=num_blocks,
            output_reserve_blocks=16,
        )
    )
    for handle in range(RUNNING):
        core.submit(make_spec(handle, [handle] * context, 60), 0.0)
    total = 0
    for step in range(4 + STEPS):
        if step == 2:
            for handle in range(RUNNING, RUNNING + waiting):
                core.submit(make_spec(handle, [handle % 50] * 80, 4), 0.0)
        plan, planning = lines_in(partial(core.schedule, 0.0), ENGINE)
        assert plan is not None
        assert step == 0 or plan.num_tokens.tolist() == [1] * RUNNING
        _, applying = lines_in(partial(core.apply, outcome_of(plan)), ENGINE)
        total += planning + applying if step >= 4 else 0
    return total


@pytest.mark.parametrize("waiting", [0, 50])
def test_a_step_costs_the_same_however_long_the_contexts(waiting: int) -> None:
    assert lines_of_steps(40, waiting) == lines_of_steps(4000, waiting)


def test_a_step_costs_the_same_however_long_the_line() -> None:
    few, many = (lines_of_steps(40, waiting) for waiting in (50, 5000))
    assert few == many
    assert few < 1.5 * lines_of_steps(40, 0), "a few are tried, and that is all"


def lines_beside_an_urgent_one(context: int) -> int:
    """Lines of a plan while an urgent request waits for which even the places of half of the running are too few."""
    num_blocks = RUNNING * (context // 4 + 16)
    core = EngineCore(
        make_config(
            max_num_batched_tokens=RUNNING * context,
            max_num_seqs=2 * RUNNING,
            max_model_len=4 * num_blocks,
            num_blocks=num_blocks,
        )
    )
    for handle in range(RUNNING):
        core.submit(make_spec(handle, [handle] * context, 60, priority=handle % 2), 0.0)
    for step in range(3):
        if step == 2:  # in which it gets the names of its blocks, once
            core.submit(make_spec(RUNNING, [7] * (3 * num_blocks), 4), 0.0)
        plan = core.schedule(0.0)
        assert plan is not None
        core.apply(outcome_of(plan))
    plan, lines = lines_in(partial(core.schedule, 0.0), ENGINE)
    assert plan is not None
    assert len(plan.rows) == RUNNING
    assert core.take_preemptions() == []
    return lines


def test_an_urgent_one_that_cannot_start_costs_the_same_however_long_the_contexts() -> None:
    assert lines_beside_an_urgent_one(400) == lines_beside_an_urgent_one(4000)
