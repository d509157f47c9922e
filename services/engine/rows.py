"""The rows: which request is on which, and what the worker has yet to hear of it."""

from __future__ import annotations

import heapq
import itertools

from services.engine.request import Request


class Rows:
    """Rows 0 to count - 1. The lowest free one is given out, so that the worker's batches stay dense."""

    def __init__(self, count: int) -> None:
        self.held: list[Request | None] = [None] * count
        self._free = list(range(count))  # a heap
        self._freed: set[int] = set()  # of which the worker does not know that they are free
        self._used = 0  # rows from here on have never been used
        self._epochs = itertools.count(1)

    @property
    def has_freed(self) -> bool:
        """Whether there is anything for the worker to hear."""
        return bool(self._freed)

    def give(self, request: Request) -> None:
        """Puts a request on a free row, under an epoch that no other residence has had."""
        row = heapq.heappop(self._free)
        request.row, request.epoch = row, next(self._epochs)
        self.held[row] = request
        self._used = max(self._used, row + 1)

    def take_back(self, request: Request) -> None:
        """Its row is free; the worker hears of it with the next step."""
        request.epoch = 0
        self.held[request.row] = None
        heapq.heappush(self._free, request.row)
        self._freed.add(request.row)

    def take_freed(self) -> list[int]:
        """What the worker hears now."""
        freed = sorted(self._freed)
        self._freed.clear()
        return freed

    def doubt(self) -> None:
        """All rows are free, and the worker may hold any that was ever used."""
        self._freed = set(range(self._used))

    def forget(self) -> None:
        """All rows are free, and the next worker holds none."""
        self._freed.clear()
