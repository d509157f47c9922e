"""The engine's core over a real model, through both ends of the wire: whatever the schedule does to a request,
its tokens are those of a run alone, in a pool that is large."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from protos import common_pb2, worker_pb2
from services.engine.events import FINISH_LENGTH
from services.engine.plan import StepMasks, StepOutcome, StepPlan
from services.engine.policies import Policy, Priority
from services.engine.request import RequestSpec
from services.engine.wire.steps import step_message, to_outcome
from services.worker.config import WorkerSettings
from services.worker.runner import TorchRunner
from services.worker.toy_text import VOCAB_SIZE
from services.worker.wire.results import encode_result
from services.worker.wire.steps import bounds_of, decode_step
from tests.engine.fake_worker import FakeWorker
from tests.engine.harness import Harness, make_config, make_spec
from tests.worker.columns import SHAPE, run
from tests.worker.tiny_llama import PROMPT, tiny_llama

SAMPLINGS = {
    "greedy": common_pb2.SamplingParams(temperature=0),
    "seeded": common_pb2.SamplingParams(temperature=1.0, top_p=0.95),
}


class ModelWorker(FakeWorker):
    """Runs plans on a model of two layers with random weights, in blocks of 4."""

    def __init__(self, model_path: str) -> None:
        super().__init__(SHAPE.block_size, SHAPE.num_blocks)
        self._runner = TorchRunner(WorkerSettings.build(threads=1, deterministic=True))
        self._shape = replace(SHAPE, max_num_seqs=6)
        self._bounds = bounds_of(self._shape, self._runner.load(model_path, None))

    def begin(self) -> None:
        """For a new engine."""
        self._runner.init_cache(self._shape)

    def execute(self, plan: StepPlan, masks: StepMasks | None = None) -> StepOutcome:
        assert masks is None
        sent = worker_pb2.ExecuteRequest.FromString(step_message(plan).SerializeToString())
        output = run(self._runner, decode_step(sent.step, self._bounds, received_s=0.0))
        return to_outcome(worker_pb2.StepResult.FromString(encode_result(output, 0).SerializeToString()))


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> ModelWorker:
    return ModelWorker(str(tiny_llama(tmp_path_factory.mktemp("models") / "tiny")))


def make_harness(worker: ModelWorker, policy: Policy | None = None, **given: int) -> Harness:
    config = make_config(**{"num_blocks": SHAPE.num_blocks, "vocab_size": VOCAB_SIZE, "max_model_len": 64, **given})
    harness = Harness(config, policy)
    harness.worker = worker
    worker.begin()
    return harness


def spec_of(
    handle: int, prompt: Sequence[int], max_tokens: int, sampling: str = "greedy", priority: int = 0
) -> RequestSpec:
    data = SAMPLINGS[sampling].SerializeToString()
    return make_spec(handle, prompt, max_tokens, seed=handle, sampling=data, priority=priority)


def alone(worker: ModelWorker, specs: Sequence[RequestSpec]) -> list[list[int]]:
    """What each gives by itself."""
    outputs = []
    for spec in specs:
        harness = make_harness(worker)
        harness.submit(spec)
        harness.run()
        assert harness.heard[spec.owner.handle, 0].finish == FINISH_LENGTH
        outputs.append(harness.tokens(spec.owner.handle))
    return outputs


def prompt_of(handle: int, length: int) -> list[int]:
    return [(31 * handle + 7 * at * at) % 256 for at in range(length)]


@pytest.mark.parametrize("length", [5, 8, 11])
def test_the_same_prompt_twice_in_one_batch(worker: ModelWorker, length: int) -> None:
    harness = make_harness(worker, max_num_batched_tokens=32)
    specs = [spec_of(handle, prompt_of(0, length), 10) for handle in range(2)]
    for spec in specs:
        harness.submit(spec)
    harness.run()
    assert [harness.tokens(0), harness.tokens(1)] == alone(worker, specs)
    assert len(set(harness.tokens(0))) > 2


@pytest.mark.parametrize(
    ("length", "budget", "sampling"),
    [(8, 8, "greedy"), (16, 3, "greedy"), (7, 8, "seeded")],
)
def test_preemption_changes_no_output(worker: ModelWorker, sampling: str, length: int, budget: int) -> None:
    """In the middle of prompts too, and at exact multiples of budget and blocks."""
    harness = make_harness(
        worker,
        num_blocks=-(-(length + 16) // 4) + 2,
        max_num_batched_tokens=budget,
        max_num_seqs=6,
        output_reserve_blocks=0,
        max_preemptions=3,
    )
    specs = [spec_of(handle, prompt_of(handle, length), 16, sampling) for handle in range(6)]
    for spec in specs:
        harness.submit(spec)
    harness.run()
    lost = {loss.request_id for loss in harness.core.take_preemptions()}
    assert lost == {f"r{handle}" for handle in range(1, 6)}, "all but the first in rank"
    assert [harness.tokens(handle) for handle in range(6)] == alone(worker, specs)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_who_lost_the_only_place_ends_with_the_same_output(worker: ModelWorker, sampling: str, depth: int) -> None:
    harness = make_harness(worker, policy=Priority(), max_num_seqs=1, steps_in_flight=depth)
    specs = [spec_of(0, PROMPT, 20, sampling, priority=5), spec_of(1, prompt_of(1, 6), 5, sampling, priority=1)]
    harness.submit(specs[0])
    for _ in range(6):
        harness.turn()
    assert 0 < len(harness.tokens(0)) < 20
    harness.submit(specs[1])
    harness.run()
    assert harness.core.counters.preemptions == 1
    assert [harness.tokens(0), harness.tokens(1)] == alone(worker, specs)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("prompt", [[1, 1, 1], [119] * 48, [5, 9, 2, 7] * 6])
def test_drafts_change_no_output(worker: ModelWorker, sampling: str, prompt: list[int]) -> None:
    """Looked up among what repeats 2 to 5 tokens, 4 at a time."""
    specs = [spec_of(handle, prompt, 64 - len(prompt), sampling) for handle in range(2)]
    harness = make_harness(
        worker,
        max_num_batched_tokens=32,
        num_speculative_tokens=4,
        max_speculative_tokens=4,
        ngram_min=2,
        ngram_max=5,
    )
    for spec in specs:
        harness.submit(spec)
    harness.run()
    assert harness.core.counters.drafts > 0 or sampling != "greedy"
    assert [harness.tokens(0), harness.tokens(1)] == alone(worker, specs)
