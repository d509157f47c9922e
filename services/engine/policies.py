"""Who goes first. A policy only compares and counts; it holds no requests.

Every policy orders by level, then by what the tenant has used, then by who ran before, then by
arrival. They differ in which of the four they look at:

            level                       used                   preempts for admission
FirstCome   0                           0                      never
Priority    priority, older is lower    0                      the less urgent
FairShare   priority, older is lower    tokens of the tenant   the less urgent
"""

# ruff: noqa: ARG002 - what a policy does not look at
from __future__ import annotations

import heapq
import math

from services.common.errors import InvalidArgument
from services.engine.request import Request, RequestSpec

Rank = tuple[int, ...]
"""Sorts requests: the smallest goes first. No two live requests have the same one."""


class FirstCome:
    """By arrival; one that ran before goes first in the line."""

    name = "fcfs"
    charges = False
    """Whether it wants to be told what each step computes."""
    preempts = False
    """Whether a waiting request may take the place of a running one."""

    def check(self, spec: RequestSpec) -> None:
        """Refuses, naming the field, what the policy cannot honour."""
        if spec.priority:
            raise InvalidArgument("the engine's policy is fcfs, which knows no priority", field="priority")

    def level(self, request: Request) -> int:
        """The lower, the sooner; it never changes while the request lives."""
        return 0

    def rank(self, request: Request) -> Rank:
        """Its place among the running: served in this order, preempted from the other end."""
        return (self.level(request), request.arrival)

    def place(self, request: Request) -> Rank:
        """Its place in its tenant's queue. What was computed for a preempted one is soonest lost."""
        return (self.level(request), 0 if request.runs else 1, request.arrival)

    def outranks(self, request: Request, running: Request) -> bool:
        """Whether a waiting request may take the place of this running one."""
        return False

    def tenant(self, request: Request) -> str:
        """Whose share it uses."""
        return ""

    def used(self, tenant: str) -> int:
        """What the tenant has used. It only grows while the tenant has live requests."""
        return 0

    def entered(self, request: Request) -> None:
        """The request lives from now on."""

    def taken(self, request: Request) -> None:
        """The request was taken from the line."""

    def charge(self, request: Request, num_tokens: int) -> None:
        """A step computes so many tokens of the request."""

    def left(self, request: Request) -> None:
        """The request has ended."""


class Priority(FirstCome):
    """Strictly by priority, lower first, with ageing: `ageing_s` of waiting make up for one level.

    The level is priority + floor(arrival time / ageing_s). It is as if each waiting request rose by
    one level per `ageing_s`, since all rise alike; but it never changes, so a heap can hold it. A
    request of priority p therefore waits for those of priority q < p that arrive within about
    (p - q) * ageing_s after it, and for no later ones.
    """

    name = "priority"
    preempts = True

    def __init__(self, ageing_s: float = math.inf) -> None:
        self._ageing_s = ageing_s

    def check(self, spec: RequestSpec) -> None:
        """Every priority can be honoured."""

    def level(self, request: Request) -> int:
        """Priority, and when it came."""
        return request.priority + math.floor(request.family.arrived / self._ageing_s)

    def outranks(self, request: Request, running: Request) -> bool:
        """By priority alone: age lets nobody take a place away."""
        return request.priority < running.priority


class FairShare(Priority):
    """Priority, and among equals the tenant first that has used the fewest tokens.

    Every computed token is charged to its tenant, a cached one is not. A tenant that was idle comes
    back at no less than what the tenant last served had used, so that nobody saves up a share.
    Source: the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models"
    (OSDI 2024), with the floor of start-time fair queueing.
    """

    name = "fair"
    charges = True

    def __init__(self, ageing_s: float = math.inf) -> None:
        super().__init__(ageing_s)
        self._used: dict[str, int] = {}
        self._live: dict[str, int] = {}
        self._floor = 0  # what the tenant last served had used
        self._idle: list[tuple[int, str]] = []  # a heap: tenants without live requests that have used more than that

    def tenant(self, request: Request) -> str:
        """The tenant that was named."""
        return request.family.spec.tenant

    def used(self, tenant: str) -> int:
        """Tokens."""
        return self._used.get(tenant, self._floor)

    def entered(self, request: Request) -> None:
        """The first one of an idle tenant lifts it to the floor."""
        tenant = self.tenant(request)
        if tenant not in self._live:
            self._used[tenant] = max(self.used(tenant), self._floor)
        self._live[tenant] = self._live.get(tenant, 0) + 1

    def taken(self, request: Request) -> None:
        """Its tenant is the one served."""
        self._floor = max(self._floor, self.used(self.tenant(request)))

    def charge(self, request: Request, num_tokens: int) -> None:
        """To its tenant."""
        self._used[request.family.spec.tenant] += num_tokens

    def left(self, request: Request) -> None:
        """An idle tenant is forgotten once the floor has reached it."""
        tenant = self.tenant(request)
        self._live[tenant] -= 1
        if self._live[tenant] == 0:
            del self._live[tenant]
            heapq.heappush(self._idle, (self._used[tenant], tenant))
            if not self._live:  # nobody is left to whom anybody could owe a share
                self._floor = max(self._floor, *self._used.values())
        while self._idle and self._idle[0][0] <= self._floor:
            used, idle = heapq.heappop(self._idle)
            if idle not in self._live and self._used.get(idle) == used:
                del self._used[idle]


Policy = FirstCome
"""What every policy is."""


def make_policy(name: str, ageing_s: float) -> Policy:
    """The policy of that name; `ageing_s` is for those that know priorities."""
    if name == FirstCome.name:
        return FirstCome()
    return {each.name: each for each in (Priority, FairShare)}[name](ageing_s)
