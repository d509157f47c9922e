"""Random workloads, disturbed in every way there is: outputs are those of a request that runs alone."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.events import FINISH_ABORT, FINISH_NONE, FINISH_STOP_STRING
from services.engine.request import Replay, RequestSpec, choice_seed
from tests.engine.fake_worker import LOGPROBS, VOCABULARY, undisturbed
from tests.engine.harness import Harness, make_config, make_spec

PATIENCE = 60
"""Turns within which somebody must have got a token or ended."""


def expected(spec: RequestSpec, choice: int, context_len: int, refrain: bool) -> list[int]:
    max_tokens = min(spec.max_tokens, context_len - len(spec.prompt))
    min_tokens = min(spec.min_tokens, max_tokens)
    return undisturbed(
        spec.prompt, choice_seed(spec.seed, choice), max_tokens, spec.eos_ids | spec.stop_ids, min_tokens, refrain
    )


def random_spec(draw: random.Random, handle: int, context_len: int, refrain: bool) -> RequestSpec:
    """Prompts share prefixes often: few letters, few beginnings."""
    beginning = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12][: draw.choice((0, 0, 4, 7, 8, 12))]
    prompt = beginning + [draw.randrange(3) for _ in range(draw.randint(0 if beginning else 1, 16))]
    prompt = prompt[: context_len - 1]
    n = draw.choice((1, 1, 1, 2, 3))
    given: dict[str, Any] = {
        "n": n,
        "seed": draw.randrange(4),
        "max_tokens": draw.randint(1, 14),
        "min_tokens": draw.choice((0, 0, 3, 100)),
        "eos_ids": frozenset(draw.sample(range(VOCABULARY), draw.choice((0, 3)))),
        "stop_ids": frozenset(draw.sample(range(VOCABULARY), draw.choice((0, 3)))),
        "priority": draw.choice((0, 0, 0, 1, -1)),
        "cache_salt": draw.choice(("", "", "salt")),
        "num_speculative_tokens": draw.choice((None, None, 0, 1)),
        "prompt_logprobs": draw.choice((None, None, None, 0)),
        "logprobs": draw.choice((None, 1)),
    }
    given["sampling"] = b"" if given["logprobs"] is None else LOGPROBS
    spec = make_spec(handle, prompt, **given)
    if draw.random() < 0.2:
        replays = []
        for choice in range(n):
            full = expected(spec, choice, context_len, refrain)
            replays.append(Replay(array("i", full[: draw.randint(0, len(full))])))
        spec = make_spec(handle, prompt, **given, replay=tuple(replays))
    return spec


class Storm:
    """A harness, and a source of trouble."""

    def __init__(self, draw: random.Random, depth: int) -> None:
        self.draw = draw
        block_size = draw.choice((1, 2, 4))
        self.harness = Harness(
            make_config(
                max_num_batched_tokens=draw.choice((1, 3, 8, 40)),
                max_num_seqs=draw.choice((1, 2, 4, 8)),
                max_model_len=draw.choice((16, 40)),
                block_size=block_size,
                num_blocks=draw.randint(24, 60) // block_size,
                enable_prefix_caching=draw.random() < 0.8,
                output_reserve_blocks=draw.choice((0, 1, 2)),
                num_speculative_tokens=draw.choice((0, 0, 1, 3)),
                max_speculative_tokens=draw.choice((0, 3, 5)),
                steps_in_flight=depth,
            )
        )
        self.refrain = self.harness.worker.refrain = draw.random() < 0.5
        self.specs: dict[int, RequestSpec] = {}
        self.aborted: set[tuple[int, int]] = set()

    def submit(self) -> None:
        handle = len(self.specs)
        spec = random_spec(self.draw, handle, self.harness.core.context_len, self.refrain)
        self.specs[handle] = spec
        self.harness.submit(spec)

    def abort(self) -> None:
        if not self.specs:
            return
        handle = self.draw.choice(list(self.specs))
        choice = self.draw.choice((None, self.draw.randrange(self.specs[handle].n)))
        for (owner, index), heard in self.harness.heard.items():
            if owner == handle and choice in {None, index} and not heard.ended:
                self.aborted.add((owner, index))
        self.harness.abort(handle, choice, self.draw.choice((FINISH_ABORT, FINISH_STOP_STRING)))

    def disturb(self) -> None:
        dice = self.draw.random()
        if dice < 0.25:
            self.submit()
        elif dice < 0.29:
            self.abort()
        elif dice < 0.31:
            self.harness.lose_worker()
        elif dice < 0.33:
            self.harness.core.reset_prefix_cache(preempt=self.draw.random() < 0.5)
        elif dice < 0.65:
            self.harness.plan()
        elif self.harness.outcomes:
            self.harness.apply()

    def progress(self) -> int:
        return sum(len(heard.tokens) + heard.ended for heard in self.harness.heard.values())

    def finish(self) -> None:
        """Runs to the end without further trouble; somebody gets ahead in every few turns."""
        before, quiet = self.progress(), 0
        while self.harness.turn():
            after = self.progress()
            quiet = 0 if after > before else quiet + 1
            before = after
            assert quiet < PATIENCE, "nobody gets ahead"
        self.harness.run()

    def check_outputs(self) -> None:
        for (handle, choice), heard in self.harness.heard.items():
            spec = self.specs[handle]
            right = expected(spec, choice, self.harness.core.context_len, self.refrain)
            assert heard.ended
            assert heard.failed is None
            if (handle, choice) in self.aborted:
                assert heard.tokens == right[: len(heard.tokens)]
            else:
                assert heard.tokens == right
                assert heard.finish != FINISH_NONE


@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 160))
def test_a_storm_changes_no_output(depth: int, seed: int, length: int) -> None:
    storm = Storm(random.Random(seed), depth)
    for _ in range(length):
        storm.disturb()
    storm.finish()
    storm.check_outputs()


@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_only_poisoned_requests_fail(depth: int, seed: int) -> None:
    draw = random.Random(seed)
    storm = Storm(draw, depth)
    for _ in range(draw.randint(2, 10)):
        storm.submit()
    poisoned = {f"r{handle}" for handle in storm.specs if draw.random() < 0.2}
    storm.harness.worker.fails = lambda names: bool(poisoned.intersection(names))
    storm.finish()
    for (handle, choice), heard in storm.harness.heard.items():
        right = expected(storm.specs[handle], choice, storm.harness.core.context_len, storm.refrain)
        if f"r{handle}" in poisoned:
            replayed = storm.specs[handle].replay
            assert heard.failed is not None or (replayed and heard.tokens == right)
        else:
            assert heard.failed is None
            assert heard.tokens == right
