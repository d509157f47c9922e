"""Requests for a vector: their prompts are computed as all are, they pool once, and with that they end."""

from __future__ import annotations

import random
from typing import Any

import pytest

from services.common.errors import InvalidArgument
from services.engine.events import FINISH_LENGTH
from services.engine.plan import POOLS, ROW_NOT_FINITE, SAMPLES
from tests.engine.fake_worker import VOCABULARY, undisturbed, undisturbed_vector
from tests.engine.harness import Harness, make_config, make_spec

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4]
POOLINGS = ("mean", "last")


def pooling_spec(handle: int, prompt: list[int], pooling: str, **given: Any) -> Any:
    return make_spec(handle, prompt, 1, pooling=pooling, **given)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("depth", [1, 2])
def test_a_prompt_in_chunks_pools_at_its_end(pooling: str, depth: int) -> None:
    harness = Harness(make_config(steps_in_flight=depth))
    harness.submit(pooling_spec(1, PROMPT, pooling))
    harness.run()
    assert harness.heard[1, 0].vector == undisturbed_vector(PROMPT, pooling)
    assert harness.tokens(1) == []
    assert [list(plan.flags) for plan in harness.plans] == [[0], [0], [POOLS]]
    assert sum(plan.total_tokens for plan in harness.plans) == len(PROMPT)
    assert harness.core.counters.prompt_tokens == len(PROMPT)
    assert harness.core.counters.generated_tokens == 0
    assert harness.started[1].cached_tokens == 0


def test_vectors_and_tokens_share_steps() -> None:
    harness = Harness()
    prompts = {handle: [handle + step for step in range(5)] for handle in range(1, 5)}
    for handle, prompt in prompts.items():
        harness.submit(pooling_spec(handle, prompt, POOLINGS[handle % 2]) if handle < 3 else make_spec(handle, prompt))
    harness.run()
    for handle, prompt in prompts.items():
        if handle < 3:
            assert harness.heard[handle, 0].vector == undisturbed_vector(prompt, POOLINGS[handle % 2])
        else:
            assert harness.tokens(handle) == undisturbed(prompt, 1, 4)
            assert harness.heard[handle, 0].finish == FINISH_LENGTH
    assert any({POOLS, SAMPLES} <= set(plan.flags) for plan in harness.plans)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_what_it_computed_is_found_by_others_and_only_the_last_token_reads_it(pooling: str) -> None:
    harness = Harness()
    harness.submit(pooling_spec(1, PROMPT, pooling))
    harness.run()
    for handle, cached in ((2, 0 if pooling == "mean" else len(PROMPT) - 1), (3, len(PROMPT) - 1)):
        spec = pooling_spec(handle, PROMPT, pooling) if handle == 2 else make_spec(handle, PROMPT)
        harness.submit(spec)
        harness.run()
        assert harness.started[handle].cached_tokens == cached
    assert harness.heard[2, 0].vector == undisturbed_vector(PROMPT, pooling)
    assert harness.tokens(3) == undisturbed(PROMPT, 1, 4)


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_worker_that_dies_half_way_changes_nothing(pooling: str) -> None:
    harness = Harness(make_config(steps_in_flight=1))
    harness.submit(pooling_spec(1, PROMPT, pooling))
    for computed in (8, 16):
        harness.turn()
        assert harness.core.load().running_tokens == computed
    harness.plan()
    harness.lose_worker(blame=True)
    harness.run()
    assert harness.heard[1, 0].vector == undisturbed_vector(PROMPT, pooling)


def test_vectors_are_the_same_whoever_runs_beside_them() -> None:
    """Few blocks, so that all kinds are preempted, with lost workers in between."""
    assert sum(crowded(seed) for seed in range(12)) > 12, "hardly anybody was preempted"


def crowded(seed: int) -> int:
    """Checks what everybody got; how many were preempted."""
    draw = random.Random(seed)
    limits = {"num_blocks": 12, "output_reserve_blocks": 0, "max_num_batched_tokens": 12}
    harness = Harness(make_config(**limits, max_preemptions=draw.choice((2, 8))))
    specs = []
    for handle in range(1, 15):
        prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 40))]
        pooling = draw.choice((None, *POOLINGS))
        most = 1 if pooling else draw.randrange(4, 20)
        specs.append(make_spec(handle, prompt, most, pooling=pooling, priority=draw.randrange(3)))
        harness.submit(specs[-1])
        for _ in range(draw.randrange(3)):
            harness.turn()
        if draw.random() < 0.15:
            harness.lose_worker()
    harness.run()
    for spec in specs:
        handle, prompt = spec.owner.handle, list(spec.prompt)
        if spec.pooling:
            assert harness.heard[handle, 0].vector == undisturbed_vector(prompt, spec.pooling)
        else:
            room = harness.core.context_len - len(prompt)
            assert harness.tokens(handle) == undisturbed(prompt, 1, min(spec.max_tokens, room))
    return harness.core.counters.preemptions


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_prompt_may_fill_the_context_and_the_pool(pooling: str) -> None:
    harness = Harness(make_config(num_blocks=5, max_preemptions=0))
    assert harness.core.context_len == len(PROMPT)
    harness.submit(pooling_spec(1, PROMPT, pooling))
    harness.run()
    assert harness.heard[1, 0].vector == undisturbed_vector(PROMPT, pooling)
    with pytest.raises(InvalidArgument, match=r"has 21 tokens; the context holds 20$"):
        harness.submit(pooling_spec(2, [*PROMPT, 1], pooling))
    with pytest.raises(InvalidArgument, match="has 20 tokens; the context holds 20, output included"):
        harness.submit(make_spec(3, PROMPT))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_one_that_is_protected_gets_the_whole_pool(pooling: str) -> None:
    """Preempted as often as may be, it is promised the blocks of its prompt, and no more than there are."""
    harness = Harness(make_config(num_blocks=5, max_preemptions=1, steps_in_flight=1, max_num_batched_tokens=4))
    harness.submit(pooling_spec(1, PROMPT, pooling, priority=5))
    harness.turn()
    harness.submit(make_spec(2, [1, 2, 3], 2))
    harness.run()
    assert harness.core.counters.preemptions == 1
    assert harness.heard[1, 0].vector == undisturbed_vector(PROMPT, pooling)


def test_a_vector_that_is_not_finite_or_does_not_come_fails_its_request_alone() -> None:
    harness = Harness()
    harness.worker.statuses["r1"] = ROW_NOT_FINITE
    harness.worker.mute.add("r2")
    for handle in (1, 2, 3):
        harness.submit(pooling_spec(handle, [handle, 1, 2], "mean"))
    harness.run()
    first, second = harness.heard[1, 0].failed, harness.heard[2, 0].failed
    assert first is not None
    assert "not finite" in first.failure.message
    assert second is not None
    assert "no vector" in second.failure.message
    assert harness.heard[3, 0].vector == undisturbed_vector([3, 1, 2], "mean")


def test_an_abort_ends_it_once() -> None:
    harness = Harness()
    harness.submit(pooling_spec(1, PROMPT, "mean"))
    harness.plan()
    harness.plan()
    harness.abort(1)
    harness.run()
    assert harness.heard[1, 0].vector is None
    assert harness.heard[1, 0].finish == 5


def test_no_drafts_are_made_for_it() -> None:
    """Not even for a prompt that repeats itself and whose last token is computed alone."""
    drafting = {"num_speculative_tokens": 4, "max_speculative_tokens": 4}
    harness = Harness(make_config(**drafting, vocab_size=VOCABULARY))
    prompt = [1, 2, 3] * 8 + [1]
    harness.submit(pooling_spec(1, prompt, "mean"))
    harness.run()
    assert harness.heard[1, 0].vector == undisturbed_vector(prompt, "mean")
    assert not any(plan.draft_ids for plan in harness.plans)
