"""Who gives up when: the deadlines of requests that have not run yet."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from services.engine.request import Family

_SLACK = 64


class Deadlines:
    """A heap. Those that ran or ended stay in it until they come up or are half of it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Family]] = []
        self._worth_clearing = _SLACK

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, family: Family, at: float) -> None:
        """The request gives up at this time if it has not run by then."""
        if len(self._heap) >= self._worth_clearing:
            self._heap = [entry for entry in self._heap if _waits(entry[2])]
            heapq.heapify(self._heap)
            self._worth_clearing = 2 * len(self._heap) + _SLACK
        heapq.heappush(self._heap, (at, family.choices[0].arrival, family))

    @property
    def next(self) -> float | None:
        """When the next one may give up."""
        return self._heap[0][0] if self._heap else None

    def passed(self, now: float) -> Iterator[Family]:
        """The requests that give up now; each is told once."""
        while self._heap and self._heap[0][0] <= now:
            _, _, family = heapq.heappop(self._heap)
            if _waits(family):
                yield family


def _waits(family: Family) -> bool:
    return family.admitted is None and family.leader is not None
