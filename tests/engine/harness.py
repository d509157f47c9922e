"""Drives a core with a fake worker, as the engine's loop would, and checks what holds at every step."""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from services.engine.core import CoreConfig, EngineCore
from services.engine.events import FINISH_NONE, Event, Failed, Owner, Pooled, PromptLogprobs, Started, Tokens
from services.engine.kv.blocks import BlockPool
from services.engine.matching import GrammarSource
from services.engine.plan import MASKED, StepOutcome, StepPlan
from services.engine.policies import Policy
from services.engine.request import RequestSpec
from tests.engine.fake_worker import VOCABULARY, FakeWorker

GATEWAY = 77


def make_config(**given: Any) -> CoreConfig:
    """A small core: blocks of 4, a step of 8 tokens, 4 rows."""
    values: dict[str, Any] = {
        "max_num_batched_tokens": 8,
        "max_num_seqs": 4,
        "max_model_len": 1000,
        "block_size": 4,
        "num_blocks": 32,
        "vocab_size": VOCABULARY,
    }
    return CoreConfig(**(values | given))


def make_spec(handle: int, prompt: Sequence[int], max_tokens: int = 4, **given: Any) -> RequestSpec:
    """A request named by its handle."""
    values: dict[str, Any] = {
        "owner": Owner(GATEWAY, handle),
        "token": handle.to_bytes(16, "big"),
        "request_id": f"r{handle}",
        "prompt": array("i", prompt),
        "sampling": b"",
        "n": 1,
        "max_tokens": max_tokens,
        "min_tokens": 0,
        "eos_ids": frozenset(),
        "stop_ids": frozenset(),
        "seed": 1,
        "logprobs": None,
        "prompt_logprobs": None,
    }
    return RequestSpec(**(values | given))


@dataclass
class Heard:
    """All that a gateway was told about one choice."""

    tokens: list[int] = field(default_factory=list)
    finish: int = FINISH_NONE
    failed: Failed | None = None
    vector: array[float] | None = None
    logprobs: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        return self.finish != FINISH_NONE or self.failed is not None or self.vector is not None


class Harness:
    """A gateway, a loop and a worker around one core."""

    def __init__(
        self,
        config: CoreConfig | None = None,
        policy: Policy | None = None,
        grammars: GrammarSource | None = None,
    ) -> None:
        self.core = EngineCore(config or make_config(), policy, grammars)
        self.config = self.core.config
        self.worker = FakeWorker(self.config.block_size, self.config.num_blocks, windows=self.config.kv_windows)
        self.sent: deque[StepPlan] = deque()  # steps that wait for their masks, and what is behind them
        self.outcomes: deque[StepOutcome] = deque()
        self.plans: list[StepPlan] = []
        self.heard: dict[tuple[int, int], Heard] = {}
        self.started: dict[int, Started] = {}
        self.prompt_logprobs: dict[int, list[int]] = {}
        self.now = 0.0

    def submit(self, spec: RequestSpec) -> None:
        events = self.core.submit(spec, self.now)
        self.started.pop(spec.owner.handle, None)
        for choice in range(spec.n):
            heard = self.heard[spec.owner.handle, choice] = Heard()
            if spec.replay:
                heard.tokens += spec.replay[choice].token_ids
                heard.finish = spec.replay[choice].finish
        self.hear(events)

    def plan(self) -> StepPlan | None:
        """Schedules one step and lets the worker run it; its outcome waits to be applied."""
        plan = self.core.schedule(self.now)
        if plan is not None:
            assert plan.total_tokens <= self.config.max_num_batched_tokens
            self.plans.append(plan)
            self.sent.append(plan)
            self.execute()
        self.check()
        return plan

    def execute(self) -> None:
        """Lets the worker run what it can: a step with masked rows once all before it have been applied."""
        masks = self.core.fill_masks()
        while self.sent and (not any(flag & MASKED for flag in self.sent[0].flags) or masks is not None):
            self.outcomes.append(self.worker.execute(self.sent.popleft(), masks))
            masks = None

    def apply(self) -> None:
        """Applies the oldest outcome."""
        self.hear(self.core.apply(self.outcomes.popleft()))
        self.execute()
        self.check()

    def turn(self) -> bool:
        """One turn of the loop: fills the pipe, then applies one outcome. False when there is nothing to do."""
        self.now += 1.0
        while self.plan() is not None:
            pass
        if not self.outcomes:
            return False
        self.apply()
        return True

    def run(self, turns: int = 10_000) -> None:
        """Turns until nothing is left."""
        for _ in range(turns):
            if not self.turn():
                break
        assert not self.core.has_work, "requests are left, and nothing runs"
        self.check_idle()

    def abort(self, handle: int, choice: int | None = None, reason: int = 5) -> None:
        self.hear(self.core.abort(Owner(GATEWAY, handle), choice, reason))
        self.check()

    def lose_worker(self, blame: bool = False) -> None:
        self.outcomes.clear()
        self.sent.clear()
        self.worker.lose()
        self.hear(self.core.worker_lost(blame))
        self.check()

    def hear(self, events: list[Event]) -> None:
        for event in events:
            handle = event.owner.handle
            if isinstance(event, Started):
                assert handle not in self.started
                self.started[handle] = event
            elif isinstance(event, PromptLogprobs):
                told = self.prompt_logprobs.setdefault(handle, [])
                assert event.first_position == len(told), "prompt log probabilities are not told once each"
                told.extend(event.columns.counts)
            elif isinstance(event, Pooled):
                assert not self.heard[handle, 0].ended, "told after the end"
                self.heard[handle, 0].vector = event.values
            elif isinstance(event, Failed):
                for (owner, choice), heard in self.heard.items():
                    if owner == handle and event.choice in {None, choice} and not heard.ended:
                        heard.failed = event
            else:
                self._hear_tokens(event, self.heard[handle, event.choice])

    def _hear_tokens(self, event: Tokens, heard: Heard) -> None:
        assert not heard.ended, "told after the end"
        assert event.first_index == len(heard.tokens)
        heard.tokens += event.token_ids
        heard.finish = event.finish
        if event.logprobs is not None:
            assert len(event.logprobs.counts) == len(event.token_ids)
            heard.logprobs += [tuple(event.logprobs.token_ids)]

    def tokens(self, handle: int, choice: int = 0) -> list[int]:
        return self.heard[handle, choice].tokens

    def running(self) -> list[int]:
        return [request.owner.handle for request in self.core.scheduler.running]

    def check(self) -> None:
        """What must hold between any two calls of the core."""
        scheduler, pool = self.core.scheduler, self.core.kv.pool
        running = scheduler.running
        assert len(running) <= self.config.max_num_seqs
        assert {request.row: request for request in running} == {
            row: request for row, request in enumerate(scheduler.rows) if request is not None
        }
        assert scheduler.verbs.keys() == set(running)
        owned = [[block for table in request.tables for block in table.blocks] for request in running]
        held = Counter(block for blocks in owned for block in blocks)
        assert all(len(set(blocks)) == len(blocks) for blocks in owned)
        self.check_tables()
        assert [held[block] for block in range(pool.num_blocks)] == pool.refs
        free = pool.free_blocks()
        assert len(free) == len(set(free)) == pool.num_free
        assert all(pool.refs[block] == 0 for block in free)
        assert len(free) + len(held) == pool.num_blocks
        check_index(pool)
        for request in running:
            assert request.num_computed <= request.known <= request.limit
            assert request.finish == FINISH_NONE
        load = self.core.load()
        assert load.running == len(running)
        assert load.free_blocks == len(free)

    def check_tables(self) -> None:
        """All groups cover the same blocks of a chain, and a sliding window keeps what later tokens read."""
        for request in self.core.scheduler.running:
            assert len(request.tables) == len(self.config.kv_windows)
            for table, window in zip(request.tables, self.config.kv_windows, strict=True):
                assert table.first + len(table.blocks) == request.blocks_covered
                oldest = 0 if window is None else max(0, request.num_computed - window + 1)
                assert table.first <= oldest // self.config.block_size

    def check_idle(self) -> None:
        """What must hold when all is done."""
        load = self.core.load()
        assert (load.running, load.waiting, load.waiting_tokens, load.running_tokens) == (0, 0, 0, 0)
        assert load.free_blocks == load.total_blocks
        assert self.core.kv.available == load.total_blocks
        assert all(heard.ended for heard in self.heard.values())


def check_index(pool: BlockPool) -> None:
    """Names lead to blocks: one held of each held content, and every free block that has a name."""
    contents: dict[tuple[int, bytes], list[int]] = {}
    for block, name in enumerate(pool.names):
        if name is not None:
            contents.setdefault((pool._groups[block], name), []).append(block)
    assert len(contents) == pool.num_indexed
    for (group, name), blocks in contents.items():
        assert pool.find(name, group) in blocks
        assert len(blocks) == 1 or all(pool.refs[block] for block in blocks)
