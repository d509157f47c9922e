"""What runs in the next step. Pure: it decides, and knows no feature, no clock and no worker."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import takewhile

from services.engine.limits import CoreConfig
from services.engine.plan import SAMPLES, NewRow, StepPlan
from services.engine.policies import Policy
from services.engine.report import Counters, Preemption
from services.engine.request import Request, choice_seed
from services.engine.resources import ENDLESS, Resource, Verbs, verbs_of
from services.engine.rows import Rows
from services.engine.waiting import WaitingLine

LOOK_AHEAD = 4
"""How many that cannot start yet may be passed over in one step."""
MAX_OVERTAKES = 32
"""How many may start before one that cannot; from the next step on the line waits for it."""
KEPT_PREEMPTIONS = 1024
"""Preemptions that are remembered until somebody takes them."""


class Chosen:
    """The rows of the step being planned, in batch order. Lists, because arrays are slow to append to."""

    __slots__ = ("asking", "budget", "epochs", "num_computed", "requests", "rows")

    def __init__(self, budget: int) -> None:
        self.budget = budget  # tokens left
        self.rows: list[int] = []
        self.num_computed: list[int] = []
        self.requests: list[Request] = []
        self.epochs: list[int] = []
        # Those that are not steady: where they stand, and with how many tokens. All others compute one.
        self.asking: list[tuple[int, Request, int, Verbs]] = []

    def add(self, request: Request, num_tokens: int, verbs: Verbs) -> None:
        """A row whose resources have something to describe."""
        self.asking.append((len(self.rows), request, num_tokens, verbs))
        self.rows.append(request.row)
        self.num_computed.append(request.num_computed)
        self.requests.append(request)
        self.epochs.append(request.epoch)


class Scheduler:
    """Rows, the running set and the waiting line."""

    def __init__(self, policy: Policy, resources: Sequence[Resource], limits: CoreConfig, counters: Counters) -> None:
        self._policy = policy
        self._resources = resources
        self._begins = [each.begin for each in resources if type(each).begin is not Resource.begin]
        self._limits = limits
        self._counters = counters
        self.running: list[Request] = []  # in the order of the policy
        self.verbs: dict[Request, Verbs] = {}  # of what each that runs carries
        self._made: dict[tuple[Resource, ...], Verbs] = {}
        self.waiting = WaitingLine(policy)
        self.suspects = WaitingLine(policy)  # each runs alone before anything else runs
        self._rows = Rows(limits.max_num_seqs)
        self._preempted: list[Preemption] = []

    def schedule(self, plan: StepPlan, now: float) -> None:
        """Fills the plan: running requests in order, then waiting ones, within one budget of tokens."""
        for begin in self._begins:
            begin()
        preemptions = self._counters.preemptions
        chosen = Chosen(self._limits.max_num_batched_tokens)
        if self._policy.preempts:
            self._let_urgent_in(plan, now)
        self._go_on(chosen, plan)
        if self._counters.preemptions == preemptions:  # who was preempted shall not come back in the same step
            self._let_in(chosen, plan, now)
        assert chosen.budget >= 0, "a step computes more tokens than it may"
        assert len(self.running) <= self._limits.max_num_seqs, "more choices run than may"
        self._describe(chosen, plan)

    def _go_on(self, chosen: Chosen, plan: StepPlan) -> None:
        """Chooses among the running. Most of them are steady: one token, and nothing to ask."""
        add_row, add_start = chosen.rows.append, chosen.num_computed.append
        add_request, add_epoch = chosen.requests.append, chosen.epochs.append
        budget = chosen.budget
        for request in self.running.copy():
            if budget == 0:
                break
            start = request.num_computed
            if start < request.steady_until:
                add_row(request.row)
                add_start(start)
                add_request(request)
                add_epoch(request.epoch)
                request.num_computed = start + 1
                request.known = start + 2
                budget -= 1
                continue
            verbs = self.verbs.get(request)
            if verbs is None:  # preempted in this step
                continue
            num_tokens = self._clip(request, budget, verbs, request is not self.running[-1])
            if num_tokens and self._reserve(request, num_tokens, verbs, plan):
                chosen.add(request, num_tokens, verbs)
                budget -= num_tokens
        chosen.budget = budget

    def _let_in(self, chosen: Chosen, plan: StepPlan, now: float) -> None:
        """Starts waiting requests in their order; a few that cannot start yet are passed over."""
        on_trial = self._on_trial
        line, places = (self.suspects, 1) if on_trial else (self.waiting, self._limits.max_num_seqs)
        passed: list[Request] = []
        while chosen.budget and len(self.running) < places and len(passed) <= LOOK_AHEAD:
            request = line.pop()
            if request is None:
                break
            num_tokens = self._admit(request, chosen.budget, take=True)
            if num_tokens:
                self._start(request, plan, now)
                chosen.add(request, num_tokens, self.verbs[request])
                chosen.budget -= num_tokens
                for other in passed:
                    other.overtaken += 1
            else:
                passed.append(request)
                if request.overtaken >= MAX_OVERTAKES:
                    break
        for request in passed:
            line.add(request)

    def _let_urgent_in(self, plan: StepPlan, now: float) -> None:
        """Gives the places of running requests to waiting ones that outrank them, if that lets these start.

        They join the running before any of those is chosen, and so are served in their order.
        """
        while self.running and not self._on_trial:
            urgent = self.waiting.peek()
            if urgent is None or not self._policy.outranks(urgent, self.running[-1]):
                return
            victims = self._in_the_way(urgent, plan)
            if victims is None:
                return
            self.waiting.pop()
            for victim in victims:
                self._preempt(victim, urgent, "priority")
            if not self._admit(urgent, self._limits.max_num_batched_tokens, take=False):
                self.waiting.add(urgent)
                return
            self._start(urgent, plan, now)

    def _in_the_way(self, urgent: Request, plan: StepPlan) -> list[Request] | None:
        """The fewest whose places it needs, least urgent first; None when it could not start even then.

        Whoever leaves only adds room, so that halving finds how many are enough.
        """
        candidates = (each for each in reversed(self.running) if not _is_spared(each, plan))
        outranked = list(takewhile(lambda each: self._policy.outranks(urgent, each), candidates))
        concerned = self._concerned(urgent)
        least = max(0, len(self.running) + 1 - self._limits.max_num_seqs)  # for a place on a row

        def fits(count: int) -> bool:
            return all(resource.would_fit(urgent, outranked[:count]) for resource in concerned)

        if least > len(outranked) or not fits(len(outranked)):
            return None
        return outranked[: bisect_left(range(len(outranked)), True, lo=least, key=fits)]

    def _reserve(self, request: Request, num_tokens: int, verbs: Verbs, plan: StepPlan) -> bool:
        """Takes what computing the tokens needs, preempting where it is short. False: not in this step."""
        for reserve in verbs.reserve:
            while not reserve(request, num_tokens):
                victim = self._victim(request, plan)
                if victim is None:
                    return False
                self._preempt(victim, request, "kv_blocks")
                if victim is request:
                    return False
        return True

    def _victim(self, request: Request, plan: StepPlan) -> Request | None:
        """The least urgent from the end of the running up to a request; None where all of those are spared.

        The running are in order of urgency, so that a victim is never chosen yet:

            [ chosen …  request  …  victim  spared ]
        """
        for victim in reversed(self.running):
            if not _is_spared(victim, plan):
                return victim
            if victim is request:
                break
        return None

    def _preempt(self, victim: Request, by: Request, reason: str) -> None:
        victim.preemptions += 1
        victim.protected = victim.preemptions >= self._limits.max_preemptions
        victim.preempted_by = by.family.spec.request_id
        self._counters.preemptions += 1
        if len(self._preempted) < KEPT_PREEMPTIONS:
            self._preempted.append(
                Preemption(victim.family.spec.request_id, victim.choice, by.family.spec.request_id, by.choice, reason)
            )
        self.requeue(victim)

    def tell_applied(self, request: Request, end: int) -> None:
        """Tells the resources of a running request up to where its tokens are computed now."""
        verbs = self.verbs[request]
        for applied in verbs.applied:
            applied(request, end)
        request.settled_until = min([until(request) for until in verbs.settled_until], default=ENDLESS)

    def take_preemptions(self) -> list[Preemption]:
        """Those since the last call, the first KEPT_PREEMPTIONS of them; the counter counts all."""
        taken, self._preempted = self._preempted, []
        return taken

    def _describe(self, chosen: Chosen, plan: StepPlan) -> None:
        """Writes the plan's columns, and counts the tokens as computed from here on."""
        count = len(chosen.rows)
        plan.rows = array("i", chosen.rows)
        plan.num_tokens = array("i", [1]) * count
        plan.num_computed = array("i", chosen.num_computed)
        plan.flags = flags = bytearray((SAMPLES,)) * count
        plan.first_writable = array("i", bytes(4 * count))
        plan.block_counts = array("i", bytes(4 * count * plan.kv_groups))
        plan.requests, plan.epochs = chosen.requests, chosen.epochs
        for at, _, num_tokens, _ in chosen.asking:
            plan.num_tokens[at] = num_tokens
        for at, request, num_tokens, verbs in chosen.asking:
            end = request.num_computed + num_tokens
            samples = end >= request.known
            if not samples:
                flags[at] = 0
            for describe in verbs.describe:
                describe(request, plan, at)
            if samples:  # from here on it is a token behind: steady while that is all that it needs
                request.steady_until = min([request.limit - 1, *[until(request) for until in verbs.steady_until]])
                request.known = end + 1
            request.num_computed = end
        if self._policy.charges:
            for request, num_tokens in zip(plan.requests, plan.num_tokens, strict=True):
                self._policy.charge(request, num_tokens)
        if count:
            self.let_go(plan)

    def let_go(self, plan: StepPlan) -> None:
        """Tells the worker of the rows that are free now."""
        plan.freed_rows.extend(self._rows.take_freed())

    def enter(self, request: Request) -> None:
        """Counts a new request as waiting, but it stands in no line before it is added to it."""
        self._policy.entered(request)
        self.waiting.park(request)

    def remove(self, request: Request) -> None:
        """Takes out one that has ended, wherever it is."""
        if request.epoch == 0:
            self.waiting.discard(request)
            self.suspects.discard(request)
        else:
            self.running.remove(request)
            self._vacate(request)
        self._policy.left(request)

    def requeue(self, request: Request) -> None:
        """Takes a running one back to the waiting line, with nothing computed."""
        self.running.remove(request)
        self._vacate(request)
        (self.suspects if request.suspect else self.waiting).add(request)

    def requeue_all(self) -> None:
        """The same for all that run."""
        for request in reversed(self.running.copy()):
            self.requeue(request)

    def step_failed(self) -> None:
        """Nobody runs, and the worker may hold any row ever used."""
        self.requeue_all()
        self._rows.doubt()

    def worker_lost(self) -> None:
        """The next worker knows no row."""
        self.requeue_all()
        self._rows.forget()

    def position(self, request: Request) -> int | None:
        """How many stand before a waiting one; None when it is not in the line."""
        return self.waiting.position(request)

    def why(self, request: Request) -> str | None:
        """What keeps a waiting request from starting."""
        concerned = self._concerned(request)
        if all(resource.ready(request) for resource in concerned):
            if self.waiting.parked(request):
                return "waits for the first choice to compute the prompt they share"
            if self._on_trial:
                return "those that were in a failed step run first, each alone"
            if len(self.running) >= self._limits.max_num_seqs:
                return f"all {self._limits.max_num_seqs} places are taken by running choices"
        return next((reason for each in concerned if (reason := each.why(request))), None)

    @property
    def rows(self) -> Sequence[Request | None]:
        """Who is on each row."""
        return self._rows.held

    @property
    def waiting_tokens(self) -> int:
        """Known tokens of all that have no row."""
        return self.waiting.tokens + self.suspects.tokens

    @property
    def num_waiting(self) -> int:
        """All that have no row."""
        return len(self.waiting) + len(self.suspects)

    @property
    def has_freed(self) -> bool:
        """Whether there are rows of which the worker does not know that they are free."""
        return self._rows.has_freed

    @property
    def _on_trial(self) -> bool:
        return len(self.suspects) > 0 or any(request.suspect for request in self.running[:1])

    def _vacate(self, request: Request) -> None:
        for release in self.verbs.pop(request).release:
            release(request)
        self._rows.take_back(request)
        request.num_computed = request.steady_until = request.settled_until = 0
        request.known = len(request.tokens)

    def _clip(self, request: Request, budget: int, verbs: Verbs, others_wait: bool) -> int:
        """How many tokens of its gap a request may compute now."""
        num_tokens = min(request.gap, budget)
        cap = self._limits.max_prefill_tokens
        if cap is not None and num_tokens > cap and (others_wait or self._line_moves):
            num_tokens = cap
        for clip in verbs.clip:
            num_tokens = clip(request, num_tokens, budget)
        return num_tokens

    @property
    def _line_moves(self) -> bool:
        """Somebody waits, and there is a place to take."""
        return self.waiting.num_ready > 0 and len(self.running) < self._limits.max_num_seqs

    def _concerned(self, request: Request) -> tuple[Resource, ...]:
        return tuple(resource for resource in self._resources if resource.concerns(request))

    def _admit(self, request: Request, budget: int, *, take: bool) -> int:
        """How many tokens a waiting request may start with, having taken what they need if so asked. With 0 it
        holds nothing."""
        resources = self._concerned(request)
        admitted = []
        for resource in resources:
            if not resource.admit(request):
                break
            admitted.append(resource)
        else:
            verbs = self._made.setdefault(resources, verbs_of(resources))
            num_tokens = self._clip(request, budget, verbs, others_wait=False)
            if num_tokens and (not take or all(reserve(request, num_tokens) for reserve in verbs.reserve)):
                self.verbs[request] = verbs
                return num_tokens
        for resource in admitted:
            resource.release(request)
        request.num_computed = 0
        return 0

    def _start(self, request: Request, plan: StepPlan, now: float) -> None:
        """Puts a request on the lowest free row."""
        self._rows.give(request)
        insort(self.running, request, key=self._policy.rank)
        request.runs += 1
        spec, family = request.family.spec, request.family
        if family.admitted is None:
            family.admitted = now
            family.cached_tokens = min(request.num_computed, request.prompt_len)
        plan.new_rows.append(
            NewRow(
                request.row,
                request.epoch,
                request.tokens[:],
                request.prompt_len,
                spec.sampling,
                choice_seed(spec.seed, request.choice),
                spec.request_id,
                spec.traceparent,
                spec.media,
                spec.pooling,
            )
        )


def _is_spared(request: Request, plan: StepPlan) -> bool:
    """It has lost its place often enough, or got it in this very step."""
    return request.protected or any(new.epoch == request.epoch for new in plan.new_rows)
