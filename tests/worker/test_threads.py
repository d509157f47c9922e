"""Steps that are begun on one thread and end on another: order, failures, and a service whose runner works so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from protos import worker_pb2
from services.common.errors import TriptychError
from services.worker.metrics import WorkerMetrics
from services.worker.simulated import Cost, SimulatedRunner
from services.worker.step import Masks, StepInput, StepOutput
from services.worker.stepper import Stepper
from services.worker.threads import Later, StepThread
from tests.worker.columns import SHAPE, frame, new_row, no_masks, request, step
from tests.worker.harness import serving, simulated, texts

OK, FAILED, SKIPPED = worker_pb2.STEP_STATUS_OK, worker_pb2.STEP_STATUS_FAILED, worker_pb2.STEP_STATUS_SKIPPED


async def test_answers_come_in_the_order_of_the_questions() -> None:
    """Also those that are there at once, behind one that is not."""
    thread, names, free = StepThread(), [], threading.Event()

    def named(value: Any) -> Any:
        names.append(threading.current_thread().name)
        return value

    def release() -> Any:
        free.set()
        return named(None)

    told: asyncio.Queue[Any] = asyncio.Queue()
    thread.post(lambda: named(0), told.put_nowait)
    assert await told.get() == 0
    thread.post(lambda: named(Later(lambda: free.wait() and named(1))), told.put_nowait)
    thread.post(lambda: named(2), told.put_nowait)
    thread.post(release, told.put_nowait)
    thread.post(lambda: named(Later(lambda: 1 // 0).then(str)), told.put_nowait)
    thread.post(lambda: named(Later(lambda: named(5)).then(str)), told.put_nowait)
    answers = [await told.get() for _ in range(5)]
    assert answers[:3] == [1, 2, None]
    assert isinstance(answers[3], ZeroDivisionError)
    assert answers[4] == "5"
    assert sorted(names) == ["output"] * 2 + ["step"] * 6
    assert await thread.run(lambda: 7) == 7
    thread.close()


async def test_where_nothing_is_left_for_later_there_is_no_second_thread() -> None:
    before = {one for one in threading.enumerate() if one.name == "output"}
    thread = StepThread()
    assert [await thread.run(lambda: threading.current_thread().name) for _ in range(3)] == ["step"] * 3
    assert {one for one in threading.enumerate() if one.name == "output"} <= before
    thread.close()


class Started:
    """A step that a simulated runner has run, and whose output is told later."""

    def __init__(self, give: Callable[[], StepOutput]) -> None:
        self.wait = give


class LaterRunner(SimulatedRunner):
    """Every step but those without rows is pending; what the script fails, fails when it is waited for."""

    def execute(self, step: StepInput, masks: Callable[[], Masks]) -> Any:
        try:
            output = super().execute(step, masks)
        except Exception as error:
            failure = error

            def fail() -> StepOutput:
                raise failure

            return Started(fail)
        return Started(lambda: output) if len(step.rows) else output


def stepper_of(runner: SimulatedRunner) -> Stepper:
    metrics = WorkerMetrics(CollectorRegistry(), "test")
    metrics.serve("simulated")
    runner.load("", None)
    runner.init_cache(SHAPE)
    return Stepper(runner, metrics)


class Boom:
    """A runner that gives what it is told to."""

    def __init__(self) -> None:
        self.device, self.gives = "cpu", list[Any]()

    def execute(self, given: StepInput, masks: Callable[[], Masks]) -> Any:
        give = self.gives.pop(0)
        if isinstance(give, Exception):
            raise give
        return Started(give)

    def reset(self) -> None:
        """Nothing."""


def test_a_step_that_fails_late_takes_those_with_it_that_had_begun() -> None:
    metrics = WorkerMetrics(CollectorRegistry(), "test")
    metrics.serve("simulated")
    boom = Boom()
    stepper = Stepper(boom, metrics)  # type: ignore[arg-type]

    def begin(number: int, gives: Any, resync: bool = False) -> Any:
        boom.gives.append(gives)
        stepper.expect()
        return stepper.attempt(number, resync, lambda: stepper.run_step(step(number), no_masks))

    def output(number: int) -> Callable[[], StepOutput]:
        return lambda: StepOutput(number)

    def fail() -> StepOutput:
        raise ValueError("the device is lost")

    one, two, three = begin(1, output(1)), begin(2, fail), begin(3, output(3))
    assert one.finish() == StepOutput(1)
    failed = two.finish()
    assert isinstance(failed, TriptychError)
    boom.gives.clear()
    assert begin(4, output(4)) is None
    boom.gives.clear()
    five = begin(5, output(5), resync=True)
    assert three.finish() is None  # it had begun behind the one that failed, and before the new beginning
    assert five.finish() == StepOutput(5)
    six, seven = begin(6, output(6)), begin(7, ValueError("cannot begin"))
    assert isinstance(seven, TriptychError)
    assert six.finish() == StepOutput(6)  # it came before
    assert stepper.idle_s >= 0
    assert stepper.silence_s == 0


def test_what_a_row_gave_late_is_not_counted_to_its_next_request() -> None:
    runner = LaterRunner("", Cost(), SHAPE.max_model_len)
    stepper = stepper_of(runner)

    def begin(given: StepInput) -> Any:
        stepper.expect()
        return stepper.attempt(given.step_id, False, lambda: stepper.run_step(given, no_masks))

    first = begin(step(1, [(0, 0, 3)], [request(0, [1, 2, 3])]))
    second = begin(step(2, [(0, 0, 2)], [request(0, [4, 5], epoch=2)], freed=[0]))
    assert first.finish().results[0].epoch == 1
    assert stepper._held[0].sampled == 0
    assert second.finish().results[0].epoch == 2
    assert stepper._held[0].sampled == 1


@pytest.mark.parametrize("kind", [SimulatedRunner, LaterRunner])
async def test_a_service_answers_alike_whichever_way_its_runner_works(tmp_path: Path, kind: Any) -> None:
    script = tmp_path / "script.json"
    script.write_text(
        '{"requests": [{"contains": "fail", "fail_at": 1, "text": "abc"}], "otherwise": {"text": "hello"}}'
    )
    assert simulated(script) is not None
    async with serving(kind(str(script), Cost(), SHAPE.max_model_len), tmp_path) as worker:
        await worker.prepare()
        stream = await worker.open()
        hello, fail = new_row(0, [1, 2, 3]), new_row(1, list(b"fail"))
        await stream.send(step=frame(1, [(0, 0, 3)], [hello]))
        await stream.send(step=frame(2, [(0, 3, 1)]))
        results = [await stream.result() for _ in range(2)]
        assert texts(results) == b"he"
        await stream.send(step=frame(3, [(1, 0, 4)], [fail]))
        await stream.send(step=frame(4, [(1, 4, 1)]))
        await stream.send(step=frame(5, freed=[0]))
        answers = [await stream.result() for _ in range(3)]
        await stream.send(step=frame(6, [(0, 0, 3)], [hello], freed=[0, 1], resync=True))
        answers.append(await stream.result())
        assert [answer.step_id for answer in answers] == [3, 4, 5, 6]
        assert [answer.status for answer in answers] == [OK, FAILED, SKIPPED, OK]
        assert texts(answers[-1:]) == b"h"
        assert worker.metric("triptych:worker_steps_total", status="skipped") == 1
        await stream.call.done_writing()
        assert not await stream.call.read()  # the end comes behind all answers
