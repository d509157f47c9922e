"""The engine's pure core: every request's state and the schedule. No I/O, no clock, no grpc.

    submit / abort ──▶ schedule(now) ──▶ StepPlan ──▶ worker ──▶ StepOutcome ──▶ apply ──▶ events

Whoever drives it passes the time in and sends the events on.
"""

from __future__ import annotations

from array import array
from itertools import accumulate

from services.common.errors import DeadlineExceeded, TriptychError
from services.engine import intake
from services.engine.blame import find_guilty
from services.engine.deadlines import Deadlines
from services.engine.drafts import Drafts, Spare
from services.engine.encoder_cache import EncoderCache
from services.engine.events import (
    FINISH_ABORT,
    FINISH_EOS,
    FINISH_ERROR,
    FINISH_NONE,
    Event,
    Failed,
    LogprobColumns,
    Owner,
    Pooled,
    Started,
    StepFailure,
    Tokens,
)
from services.engine.explain import explain
from services.engine.flight import Flight
from services.engine.grammar import GrammarGate, failure_of
from services.engine.kv.manager import KvCache
from services.engine.limits import CoreConfig
from services.engine.matching import GrammarSource
from services.engine.outcome import LogprobCuts, answers_to, row_failure
from services.engine.plan import (
    POOLS,
    ROW_OK,
    SAMPLES,
    STEP_FAILED,
    STEP_OK,
    StepMasks,
    StepOutcome,
    StepPlan,
)
from services.engine.policies import Policy, make_policy
from services.engine.pooling import PoolingFlag
from services.engine.prompt_logprobs import PromptLogprobsFlag, tell_prompt_logprobs
from services.engine.registry import Registry
from services.engine.report import Counters, Explanation, Load, Preemption
from services.engine.request import Family, Request, RequestSpec, make_family
from services.engine.resources import Resource
from services.engine.scheduler import Scheduler

__all__ = ["CoreConfig", "Counters", "EngineCore", "Explanation", "Load", "Preemption"]

_new = tuple.__new__


class EngineCore:
    """The one object that knows every request. All calls come from one thread."""

    def __init__(self, config: CoreConfig, policy: Policy | None = None, grammars: GrammarSource | None = None) -> None:
        self.config = config
        self.counters = Counters()
        self.kv = KvCache(
            config.num_blocks,
            config.block_size,
            windows=config.kv_windows,
            max_num_batched_tokens=config.max_num_batched_tokens,
            reserve_blocks=config.output_reserve_blocks,
            prefix_caching=config.enable_prefix_caching,
            counters=self.counters,
        )
        self.context_len = min(config.max_model_len, self.kv.capacity)  # longest prompt plus output of one choice
        largest = max(config.max_num_batched_tokens, self.context_len)
        self.encoder = EncoderCache(config.encoder_budget or largest, config.encoder_cache_size or largest)
        self._grammar = GrammarGate(grammars)
        self._drafts = Drafts(config, self.counters, spare=self._spare_for_drafts, allowed=self._grammar.allowed)
        flags = (PromptLogprobsFlag(), PoolingFlag())
        self._resources: tuple[Resource, ...] = (self._drafts, self.kv, self.encoder, *flags, self._grammar)
        self._policy = policy or make_policy(config.policy, config.ageing_s)
        self.scheduler = Scheduler(self._policy, self._resources, config, self.counters)
        self._in_flight = Flight(len(config.kv_windows))
        self._arrivals = 0
        self._registry = Registry()
        self._deadlines = Deadlines()

    def _spare_for_drafts(self) -> Spare:
        """Half of the tokens, within their limit, and all KV blocks per group that are left once each takes one."""
        config, running = self.config, len(self.scheduler.running)
        blocks = self.kv.available // len(config.kv_windows)
        blocks -= 0 if config.output_reserve_blocks else running
        tokens, limit = (config.max_num_batched_tokens - running) // 2, config.speculative_limit
        return Spare(running, tokens if limit is None else min(tokens, limit - running), blocks)

    # Taking in

    def submit(self, spec: RequestSpec, now: float) -> list[Event]:
        """Takes a request in, or raises a TriptychError and keeps nothing of it.

        The list is empty but for a replay of which a choice turns out to be complete.
        """
        intake.check(spec, self.context_len, self.config.vocab_size)
        intake.check_media(spec, self.encoder.largest_item)
        self._policy.check(spec)
        self._registry.check_free(spec)
        intake.check_queue(spec, self.config, self.scheduler.num_waiting, self.scheduler.waiting_tokens)
        family = make_family(spec, self.context_len, now, self._arrivals)
        self._grammar.start(family)
        self._arrivals += spec.n
        self._registry.add(family)
        if spec.deadline_s is not None:
            self._deadlines.add(family, now + spec.deadline_s)
        events: list[Event] = []
        for request in list(family.live):
            finish = request.finish_after_last() if spec.replay and request.num_outputs else FINISH_NONE
            if finish:
                request.finish = finish
                events.append(Tokens(spec.owner, request.choice, request.num_outputs, array("i"), finish))
                continue
            self.scheduler.enter(request)
        self._follow_up(family)
        return events

    # Ending

    def abort(self, owner: Owner, choice: int | None, reason: int) -> list[Event]:
        """Ends a request or one choice of it; whoever is unknown or has ended is passed over."""
        family = self._registry.find(owner)
        if family is None:
            return []
        ended = [request for request in family.live if choice is None or request.choice == choice]
        for request in ended:
            self._end(request, reason)
        return [Tokens(owner, request.choice, request.num_outputs, array("i"), reason) for request in ended]

    def abort_gateway(self, gateway: int) -> None:
        """Ends every request of a gateway that is gone; nobody is left to be told."""
        for family in self._registry.of_gateway(gateway):
            for request in list(family.live):
                self._end(request, FINISH_ABORT)

    @property
    def next_deadline(self) -> float | None:
        """When `expire` may next have something to do."""
        return self._deadlines.next

    def expire(self, now: float) -> list[Event]:
        """Ends the requests whose deadline passed before they ran. To be called before `schedule`."""
        events: list[Event] = []
        for family in self._deadlines.passed(now):
            late = StepFailure(DeadlineExceeded("").code_number, "the deadline passed while the request waited")
            events.append(self._fail_all(family, late))
        return events

    def _end(self, request: Request, finish: int) -> None:
        """The one way out: nothing of the request stays in the schedule."""
        request.finish = finish
        request.ngrams = request.grammar = None  # the other choices of the request may live on for long
        self.scheduler.remove(request)
        self._follow_up(request.family)

    def _follow_up(self, family: Family) -> None:
        """Lets those choices into the line that need not wait for another's prompt; forgets a family that ended."""
        leader = family.leader
        if leader is None:
            self._registry.remove(family)
            self._grammar.forget(family)
            return
        waiting = self.scheduler.waiting
        for request in family.live if family.prompt_applied else (leader,):
            if waiting.parked(request) and all(each.ready(request) for each in self._resources):
                waiting.add(request)

    def take_grammars(self) -> list[Event]:
        """Lets those into the line whose grammar can be used now, and ends those whose never can."""
        events: list[Event] = []
        for family in self._grammar.take_done():
            failure = failure_of(family)
            if failure is None:
                self._follow_up(family)
            else:
                events.append(self._fail_all(family, failure))
        return events

    def _fail_all(self, family: Family, failure: StepFailure) -> Event:
        for request in list(family.live):
            self._end(request, FINISH_ERROR)
        return Failed(family.spec.owner, None, failure)

    # Stepping

    def schedule(self, now: float) -> StepPlan | None:
        """The next step; None when nothing can run or as many steps are in flight as may be.

        After None with nothing in flight only a new submit can change that.
        """
        if len(self._in_flight) >= (1 if self._drafts.awaited else self.config.steps_in_flight):
            return None
        plan = self._in_flight.blank()
        self.scheduler.schedule(plan, now)
        return None if plan.empty else self._in_flight.launch(plan)

    def let_go(self) -> StepPlan | None:
        """A step that computes nothing and tells the worker which rows are free; for when nothing runs."""
        if self._in_flight or not self.scheduler.has_freed:
            return None
        plan = self._in_flight.blank()
        self.scheduler.let_go(plan)
        return self._in_flight.launch(plan)

    def fill_masks(self) -> StepMasks | None:
        """The masks that the oldest step in flight waits for; once. To be called after `apply` and `schedule`."""
        plan = self._in_flight.oldest
        return self._grammar.fill(plan) if plan is not None and plan.masked else None

    def take_preemptions(self) -> list[Preemption]:
        """Who was preempted since the last call, and by whom."""
        return self.scheduler.take_preemptions()

    def apply(self, outcome: StepOutcome) -> list[Event]:
        """Takes a step's outcome, in the order of the plans; one of an unknown step changes nothing."""
        plan = self._in_flight.land(outcome.step_id)
        if plan is None:
            return []
        if outcome.status != STEP_OK:
            return self._step_failed(plan, outcome)
        self.encoder.missing(outcome.missing_media)
        events: list[Event] = tell_prompt_logprobs(outcome, self.scheduler.rows)
        statuses, counts = outcome.row_status, outcome.token_counts.tolist()
        starts = [0, *accumulate(counts)]
        cuts = LogprobCuts(outcome.logprobs) if outcome.logprobs is not None else None
        columns = (plan.requests, plan.epochs, plan.num_computed, plan.num_tokens, plan.flags)
        for request, epoch, first, num_tokens, flags, at in zip(*columns, answers_to(plan, outcome), strict=True):
            if request.epoch != epoch:
                continue
            status, count = (ROW_OK, 0) if at is None else (statuses[at], counts[at])
            drafted = len(request.draft) if flags & SAMPLES else 0
            if status != ROW_OK or (flags & SAMPLES and not 1 <= count <= drafted + 1):
                self._row_failed(request, status, events)
                continue
            if drafted:
                self._drafts.settle(request, count)
            there = first + (count if drafted else num_tokens)
            if there > request.settled_until:
                self.scheduler.tell_applied(request, there)
            if not request.family.prompt_applied:
                self._prompt_progress(request, there, events)
            if at is not None and count:
                begin, stop = starts[at], starts[at + 1]
                logprobs = cuts.cut(begin, stop) if cuts and request.family.spec.logprobs is not None else None
                self._accept(request, outcome.token_ids[begin:stop], logprobs, events)
            elif flags & POOLS:
                self._finish_pooled(request, outcome.pooled.get(epoch), events)
        return events

    def _prompt_progress(self, request: Request, end: int, events: list[Event]) -> None:
        """The prompt's KV is there up to `end`."""
        family = request.family
        if not family.announced and family.admitted is not None:
            family.announced = True
            events.append(Started(request.owner, family.cached_tokens, family.admitted - family.arrived))
        if end >= request.prompt_len:
            family.prompt_applied = True
            self.counters.prompt_tokens += request.prompt_len
            self._follow_up(family)

    def _accept(self, request: Request, ids: array[int], logprobs: LogprobColumns | None, events: list[Event]) -> None:
        """Takes sampled tokens up to the one that ends the choice."""
        tokens = request.tokens
        first_index = len(tokens) - request.prompt_len
        finish = FINISH_NONE
        for token in ids:
            tokens.append(token)
            if token in request.ends or len(tokens) >= request.limit:
                finish = request.finish_after_last()
                if finish:
                    break
        kept = len(tokens) - request.prompt_len - first_index
        if kept < len(ids):
            ids, logprobs = ids[:kept], LogprobCuts(logprobs).cut(0, kept) if logprobs else None
        self.counters.generated_tokens += kept
        # Half of what Tokens(...) costs, and it is made for every choice in every step.
        events.append(_new(Tokens, (request.owner, request.choice, first_index, ids, finish, logprobs)))
        if finish:
            self._end(request, finish)
        elif request.suspect:
            request.suspect, request.deaths = False, 0
            self.scheduler.requeue(request)

    def _finish_pooled(self, request: Request, vector: array[float] | None, events: list[Event]) -> None:
        if vector is None:
            self._fail(request, "the worker gave no vector for the request", events)
        else:
            self._end(request, FINISH_EOS)
            events.append(Pooled(request.owner, vector))

    # Failing

    def _row_failed(self, request: Request, status: int, events: list[Event]) -> None:
        failure = row_failure(request, status, self.encoder.is_missing)
        if failure is None:
            self.scheduler.requeue(request)
        else:
            self._fail(request, failure, events)

    def _step_failed(self, plan: StepPlan, outcome: StepOutcome) -> list[Event]:
        """Undoes the step. Who ran alone in a failed one is guilty; of several each will run alone."""
        events: list[Event] = []
        live = plan.live
        if outcome.status == STEP_FAILED:
            if len(plan.requests) == 1:
                request = plan.requests[0]
                if request.finish == FINISH_NONE:
                    self._fail(request, outcome.failure or "the worker failed the request", events)
            else:
                for request in live:
                    request.suspect = True
        elif not live:
            return events
        self.scheduler.step_failed()
        if outcome.status == STEP_FAILED:
            for lost in (plan, *self._in_flight):
                for resource in self._resources:
                    resource.failed(lost)
        self._in_flight.resync()
        return events

    def _fail(self, request: Request, failure: StepFailure | str, events: list[Event]) -> None:
        spec = request.family.spec
        if isinstance(failure, str):
            error_id = f"{spec.token.hex()[:12]}-{request.choice}"
            failure = StepFailure(TriptychError("").code_number, f"{failure} (error id {error_id})", error_id)
        self._end(request, FINISH_ERROR)
        events.append(Failed(spec.owner, request.choice, failure))

    def worker_lost(self, blame: bool) -> list[Event]:
        """Forgets all steps in flight and all KV; everything that ran waits to be sent as new.

        With `blame` the worker died over the oldest step in flight: who is in such a step again and
        again runs alone, and fails if a worker dies over it alone.
        """
        events: list[Event] = []
        oldest = self._in_flight.lose()
        guilty = find_guilty(oldest) if blame and oldest is not None else None
        self.scheduler.worker_lost()
        for resource in self._resources:
            resource.reset()
        if guilty is not None:
            self._fail(guilty, "workers died over the request", events)
        return events

    def preempt_all(self) -> None:
        """Takes all that run back to the waiting line; nobody holds KV then."""
        self.scheduler.requeue_all()

    def reset_prefix_cache(self, preempt: bool) -> int:
        """Forgets the cached prefixes that no request holds; the count of blocks that left the index."""
        if preempt:
            self.preempt_all()
        return self.kv.pool.forget_free()

    # Looking in

    @property
    def steps_in_flight(self) -> int:
        """Plans whose outcome has not been applied."""
        return len(self._in_flight)

    @property
    def has_work(self) -> bool:
        """A request is waiting or running."""
        return len(self._registry) > 0

    def load(self) -> Load:
        """How busy the core is."""
        return Load(
            running=len(self.scheduler.running),
            waiting=self.scheduler.num_waiting,
            waiting_tokens=self.scheduler.waiting_tokens,
            running_tokens=sum([request.num_computed for request in self.scheduler.running]),
            free_blocks=self.kv.pool.num_free,
            total_blocks=self.kv.pool.num_blocks,
        )

    def explain(self, token: bytes) -> Explanation | None:
        """Where the request with this token is, and why; None when it is unknown."""
        family = self._registry.by_token(token)
        return explain(family, self.scheduler) if family is not None else None

    def live_handles(self, gateway: int) -> list[int]:
        """Handles of a gateway's requests that have not ended."""
        return [family.spec.owner.handle for family in self._registry.of_gateway(gateway)]
