"""Quantiles of any number of values in bounded memory: exact while there are few, within 1 % when there are many."""

from __future__ import annotations

import math
from collections import Counter

from services.cli.figures import percentile

EXACT = 10_000
"""Up to so many values are kept as they are."""
_WIDTH = math.log(1.02)  # buckets whose middle is within 1 % of all that is in them


class Spread:
    """Values of at least 0. Buckets grow with the value, as in Masson et al., "DDSketch" (VLDB 2019)."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.largest = 0.0
        self._values: list[float] = []
        self._buckets: Counter[int] = Counter()
        self._zeros = 0

    def add(self, value: float) -> None:
        """Counts one more."""
        self.count += 1
        self.total += value
        self.largest = max(self.largest, value)
        if self.count <= EXACT:
            self._values.append(value)
            return
        if self._values:
            for each in self._values:
                self._count(each)
            self._values.clear()
        self._count(value)

    def _count(self, value: float) -> None:
        if value > 0:
            self._buckets[math.floor(math.log(value) / _WIDTH)] += 1
        else:
            self._zeros += 1

    @property
    def mean(self) -> float:
        """NaN of nothing."""
        return self.total / self.count if self.count else math.nan

    def quantile(self, percent: float) -> float:
        """NaN of nothing."""
        if self.count <= EXACT:
            return percentile(self._values, percent)
        before = self._zeros
        place = (self.count - 1) * percent / 100
        if place < before:
            return 0.0
        for bucket in sorted(self._buckets):
            before += self._buckets[bucket]
            if place < before:
                return min(math.exp((bucket + 0.5) * _WIDTH), self.largest)
        return self.largest

    def figures(self) -> dict[str, float] | None:
        """Mean, quantiles and the largest, to three places; None of nothing."""
        if self.count == 0:
            return None
        return {
            "mean": round(self.mean, 3),
            "p50": round(self.quantile(50), 3),
            "p90": round(self.quantile(90), 3),
            "p99": round(self.quantile(99), 3),
            "max": round(self.largest, 3),
        }
