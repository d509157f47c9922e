"""The waiting line: who waits, in the order of the policy. It does not know what they wait for.

Each tenant has a queue of its own, and a line of tenants says whose head is next:

    tenants   (level, used, …) ─▶ A   (level, used, …) ─▶ B
    queues    A: r3 r7 r9             B: r4 r8

Both are heaps with lazy removal. The entry of a tenant that counts is the smallest one it was given.
It may be too small, because its head has been taken or its use has grown since; it is made right when
it comes to the top. It is never too large.
"""

from __future__ import annotations

import heapq

from services.engine.policies import Policy, Rank
from services.engine.request import Request

_SLACK = 64
"""Dead entries that a heap may hold beside as many as it has live ones."""


class WaitingLine:
    """All that wait, and beside them the parked: those counted but not to be taken yet."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._tenants: list[tuple[Rank, str]] = []
        self._entries: dict[str, Rank] = {}  # the entry of each tenant that counts
        self._queues: dict[str, list[tuple[Rank, Request]]] = {}
        self._counts: dict[str, int] = {}  # live entries of each queue; none is 0
        self._places: dict[Request, Rank] = {}
        self._parked: set[Request] = set()
        self.tokens = 0  # known tokens of all that wait

    def __len__(self) -> int:
        return len(self._places) + len(self._parked)

    @property
    def num_ready(self) -> int:
        """Those that can be taken."""
        return len(self._places)

    def add(self, request: Request) -> None:
        """Puts a request in its place in the line; its tokens stay as they are while it waits."""
        if request in self._parked:
            self._parked.remove(request)
        else:
            self.tokens += len(request.tokens)
        place = self._places[request] = self._policy.place(request)
        tenant = self._policy.tenant(request)
        queue = self._queues.setdefault(tenant, [])
        heapq.heappush(queue, (place, request))
        self._counts[tenant] = self._counts.get(tenant, 0) + 1
        if queue[0][1] is request:
            rank = self._rank(tenant, place)
            if tenant not in self._entries or rank < self._entries[tenant]:
                self._enter(tenant, rank)

    def park(self, request: Request) -> None:
        """Counts a request without letting it be taken, until it is added."""
        self._parked.add(request)
        self.tokens += len(request.tokens)

    def peek(self) -> Request | None:
        """The first one, left where it is."""
        while self._tenants:
            rank, tenant = self._tenants[0]
            if self._entries.get(tenant) is not rank:
                heapq.heappop(self._tenants)
                continue
            head = self._head(tenant)
            if head is not None and rank == (true_rank := self._full_rank(head)):
                return head
            heapq.heappop(self._tenants)
            del self._entries[tenant]
            if head is not None:
                self._enter(tenant, true_rank)
        return None

    def pop(self) -> Request | None:
        """Takes the first one out."""
        request = self.peek()
        if request is not None:
            heapq.heappop(self._queues[self._policy.tenant(request)])  # where `peek` has brought it to the top
            self._take_out(request)
            self._policy.taken(request)
        return request

    def discard(self, request: Request) -> None:
        """Takes a request out if it waits here."""
        if request in self._parked:
            self._parked.remove(request)
            self.tokens -= len(request.tokens)
        elif request in self._places:
            self._take_out(request)

    def parked(self, request: Request) -> bool:
        """It waits here but may not be taken."""
        return request in self._parked

    def position(self, request: Request) -> int | None:
        """How many stand before it; None when it is not in the line. Looks at the whole line."""
        if request not in self._places:
            return None
        own = self._full_rank(request)
        return sum(self._full_rank(other) < own for other in self._places)

    def _take_out(self, request: Request) -> None:
        del self._places[request]
        self.tokens -= len(request.tokens)
        tenant = self._policy.tenant(request)
        left = self._counts[tenant] - 1
        if left == 0:
            del self._counts[tenant], self._queues[tenant]
            self._entries.pop(tenant, None)
        else:
            self._counts[tenant] = left
            queue = self._queues[tenant]
            if len(queue) > 2 * left + _SLACK:
                queue[:] = [(place, each) for place, each in queue if self._places.get(each) is place]
                heapq.heapify(queue)

    def _enter(self, tenant: str, rank: Rank) -> None:
        self._entries[tenant] = rank
        heapq.heappush(self._tenants, (rank, tenant))
        if len(self._tenants) > 2 * len(self._entries) + _SLACK:
            self._tenants = [(rank, tenant) for tenant, rank in self._entries.items()]
            heapq.heapify(self._tenants)

    def _head(self, tenant: str) -> Request | None:
        """The first of a tenant's queue, after the dead before it have been cleared away."""
        queue = self._queues.get(tenant)
        while queue:
            place, request = queue[0]
            if self._places.get(request) is place:
                return request
            heapq.heappop(queue)
        return None

    def _full_rank(self, request: Request) -> Rank:
        return self._rank(self._policy.tenant(request), self._places[request])

    def _rank(self, tenant: str, place: Rank) -> Rank:
        return (place[0], self._policy.used(tenant), *place[1:])
