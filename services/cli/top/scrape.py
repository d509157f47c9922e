"""The metrics of a process at one moment: fetched, and asked for by name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

_TIMEOUT_S = 2.0

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Scrape:
    """Samples by name, each with its labels. `seconds` is the time of a monotonic clock."""

    seconds: float
    samples: Mapping[str, list[tuple[Labels, float]]] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, seconds: float) -> Scrape:
        """Reads Prometheus' text format. Raises ValueError."""
        samples: dict[str, list[tuple[Labels, float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return cls(seconds, samples)

    def total(self, name: str) -> float | None:
        """The sum over all labels; None where there is no such sample."""
        found = self.samples.get(name)
        return None if found is None else sum(value for _, value in found)

    def label(self, name: str, label: str) -> str | None:
        """A label of the first sample with that name."""
        found = self.samples.get(name)
        return found[0][0].get(label) if found else None

    def buckets(self, name: str) -> dict[float, float]:
        """A histogram's cumulative counts by upper bound in ascending order, over all labels."""
        counts: dict[float, float] = {}
        for labels, value in self.samples.get(f"{name}_bucket", ()):
            bound = float(labels["le"])
            counts[bound] = counts.get(bound, 0.0) + value
        return dict(sorted(counts.items()))


async def scrape(session: aiohttp.ClientSession, address: str) -> Scrape | None:
    """The metrics at host:port; None where nothing of that kind answers."""
    try:
        async with session.get(f"http://{address}/metrics", timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as answer:
            answer.raise_for_status()
            text = await answer.text()
        return Scrape.parse(text, time.monotonic())
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None


async def scrape_all(session: aiohttp.ClientSession, addresses: Iterable[str]) -> dict[str, Scrape | None]:
    """All at once, by address."""
    names = list(dict.fromkeys(addresses))
    return dict(zip(names, await asyncio.gather(*(scrape(session, name) for name in names)), strict=True))
