"""What runs in a step: order, budget, admission, preemption, rows. Driven through the core."""

from __future__ import annotations

import pytest

from services.engine.core import EngineCore
from services.engine.plan import SAMPLES, STEP_OK, StepOutcome, StepPlan
from services.engine.policies import FirstCome
from services.engine.report import Counters
from services.engine.request import Request, make_family
from services.engine.resources import Resource
from services.engine.scheduler import Scheduler
from tests.engine.fake_worker import entries, undisturbed
from tests.engine.harness import Harness, make_config, make_spec


def tokens_of(plan: StepPlan | None) -> dict[int, int]:
    """Handle to tokens of one plan."""
    assert plan is not None
    return {entry[0].owner.handle: count for entry, count in zip(entries(plan), plan.num_tokens, strict=True)}


def numbers(length: int, first: int = 0) -> list[int]:
    return [(first + at) % 50 for at in range(length)]


def test_running_first_then_waiting_within_one_budget() -> None:
    harness = Harness(make_config(steps_in_flight=1))
    for handle in range(3):
        harness.submit(make_spec(handle, numbers(7, handle)))
    assert tokens_of(harness.plan()) == {0: 7, 1: 1}
    harness.apply()
    assert tokens_of(harness.plan()) == {0: 1, 1: 6, 2: 1}
    harness.apply()
    assert tokens_of(harness.plan()) == {0: 1, 1: 1, 2: 6}
    harness.apply()
    harness.run()


def test_the_video_workload() -> None:
    config = make_config(
        max_num_batched_tokens=8192,
        max_num_seqs=32,
        max_model_len=40_000,
        block_size=16,
        num_blocks=64 * 460,
        steps_in_flight=1,
        enable_prefix_caching=False,
    )
    core = EngineCore(config)
    for handle in range(1, 65):
        core.submit(make_spec(handle, [1] * 7000, 200), 0.0)
    steps: list[dict[int, int]] = []
    while (plan := core.schedule(0.0)) is not None:
        steps.append(tokens_of(plan))
        core.apply(StepOutcome(plan.step_id, STEP_OK, None, *answer(plan)))
    assert steps[:6] == [
        {1: 7000, 2: 1192},
        {1: 1, 2: 5808, 3: 2383},
        {1: 1, 2: 1, 3: 4617, 4: 3573},
        {1: 1, 2: 1, 3: 1, 4: 3427, 5: 4762},
        {1: 1, 2: 1, 3: 1, 4: 1, 5: 2238, 6: 5950},
        {1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 1050, 7: 7000, 8: 137},
    ]
    assert len(steps) == 428
    assert next(number for number, step in enumerate(steps, 1) if 33 in step) == 201


def answer(plan: StepPlan):  # type: ignore[no-untyped-def]
    """The columns of an outcome in which every row that samples gets token 1."""
    sampled = [at for at, flags in enumerate(plan.flags) if flags & SAMPLES]
    rows, ones = plan.rows[:0], plan.rows[:0]
    rows.extend(plan.rows[at] for at in sampled)
    ones.extend(1 for _ in sampled)
    epochs = type(rows)("Q", [entries(plan)[at][1] for at in sampled])
    return rows, epochs, bytes(len(sampled)), ones, ones


def test_rows_are_the_lowest_free_ones_and_freed_ones_are_announced() -> None:
    harness = Harness(make_config(max_num_batched_tokens=40, steps_in_flight=1))
    for handle, max_tokens in ((0, 1), (1, 3), (2, 1), (3, 9)):
        harness.submit(make_spec(handle, numbers(3, handle), max_tokens))
    plan = harness.plan()
    assert plan is not None
    assert [new.row for new in plan.new_rows] == [0, 1, 2, 3]
    assert list(plan.freed_rows) == []
    harness.apply()
    harness.submit(make_spec(4, numbers(3)))
    plan = harness.plan()
    assert plan is not None
    assert list(plan.freed_rows) == [0, 2]
    assert [new.row for new in plan.new_rows] == [0]
    assert list(plan.rows) == [1, 3, 0]
    harness.apply()
    harness.run()


def test_a_freed_row_waits_for_a_step_that_computes() -> None:
    harness = Harness()
    harness.submit(make_spec(0, [1, 2], 1))
    harness.run()
    assert harness.plan() is None
    harness.submit(make_spec(1, [1, 2], 1))
    plan = harness.plan()
    assert plan is not None
    assert list(plan.freed_rows) == [0]
    harness.apply()


def test_a_new_row_carries_all_that_the_worker_needs() -> None:
    harness = Harness()
    harness.submit(make_spec(3, [5, 6], 2, sampling=b"parameters", seed=9, traceparent="00-1"))
    plan = harness.plan()
    assert plan is not None
    (new,) = plan.new_rows
    assert (new.row, new.prompt_len, new.sampling, new.seed) == (0, 2, b"parameters", 9)
    assert (new.request_id, new.traceparent, list(new.tokens)) == ("r3", "00-1", [5, 6])
    assert new.epoch == entries(plan)[0][1] > 0


def test_two_steps_are_in_flight_and_a_limit_costs_no_row() -> None:
    harness = Harness()
    harness.submit(make_spec(0, [1, 2, 3], 3))
    assert tokens_of(harness.plan()) == {0: 3}
    assert tokens_of(harness.plan()) == {0: 1}
    assert harness.plan() is None
    harness.apply()
    assert tokens_of(harness.plan()) == {0: 1}
    harness.apply()
    assert harness.plan() is None
    harness.apply()
    assert harness.tokens(0) == undisturbed([1, 2, 3], 1, 3)
    assert len(harness.plans) == 3


def test_a_stop_costs_one_wasted_row() -> None:
    outputs = undisturbed([1, 2, 3], 1, 10)
    harness = Harness()
    harness.submit(make_spec(0, [1, 2, 3], 10, eos_ids=frozenset({outputs[2]})))
    harness.run()
    wanted = outputs[: outputs.index(outputs[2]) + 1]
    assert harness.tokens(0) == wanted
    assert sum(bool(flags & SAMPLES) for plan in harness.plans for flags in plan.flags) == len(wanted) + 1


def test_priority_goes_first_in_line_and_last_out() -> None:
    harness = Harness(make_config(max_num_seqs=2, num_blocks=8))
    for handle, priority in ((0, 5), (1, 0), (2, -1)):
        harness.submit(make_spec(handle, numbers(8, handle), 20, priority=priority))
    harness.turn()
    harness.turn()
    assert harness.running() == [2, 1]
    harness.run()
    ends = [max(at for at, plan in enumerate(harness.plans) if handle in tokens_of(plan)) for handle in (2, 1, 0)]
    assert ends == sorted(ends)
    assert harness.core.counters.preemptions > 0


def test_the_victim_is_the_last_to_arrive() -> None:
    harness = Harness(make_config(max_num_seqs=3, num_blocks=9, output_reserve_blocks=0))
    for handle in range(3):
        harness.submit(make_spec(handle, numbers(8, handle), 12))
    while harness.core.counters.preemptions == 0:
        assert harness.turn()
    assert harness.running() == [0, 1]
    harness.run()
    for handle in range(3):
        assert harness.tokens(handle) == undisturbed(numbers(8, handle), 1, 12)


def test_nothing_is_admitted_in_a_step_that_preempted() -> None:
    harness = Harness(make_config(max_num_seqs=8, num_blocks=10, output_reserve_blocks=0, steps_in_flight=1))
    for handle in range(6):
        harness.submit(make_spec(handle, numbers(5, handle), 14))
    preempted = 0
    for _ in range(400):
        plan = harness.plan()
        if harness.core.counters.preemptions > preempted:
            preempted = harness.core.counters.preemptions
            assert plan is not None
            assert plan.new_rows == []
        if plan is None:
            break
        harness.apply()
    assert preempted > 0
    harness.run()


def test_a_prompt_is_admitted_only_if_all_of_it_fits() -> None:
    harness = Harness(make_config(num_blocks=8, max_num_batched_tokens=4))
    harness.submit(make_spec(0, numbers(16), 8))
    harness.submit(make_spec(1, numbers(16, 20), 8))
    while harness.turn():
        assert harness.running() in ([0], [1], [])
    assert harness.core.counters.preemptions == 0
    harness.run()


def test_small_ones_pass_a_head_that_does_not_fit_but_not_for_ever() -> None:
    """One at a time, so that nobody is past it in the step in which it has been overtaken 32 times."""
    harness = Harness(make_config(num_blocks=32, max_num_batched_tokens=64, max_num_seqs=2, output_reserve_blocks=0))
    harness.submit(make_spec(0, numbers(28), 100))
    harness.turn()
    harness.submit(make_spec(1, numbers(120, 7), 4))
    for handle in range(2, 60):
        harness.submit(make_spec(handle, [handle % 50], 1))
    for _ in range(80):
        harness.turn()
    assert harness.running() == [0]
    assert sum(heard.ended for heard in harness.heard.values()) == 32
    harness.run()


@pytest.mark.parametrize(("before", "starts"), [(4, True), (5, False)])
def test_the_look_ahead_is_bounded(before: int, starts: bool) -> None:
    harness = Harness(make_config(num_blocks=16, max_num_batched_tokens=64, output_reserve_blocks=0))
    harness.submit(make_spec(0, numbers(32), 20))
    harness.turn()
    for handle in range(1, before + 1):
        harness.submit(make_spec(handle, numbers(40, handle), 4))
    harness.submit(make_spec(90, [1], 1))
    for _ in range(3):
        harness.turn()
    assert harness.running() == [0]
    assert harness.heard[90, 0].ended == starts
    harness.run()


class Gate(Resource):
    """Lets nobody start, or nobody run, and counts what it holds."""

    def __init__(self) -> None:
        self.shut = self.held = 0

    def admit(self, request: Request) -> bool:
        if self.shut == 1:
            return False
        self.held += 1
        return True

    def clip(self, request: Request, num_tokens: int, budget: int) -> int:
        return 0 if self.shut == 2 else min(num_tokens, 3)

    def reserve(self, request: Request, num_tokens: int) -> bool:
        return self.shut != 3

    def release(self, request: Request) -> None:
        self.held -= 1


def make_scheduler(*resources: Resource) -> tuple[Scheduler, Request]:
    scheduler = Scheduler(FirstCome(), resources, make_config(max_num_seqs=2), Counters())
    request = make_family(make_spec(1, numbers(7)), 100, 0.0, 0).choices[0]
    scheduler.waiting.add(request)
    return scheduler, request


@pytest.mark.parametrize("shut", [1, 2, 3])
def test_who_cannot_start_holds_nothing_and_takes_no_row(shut: int) -> None:
    before, gate = Gate(), Gate()
    scheduler, request = make_scheduler(before, gate)
    gate.shut = shut
    plan = StepPlan(1)
    scheduler.schedule(plan, 0.0)
    assert plan.empty
    assert (before.held, gate.held, scheduler.running, len(scheduler.waiting)) == (0, 0, [], 1)
    gate.shut = 0
    scheduler.schedule(plan, 0.0)
    assert list(plan.num_tokens) == [3]
    assert (before.held, gate.held, scheduler.running) == (1, 1, [request])


def test_a_running_request_that_may_not_run_keeps_its_place() -> None:
    gate = Gate()
    scheduler, request = make_scheduler(gate)
    scheduler.schedule(StepPlan(1), 0.0)
    gate.shut = 2
    plan = StepPlan(2)
    scheduler.schedule(plan, 0.0)
    assert plan.empty
    assert scheduler.running == [request]
    scheduler.remove(request)
    assert (gate.held, scheduler.running, scheduler.verbs) == (0, [], {})
