"""Random workloads over several KV groups, watched: right outputs, nothing leaked, and the listener knows the index."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.cache_events import CacheEvents
from tests.engine.harness import Harness
from tests.engine.test_cache_events import Listener, index_of
from tests.engine.test_core_properties import Storm

WINDOWS = ((None,), (None, 3), (None, 5, None), (4,), (2, 7), (None, 1))


class WatchedStorm(Storm):
    """A storm over KV groups, with somebody who listens to the cache."""

    def __init__(self, draw: random.Random, depth: int) -> None:
        super().__init__(draw, depth)
        windows, config, refrain = draw.choice(WINDOWS), self.harness.config, self.harness.worker.refrain
        self.harness = Harness(
            replace(
                config,
                kv_windows=windows,
                num_blocks=config.num_blocks * len(windows),
                max_preemptions=draw.choice((1, 2, 8)),
            )
        )
        self.harness.worker.refrain = refrain
        self.events = CacheEvents(self.harness.core.kv, kept=40)
        self.listener = Listener()

    def disturb(self) -> None:
        super().disturb()
        self.check_promises()
        if self.draw.random() < 0.8:
            self.listen()

    def check_promises(self) -> None:
        """What is promised firmly is there, and the totals are those of the requests."""
        kv, running = self.harness.core.kv, self.harness.core.scheduler.running
        assert kv._promised == sum(request.blocks_promised for request in running)
        assert kv._firm == sum(request.blocks_promised for request in running if request.promise_firm)
        assert kv._firm <= kv.pool.num_free
        assert all(request.protected for request in running if request.promise_firm)
        for request in running:
            if request.promise_firm and request.blocks_covered * kv.block_size > request.num_computed > 0:
                held = sum(len(table.blocks) for table in request.tables)
                assert held + request.blocks_promised >= kv._groups.claim(request.num_computed, request.limit)

    def listen(self) -> None:
        if self.draw.random() < 0.1:
            self.listener = Listener()
            self.listener.hear_all(self.events.since(None))
        self.listener.hear_all(self.events.poll())
        assert self.listener.index == index_of(self.harness.core.kv)


def run(seed: int, length: int, depth: int) -> None:
    storm = WatchedStorm(random.Random(seed), depth)
    for _ in range(length):
        storm.disturb()
    storm.finish()
    storm.listen()
    storm.check_outputs()
    kv = storm.harness.core.kv
    assert (kv.available, kv._promised, kv._firm, kv._admitted) == (kv.pool.num_blocks, 0, 0, 0)


@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 120))
def test_a_storm_over_groups_changes_no_output(depth: int, seed: int, length: int) -> None:
    run(seed, length, depth)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2])
@settings(max_examples=800, deadline=None)
@given(seed=st.integers(0, 2**32), length=st.integers(1, 160))
def test_a_long_storm_over_groups_changes_no_output(depth: int, seed: int, length: int) -> None:
    run(seed, length, depth)
