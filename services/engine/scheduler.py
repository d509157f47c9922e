"""What runs in the next step. Pure: it decides, and knows no feature, no clock and no worker."""

from __future__ import annotations

import heapq
import itertools
from array import array
from bisect import insort
from collections.abc import Callable, Sequence

from services.engine.plan import SAMPLES, NewRow, StepPlan
from services.engine.policies import Policy
from services.engine.report import Counters
from services.engine.request import Request, choice_seed
from services.engine.resources import Resource, Verbs, verbs_of
from services.engine.waiting import WaitingLine

LOOK_AHEAD = 4
"""How many that cannot start yet may be passed over in one step."""
MAX_OVERTAKES = 32
"""How many may start before one that cannot; from the next step on the line waits for it."""

Chosen = tuple[Request, int, Verbs]
"""Who runs in the step being planned, with how many tokens, and what it carries."""


class Scheduler:
    """Rows, the running set and the waiting line."""

    def __init__(
        self,
        policy: Policy,
        resources: Sequence[Resource],
        *,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        counters: Counters,
    ) -> None:
        self._policy = policy
        self._resources = resources
        self._max_tokens = max_num_batched_tokens
        self._max_running = max_num_seqs
        self._counters = counters
        self.running: list[Request] = []  # in the order of the policy
        self.verbs: dict[Request, Verbs] = {}  # of what each that runs carries
        self._made: dict[tuple[Resource, ...], Verbs] = {}
        self.waiting = WaitingLine(policy)
        self.suspects = WaitingLine(policy)  # each runs alone before anything else runs
        self.rows: list[Request | None] = [None] * max_num_seqs
        self._free_rows = list(range(max_num_seqs))  # a heap
        self._freed: set[int] = set()  # rows of which the worker does not know that they are free
        self._rows_used = 0  # rows from here on have never been used
        self._epochs = itertools.count(1)

    def schedule(self, plan: StepPlan, now: float) -> None:
        """Fills the plan: running requests in order, then waiting ones, within one budget of tokens."""
        chosen: list[Chosen] = []
        ran = len(self.running)
        budget = self._go_on(chosen, self._max_tokens)
        if len(self.running) == ran:  # who was preempted shall not come back in the same step
            self._let_in(chosen, budget, plan, now)
        self._describe(chosen, plan)

    def _go_on(self, chosen: list[Chosen], budget: int) -> int:
        """Chooses among the running; what is left of the budget."""
        for request in self.running:
            if budget == 0:
                break
            verbs = self.verbs[request]
            num_tokens = _clip(request, budget, verbs)
            if num_tokens == 0:
                continue
            for reserve in verbs.reserve:
                if not reserve(request, num_tokens) and not self._make_room(request, num_tokens, reserve):
                    break
            else:
                chosen.append((request, num_tokens, verbs))
                budget -= num_tokens
        return budget

    def _let_in(self, chosen: list[Chosen], budget: int, plan: StepPlan, now: float) -> None:
        """Starts waiting requests in their order; a few that cannot start yet are passed over."""
        line, places = (self.suspects, 1) if self._on_trial else (self.waiting, self._max_running)
        passed: list[Request] = []
        while budget and len(self.running) < places and len(passed) <= LOOK_AHEAD:
            request = line.pop()
            if request is None:
                break
            num_tokens = self._admit(request, budget)
            if num_tokens:
                self._start(request, plan, now)
                chosen.append((request, num_tokens, self.verbs[request]))
                budget -= num_tokens
                for other in passed:
                    other.overtaken += 1
            else:
                passed.append(request)
                if request.overtaken >= MAX_OVERTAKES:
                    break
        for request in passed:
            line.add(request)

    def _make_room(self, request: Request, num_tokens: int, reserve: Callable[[Request, int], bool]) -> bool:
        """Preempts until a running request can reserve. False when that hit the request itself.

        The running are in order of urgency, so a victim, the last, is never chosen yet:

            [ chosen …  request  …  victim ]
        """
        while True:
            victim = self.running[-1]
            victim.preemptions += 1
            self._counters.preemptions += 1
            self.requeue(victim)
            if victim is request:
                return False
            if reserve(request, num_tokens):
                return True

    def _describe(self, chosen: list[Chosen], plan: StepPlan) -> None:
        """Writes the plan's columns, and counts the tokens as computed from here on."""
        plan.rows = array("i", [request.row for request, _, _ in chosen])
        plan.num_tokens = array("i", [num_tokens for _, num_tokens, _ in chosen])
        plan.num_computed = array("i", [request.num_computed for request, _, _ in chosen])
        plan.flags = bytearray(len(chosen))
        plan.first_writable = array("i", bytes(4 * len(chosen)))
        plan.block_counts = array("i", bytes(4 * len(chosen)))
        entries, flags = plan.entries, plan.flags
        for at, (request, num_tokens, verbs) in enumerate(chosen):
            for describe in verbs.describe:
                describe(request, plan, at)
            request.num_computed = end = request.num_computed + num_tokens
            samples = end == request.known
            if samples:
                flags[at] |= SAMPLES
                request.known = end + 1
            entries.append((request, request.epoch, end, samples))
        if chosen:
            plan.freed_rows.extend(sorted(self._freed))
            self._freed.clear()

    def remove(self, request: Request) -> None:
        """Takes out one that has ended, wherever it is."""
        if request.epoch == 0:
            self.waiting.discard(request)
            self.suspects.discard(request)
        else:
            self.running.remove(request)
            self._vacate(request)

    def requeue(self, request: Request) -> None:
        """Takes a running one back to the waiting line, with nothing computed."""
        self.running.remove(request)
        self._vacate(request)
        (self.suspects if request.suspect else self.waiting).add(request)

    def requeue_all(self) -> None:
        """The same for all that run. The worker may hold any row ever used."""
        for request in reversed(self.running.copy()):
            self.requeue(request)
        self._freed = set(range(self._rows_used))

    def worker_lost(self) -> None:
        """The next worker knows no row, and nobody is suspect before it."""
        self.requeue_all()
        self._freed.clear()
        while (request := self.suspects.pop()) is not None:
            request.suspect = False
            self.waiting.add(request)

    def position(self, request: Request) -> int | None:
        """How many stand before a waiting one; None when it is not in the line."""
        return self.waiting.position(request)

    def why(self, request: Request) -> str | None:
        """What keeps a waiting request from starting."""
        if self.waiting.parked(request):
            return "waits for the first choice to compute the prompt they share"
        if len(self.running) >= self._max_running:
            return f"all {self._max_running} places are taken by running choices"
        reasons = (resource.why(request) for resource in self._resources if resource.concerns(request))
        return next((reason for reason in reasons if reason), None)

    @property
    def waiting_tokens(self) -> int:
        """Known tokens of all that have no row."""
        return self.waiting.tokens + self.suspects.tokens

    @property
    def num_waiting(self) -> int:
        """All that have no row."""
        return len(self.waiting) + len(self.suspects)

    @property
    def _on_trial(self) -> bool:
        return len(self.suspects) > 0 or any(request.suspect for request in self.running[:1])

    def _vacate(self, request: Request) -> None:
        for release in self.verbs.pop(request).release:
            release(request)
        self.rows[request.row] = None
        heapq.heappush(self._free_rows, request.row)
        self._freed.add(request.row)
        request.epoch = request.num_computed = 0
        request.known = len(request.tokens)

    def _admit(self, request: Request, budget: int) -> int:
        """How many tokens a waiting request starts with; with 0 it holds nothing."""
        resources = tuple(resource for resource in self._resources if resource.concerns(request))
        admitted = []
        for resource in resources:
            if not resource.admit(request):
                break
            admitted.append(resource)
        else:
            verbs = self._made.setdefault(resources, verbs_of(resources))
            num_tokens = _clip(request, budget, verbs)
            if num_tokens and all(reserve(request, num_tokens) for reserve in verbs.reserve):
                self.verbs[request] = verbs
                return num_tokens
        for resource in admitted:
            resource.release(request)
        request.num_computed = 0
        return 0

    def _start(self, request: Request, plan: StepPlan, now: float) -> None:
        """Puts a request on the lowest free row."""
        row = heapq.heappop(self._free_rows)
        request.row, request.epoch = row, next(self._epochs)
        self.rows[row] = request
        self._rows_used = max(self._rows_used, row + 1)
        insort(self.running, request, key=self._policy.rank)
        request.runs += 1
        spec, family = request.family.spec, request.family
        if family.admitted is None:
            family.admitted = now
            family.cached_tokens = min(request.num_computed, request.prompt_len)
        plan.new_rows.append(
            NewRow(
                row,
                request.epoch,
                request.tokens[:],
                request.prompt_len,
                spec.sampling,
                choice_seed(spec.seed, request.choice),
                spec.request_id,
                spec.traceparent,
            )
        )


def _clip(request: Request, budget: int, verbs: Verbs) -> int:
    """How many tokens of its gap a request may compute now."""
    gap = request.gap
    num_tokens = gap if gap < budget else budget
    for clip in verbs.clip:
        num_tokens = clip(request, num_tokens, budget)
    return num_tokens
