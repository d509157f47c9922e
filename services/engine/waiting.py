"""The waiting line: who waits, in the order of the policy. It does not know what they wait for."""

from __future__ import annotations

import heapq

from services.engine.policies import Policy, Rank
from services.engine.request import Request


class WaitingLine:
    """A heap with lazy removal, and beside it the parked: those counted but not to be taken yet."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._heap: list[tuple[Rank, Request]] = []
        self._places: dict[Request, Rank] = {}
        self._parked: set[Request] = set()
        self.tokens = 0  # known tokens of all that wait

    def __len__(self) -> int:
        return len(self._places) + len(self._parked)

    def add(self, request: Request) -> None:
        """Puts a request in its place in the line; its tokens stay as they are while it waits."""
        if request in self._parked:
            self._parked.remove(request)
        else:
            self.tokens += len(request.tokens)
        place = self._policy.place(request)
        self._places[request] = place
        heapq.heappush(self._heap, (place, request))

    def park(self, request: Request) -> None:
        """Counts a request without letting it be taken, until it is added."""
        self._parked.add(request)
        self.tokens += len(request.tokens)

    def pop(self) -> Request | None:
        """Takes the first one out."""
        while self._heap:
            place, request = heapq.heappop(self._heap)
            if self._places.get(request) is place:
                del self._places[request]
                self.tokens -= len(request.tokens)
                return request
        return None

    def discard(self, request: Request) -> None:
        """Takes a request out if it waits here."""
        if request in self._parked:
            self._parked.remove(request)
        elif request in self._places:
            del self._places[request]
            if len(self._heap) > 2 * len(self._places) + 64:
                self._heap = [(place, waiting) for waiting, place in self._places.items()]
                heapq.heapify(self._heap)
        else:
            return
        self.tokens -= len(request.tokens)

    def parked(self, request: Request) -> bool:
        """It waits here but may not be taken."""
        return request in self._parked

    def position(self, request: Request) -> int | None:
        """How many stand before it; None when it is not in the line."""
        own = self._places.get(request)
        return None if own is None else sum(place < own for place in self._places.values())
