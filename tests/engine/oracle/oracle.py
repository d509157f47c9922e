"""One step after another, as docs/scheduling.md has it."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.engine.events import FINISH_ABORT, FINISH_ERROR, FINISH_NONE
from services.engine.limits import CoreConfig
from services.engine.request import RequestSpec, choice_seed
from tests.engine.fake_worker import chain, next_token
from tests.engine.oracle.choice import Asked, Choice, choices_of
from tests.engine.oracle.encoder import Encoder
from tests.engine.oracle.order import Order
from tests.engine.oracle.pool import Pool

LOOK_AHEAD = 4
MAX_OVERTAKES = 32


@dataclass
class Part:
    """What one choice computes in a step."""

    choice: Choice
    run: int
    start: int
    end: int
    samples: bool


@dataclass
class Step:
    """What is decided so far."""

    budget: int
    parts: list[Part] = field(default_factory=list)
    started: list[Choice] = field(default_factory=list)
    preempted: bool = False


class Oracle:
    """All requests of one engine, and where they stand."""

    def __init__(self, config: CoreConfig, policy: str, ageing_s: float) -> None:
        self.config = config
        self.context = min(config.max_model_len, config.num_blocks * config.block_size)
        self.order = Order(policy, ageing_s)
        self.pool = Pool(config)
        self.encoder = Encoder(config)
        self.requests: list[Asked] = []  # all that were ever accepted
        self.live: list[Choice] = []  # those of their choices that have not ended
        self.arrivals = 0
        self.in_flight: list[Step] = []
        self.preemptions: list[tuple[tuple[int, int], tuple[int, int], str]] = []  # who, by whom, why

    # Who is where.

    def running(self) -> list[Choice]:
        return sorted((choice for choice in self.live if choice.running), key=self.order.rank)

    def waiting(self) -> list[Choice]:
        return [choice for choice in self.live if not choice.running]

    def line(self) -> list[Choice]:
        """Those that may start: of a request whose prompt has not been applied, only the first."""
        stand = [choice for choice in self.waiting() if choice.asked.prompt_applied or choice is choice.asked.live()[0]]
        return sorted(stand, key=self.order.in_line)

    # Coming and going.

    def submit(self, spec: RequestSpec, now: float) -> bool:
        """Whether it was accepted."""
        if self.order.policy == "fcfs" and spec.priority != 0:
            return False
        if len(spec.prompt) >= self.context:
            return False
        waiting = self.waiting()
        if not spec.replay and self._exceeds(waiting, spec):
            return False
        is_live = any(choice.tenant == spec.tenant for choice in self.live)
        asked = choices_of(spec, now, self.arrivals, self.context)
        if asked.live():
            self.order.comes(spec.tenant, is_live)
        self.requests.append(asked)
        self.live += asked.live()
        self.arrivals += spec.n
        return True

    def _exceeds(self, waiting: list[Choice], spec: RequestSpec) -> bool:
        choices, tokens = self.config.max_waiting_requests, self.config.max_waiting_tokens
        waiting_tokens = sum(choice.known for choice in waiting)
        return (choices is not None and len(waiting) + spec.n > choices) or (
            tokens is not None and waiting_tokens + spec.n * len(spec.prompt) > tokens
        )

    def abort(self, handle: int, index: int | None) -> None:
        for choice in list(self.live):
            if choice.name[0] == handle and index in {None, choice.index}:
                self._end(choice, FINISH_ABORT)

    def expire(self, now: float) -> None:
        for choice in list(self.live):
            deadline = choice.asked.spec.deadline_s
            never_ran = all(each.runs == 0 for each in choice.asked.choices)
            if deadline is not None and never_ran and now >= choice.asked.arrived + deadline:
                self._end(choice, FINISH_ERROR)

    def _end(self, choice: Choice, reason: int) -> None:
        self._leave(choice)
        self.live.remove(choice)
        if not self.live:
            self.order.nothing_is_live()
        choice.ended = reason

    def _leave(self, choice: Choice) -> None:
        self.pool.take_back(choice)
        self.encoder.let_go(choice, None, self.live)
        choice.running = False

    # One step.

    def schedule(self) -> Step | None:
        if len(self.in_flight) == self.config.steps_in_flight:
            return None
        step = Step(self.config.max_num_batched_tokens)
        self.encoder.begin()
        self._take_places(step)
        for choice in self.running():
            if choice.running:
                self._go_on(choice, step)
        if not step.preempted:
            self._admit(step)
        for part in step.parts:
            self.order.charged[part.choice.tenant] += part.end - part.start
        if not step.parts:
            return None
        self.in_flight.append(step)
        return step

    def _take_places(self, step: Step) -> None:
        """Urgent ones take places from less urgent ones."""
        while self.order.policy != "fcfs" and self.line() and self.running():
            urgent, running = self.line()[0], self.running()
            if urgent.priority >= running[-1].priority:
                return
            victims = self._fewest(urgent, running, step)
            if victims is None:
                return
            for victim in victims:
                self._preempt(victim, urgent, "priority", step)
            self.order.taken(urgent)
            self._start(urgent, step)

    def _fewest(self, urgent: Choice, running: list[Choice], step: Step) -> list[Choice] | None:
        """The fewest of the running, from the last up, whose places let the urgent one start."""
        candidates = [choice for choice in reversed(running) if not self._is_spared(choice, step)]
        for count in range(len(candidates) + 1):
            victims = candidates[:count]
            if any(victim.priority <= urgent.priority for victim in victims):
                return None
            has_place = len(running) - count < self.config.max_num_seqs
            has_blocks = self.pool.wanted(urgent) <= self.pool.available_without(running, victims)
            if has_place and has_blocks and self.encoder.has_room_without(urgent, running, victims):
                return victims
        return None

    def _is_spared(self, choice: Choice, step: Step) -> bool:
        return self.pool.is_protected(choice) or choice in step.started

    def _go_on(self, choice: Choice, step: Step) -> None:
        """What a running choice computes in the step."""
        tokens = min(choice.gap, step.budget)
        if choice is not self.running()[-1] or (self.line() and len(self.running()) < self.config.max_num_seqs):
            tokens = self._cap(tokens)
        tokens = self.encoder.clip(choice, choice.computed, tokens)
        if tokens == 0:
            return
        while not self._has_blocks(choice, choice.computed + tokens):
            victim = self._victim(choice, step)
            if victim is None:
                return
            self._preempt(victim, choice, "kv_blocks", step)
            if victim is choice:
                return
        self._compute(choice, tokens, step)

    def _has_blocks(self, choice: Choice, end: int) -> bool:
        """Whether the choice has, or may take, all blocks up to `end`."""
        short = self.pool.blocks_for(end) - len(choice.blocks)
        return short <= 0 or short <= len(self.pool.free) - self.pool.out_of_reach(choice, self.running())

    def _cap(self, tokens: int) -> int:
        cap = self.config.max_prefill_tokens
        return tokens if cap is None else min(tokens, cap)

    def _victim(self, choice: Choice, step: Step) -> Choice | None:
        """The last in rank that is not spared, looked for up to the choice itself."""
        running = self.running()
        behind = running[running.index(choice) :]
        return next((each for each in reversed(behind) if not self._is_spared(each, step)), None)

    def _preempt(self, victim: Choice, by: Choice, reason: str, step: Step) -> None:
        self._leave(victim)
        victim.computed = 0
        victim.known = len(victim.tokens)
        victim.preemptions += 1
        step.preempted = True
        self.preemptions.append((victim.name, by.name, reason))

    def _admit(self, step: Step) -> None:
        """Waiting choices, in order of the line."""
        passed: list[Choice] = []
        while step.budget > 0 and len(self.running()) < self.config.max_num_seqs:
            line = [choice for choice in self.line() if choice not in passed]
            if not line:
                return
            first, *others = line
            self.order.taken(first)
            tokens = self._first_tokens(first, bool(others), step)
            if tokens > 0:
                self._start(first, step)
                self._compute(first, tokens, step)
                for choice in passed:
                    choice.overtaken += 1
            elif len(passed) == LOOK_AHEAD or first.overtaken >= MAX_OVERTAKES:
                return
            else:
                passed.append(first)

    def _first_tokens(self, choice: Choice, others_wait: bool, step: Step) -> int:
        """How many tokens a waiting choice would begin with; 0 when it cannot be admitted."""
        found = self.pool.look_up(choice)
        found_free = sum(1 for block in found if self.pool.holders[block] == 0)
        available = self.pool.available(self.running())
        if available < 0 or self.pool.wanted(choice) - len(found) + found_free > available:
            return 0
        start = self._begin_at(choice, found)
        tokens = min(choice.known - start, step.budget)
        if others_wait:
            tokens = self._cap(tokens)
        tokens = self.encoder.clip(choice, start, tokens)
        if tokens == 0:  # what it found has been of use
            self.pool.hold(choice, found)
            self.pool.take_back(choice)
        return tokens

    def _begin_at(self, choice: Choice, found: list[int]) -> int:
        return min(len(found) * self.config.block_size, choice.known - 1)

    def _start(self, choice: Choice, step: Step) -> None:
        """Puts the choice on a row."""
        step.started.append(choice)
        found = self.pool.look_up(choice)
        self.pool.hold(choice, found)
        choice.computed = self._begin_at(choice, found)
        choice.found = len(found)
        choice.needed = self.pool.wanted(choice) - len(found)
        choice.running = True
        choice.runs += 1
        if choice.asked.found_tokens is None:
            choice.asked.found_tokens = choice.computed

    def _compute(self, choice: Choice, tokens: int, step: Step) -> None:
        start, end = choice.computed, choice.computed + tokens
        self.pool.give(choice, self.pool.blocks_for(end) - len(choice.blocks))
        self.encoder.encode(choice, start, tokens)
        step.budget -= tokens
        samples = end == choice.known
        step.parts.append(Part(choice, choice.runs, start, end, samples))
        choice.computed = end
        choice.known += samples

    # Its outcome.

    def apply(self) -> None:
        """The oldest step in flight has been computed."""
        for part in self.in_flight.pop(0).parts:
            choice = part.choice
            if choice.ended or not choice.running or choice.runs != part.run:
                continue
            asked = choice.asked
            self.pool.enter(choice, part.start, part.end)
            self.encoder.let_go(choice, part.end, self.live)
            if part.start <= asked.logprobs_told:
                asked.logprobs_told = max(asked.logprobs_told, min(part.end + 1, choice.prompt_len))
            if part.end >= choice.prompt_len:
                asked.prompt_applied = True
            if part.samples:
                choice.tokens.append(self._sample(choice))
                finish = choice.finish()
                if finish != FINISH_NONE:
                    self._end(choice, finish)

    def _sample(self, choice: Choice) -> int:
        prefix = 0
        for token in choice.tokens:
            prefix = chain(prefix, token)
        return next_token(prefix, choice_seed(choice.asked.spec.seed, choice.index))
