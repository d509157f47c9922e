"""Steps as on a device, their kernels' references beneath them: what the host's own steps give, two in flight."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.states.reference import TOKENS
from services.worker.device_link import Arriving
from services.worker.device_sampling import DeviceSampler
from services.worker.device_states import DeviceStates
from services.worker.device_steps import DeviceSteps
from services.worker.first_steps import run_first_steps
from services.worker.models.decoder import Decoder
from services.worker.runner import TorchRunner
from services.worker.step import (
    MASKED,
    ROW_DROPPED,
    ROW_FAILED,
    ROW_NO_TOKEN,
    ROW_NOT_FINITE,
    ROW_OK,
    SAMPLES,
    StepInput,
)
from services.worker.toy_text import VOCAB_SIZE
from tests.worker.columns import SHAPE, no_masks, packed, request, run, step
from tests.worker.on_host import ON_DEVICE, device_runner_of
from tests.worker.sequences import assert_same, kinds, record, replay
from tests.worker.tiny_llama import PROMPT, runner_of, tiny_llama


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_llama(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def host(model_path: str) -> TorchRunner:
    return runner_of(model_path, ops="reference")


@pytest.fixture(scope="module")
def device(model_path: str) -> TorchRunner:
    return device_runner_of(model_path)


@pytest.fixture(autouse=True)
def emptied(host: TorchRunner, device: TorchRunner) -> None:
    for runner in (host, device):
        assert runner._cache is not None
        runner._cache.tensor.zero_()
        runner.reset()


@pytest.mark.parametrize(
    ("seed", "logits_rows"),
    [(0, 256), (1, 3), (2, 256), *(pytest.param(seed, 3 + seed, marks=pytest.mark.slow) for seed in range(3, 30))],
)
def test_random_sequences_give_what_the_host_gives(
    model_path: str, host: TorchRunner, seed: int, logits_rows: int
) -> None:
    sent, expected = record(host, seed, 60)
    runner = device_runner_of(model_path, logits_rows=logits_rows)
    assert isinstance(runner._steps, DeviceSteps)
    assert_same(replay(runner, sent, 1 + seed % 3), expected)


def test_the_sequences_have_every_kind_of_end(host: TorchRunner) -> None:
    found, flags, drafts = set[int](), 0, 0
    for seed in range(3):
        host.reset()
        sent, outputs = record(host, seed, 60)
        found |= kinds(outputs)
        drafts += sum(len(each.step.draft_ids) for each in sent)
        flags += sum(bool(output.pooled) + bool(output.prompt_logprobs) for output in outputs)
    assert found == {ROW_OK, ROW_NOT_FINITE, ROW_DROPPED, ROW_FAILED, ROW_NO_TOKEN}
    assert flags > 3
    assert drafts > 30


def begin(runner: TorchRunner, given: StepInput, masks: Any = no_masks) -> Any:
    return runner.execute(given, masks)


class TestInFlight:
    @pytest.fixture
    def waits(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """The threads that waited for the device."""
        names: list[str] = []
        wait = Arriving.wait

        def watched(arriving: Arriving) -> Any:
            names.append(threading.current_thread().name)
            return wait(arriving)

        monkeypatch.setattr(Arriving, "wait", watched)
        return names

    def test_a_step_reads_what_the_one_before_it_sampled_without_waiting(
        self, host: TorchRunner, device: TorchRunner, waits: list[str]
    ) -> None:
        sampling: dict[str, Any] = {
            "temperature": 0.9,
            "seed": 4,
            "frequency_penalty": 0.5,
            "top_p": 0.9,
            "logprobs": 1,
        }
        steps = [step(0, [(0, 0, 11)], [request(0, PROMPT, **sampling)])]
        steps += [step(1 + index, [(0, 11 + index, 1)]) for index in range(6)]
        expected = [run(host, given) for given in steps]
        begun = [begin(device, given) for given in steps]
        assert waits == []
        assert_same([one.wait() for one in begun], expected)
        assert len(waits) == len(steps)
        assert len({output.results[0].token_ids for output in expected}) > 3

    def test_drafts_wait_for_the_step_before_them_and_only_for_that(
        self, host: TorchRunner, device: TorchRunner, waits: list[str]
    ) -> None:
        new = [request(0, PROMPT, temperature=0), request(1, PROMPT[3:], temperature=0)]
        blocks: dict[int, Sequence[int]] = {0: range(16), 1: range(16, 32)}
        steps = [
            step(0, [(0, 0, 11), (1, 0, 8)], new, blocks=blocks),
            step(1, [(0, 11, 3), (1, 8, 1)], drafts={0: [46, 46]}),
            step(2, [(1, 9, 1)]),
        ]
        expected = [run(host, given) for given in steps]
        known = 12 + len(expected[1].results[0].token_ids)
        begun = [begin(device, given) for given in steps]
        assert waits == []
        last = step(3, [(0, known - 1, 1), (1, 10, 1)])
        begun.append(begin(device, last))
        assert len(waits) == 2  # for the two that the drafts are in or behind, not for the third
        assert_same([one.wait() for one in begun], [*expected, run(host, last)])

    def test_a_promise_that_is_not_kept_fails_the_row_behind_it_alone(
        self, host: TorchRunner, device: TorchRunner
    ) -> None:
        for runner in (host, device):
            new = [request(0, PROMPT, temperature=0), request(1, PROMPT, temperature=0)]
            run(runner, step(0, [(0, 0, 11), (1, 0, 11)], new, blocks={0: range(4), 1: range(4, 8)}))
            assert runner._cache is not None
            for tensor in runner._cache.layer(0):
                tensor[5] = math.nan
        steps = [step(1 + index, [(0, 11 + index, 1), (1, 11 + index, 1)]) for index in range(3)]
        outputs = [one.wait() for one in [begin(device, given) for given in steps]]
        assert [[result.status for result in output.results] for output in outputs] == [
            [ROW_OK, ROW_NOT_FINITE],
            [ROW_OK, ROW_FAILED],
            [ROW_OK, ROW_FAILED],
        ]
        assert_same(outputs, [run(host, given) for given in steps])
        for runner in (host, device):
            assert runner._cache is not None
            for tensor in runner._cache.layer(0):
                tensor[5] = 0.5
        again = step(9, [(1, 11, 1)])  # it stands where it stood
        assert_same([run(device, again)], [run(host, again)])

    def test_a_row_that_another_request_takes_while_its_step_is_in_flight(self, device: TorchRunner) -> None:
        first, second = request(0, PROMPT, temperature=0), request(0, PROMPT[2:], epoch=2, temperature=0)
        one = begin(device, step(0, [(0, 0, 11)], [first]))
        two = begin(device, step(1, [(0, 11, 1)]))
        three = begin(device, step(2, [(0, 0, 9)], [second], freed=[0]))
        four = begin(device, step(3, [(0, 9, 1)]))
        assert [one.wait().results[0].epoch, two.wait().results[0].epoch] == [1, 1]
        outputs = [three.wait(), four.wait()]
        assert [output.results[0][1:3] for output in outputs] == [(2, ROW_OK)] * 2
        device.reset()
        alone = run(device, step(0, [(0, 0, 9)], [second]))
        assert alone.results == outputs[0].results

    def test_waiting_for_a_later_one_settles_those_before_it(self, device: TorchRunner) -> None:
        one = begin(device, step(0, [(0, 0, 11)], [request(0, PROMPT, temperature=0)]))
        two = begin(device, step(1, [(0, 11, 1)]))
        later = two.wait()
        assert one.wait().results[0].status == later.results[0].status == ROW_OK

    def test_what_was_in_flight_when_all_rows_were_emptied_changes_nothing(self, device: TorchRunner) -> None:
        old = begin(device, step(0, [(0, 0, 11)], [request(0, PROMPT, temperature=0)]))
        device.reset()
        new = begin(device, step(1, [(0, 0, 11)], [request(0, PROMPT, epoch=7, temperature=0)]))
        assert old.wait().results[0].epoch == 1
        assert new.wait().results[0].epoch == 7
        assert run(device, step(2, [(0, 11, 1)])).results[0].status == ROW_OK

    def test_a_step_that_fails_is_told_once_and_those_behind_it_go_on(
        self, device: TorchRunner, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = begin(device, step(0, [(0, 0, 11)], [request(0, PROMPT, temperature=0)]))
        two = begin(device, step(1, [(1, 0, 11)], [request(1, PROMPT, temperature=0)], blocks={1: range(16, 32)}))
        with monkeypatch.context() as patched:
            patched.setattr(Arriving, "wait", lambda _: 1 // 0)
            with pytest.raises(ZeroDivisionError):
                one.wait()
        assert two.wait().results[0].status == ROW_OK


def test_masks_are_asked_for_when_the_forward_pass_is_on_its_way(
    device: TorchRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    forward = Decoder.forward

    def watched(*given: Any) -> torch.Tensor:
        seen.append("forward")
        return forward(*given)

    monkeypatch.setattr(Decoder, "forward", watched)
    only = packed([17], vocab_size=VOCAB_SIZE)

    def masks() -> Any:
        seen.append("masks")
        return {0: only, 1: None}

    new = [request(row, PROMPT, temperature=0) for row in range(3)]
    rows = [(row, 0, 11) for row in range(3)]
    blocks: dict[int, Sequence[int]] = {row: range(16 * row, 16 * row + 16) for row in range(3)}
    flags = [SAMPLES | MASKED, SAMPLES | MASKED, SAMPLES]
    results = begin(device, step(0, rows, new, blocks=blocks, flags=flags), masks).wait().results
    assert seen == ["forward", "masks"]
    assert [result.status for result in results] == [ROW_OK, ROW_DROPPED, ROW_OK]
    assert results[0].token_ids == (17,)
    again = run(device, step(1, [(1, 10, 1)]))  # nothing was taken in
    assert again.results[0].token_ids == results[2].token_ids


def test_what_a_failed_step_did_not_write_is_not_written_beside_the_next_request() -> None:
    states = DeviceStates(SHAPE, torch.device("cpu"))
    first, second = request(0, PROMPT), request(0, PROMPT[3:5])
    states.add(first)
    states.grow(step(0, [(0, 0, 11)]))
    states.add(second)  # no two writes may meet
    states.add(request(1, PROMPT[:1]))
    states.free(1)
    writes = states.take_writes()
    assert (writes.writes_W5.tolist(), writes.values_N.tolist()) == ([[TOKENS, 0, 0, 2, 0]], PROMPT[3:5])
    states.add(first)
    assert states.clear() == [0]
    assert states.take_writes().longest == 0


def test_penalties_on_every_row_have_their_memory_before_a_row_asks() -> None:
    sampler = DeviceSampler(50_000, SHAPE, torch.device("cpu"), ON_DEVICE)
    assert sampler._features.nbytes > SHAPE.max_num_seqs * 4 * 50_000


def test_more_tokens_than_the_budget_find_room(host: TorchRunner, device: TorchRunner) -> None:
    rows = [(row, 0, 20) for row in range(4)]
    assert sum(count for *_, count in rows) > SHAPE.max_num_batched_tokens
    new = [request(row, range(row, row + 20), temperature=0) for row in range(4)]
    given = step(0, rows, new, blocks={row: range(16 * row, 16 * row + 16) for row in range(4)})
    assert_same([run(device, given)], [run(host, given)])


def test_first_steps_run_every_kernel_and_leave_nothing(model_path: str) -> None:
    runner = device_runner_of(model_path)
    model, steps = runner._model_of("test")[0], runner._steps
    assert isinstance(steps, DeviceSteps)
    before = run(runner, step(0, [(0, 0, 11)], [request(0, PROMPT, temperature=0)]))
    runner.reset()
    called: list[str] = []

    def watched(name: str, kernel: Any) -> Any:
        def run_it(*given: Any) -> Any:
            called.append(name)
            return kernel(*given)

        return run_it

    names = ("edit_ids", "forbid", "forbid_ends", "count", "penalize")
    edits = SimpleNamespace(**{name: watched(name, getattr(ON_DEVICE.logits, name)) for name in names})
    kernels = {name: watched(name, kernel) for name, kernel in ON_DEVICE._asdict().items() if name != "logits"}
    model.ops = replace(model.ops, on_device=ON_DEVICE._replace(**kernels, logits=edits))
    runner.init_cache(SHAPE)
    assert isinstance(runner._steps, DeviceSteps)
    with torch.inference_mode():
        run_first_steps(runner._steps, SHAPE, model.config.vocab_size)
        run_first_steps(runner._steps, replace(SHAPE, max_model_len=4), model.config.vocab_size)
    assert set(called) == {*kernels, *names}
    assert called.count("gather") == 16
    assert run(runner, step(0, [(0, 0, 1)])).results[0].status == ROW_FAILED  # no request is left
    after = run(runner, step(1, [(0, 0, 11)], [request(0, PROMPT, temperature=0)]))
    assert after.results == before.results
