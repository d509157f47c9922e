"""Two scrapes of each process to a row: levels of the later one, and what happened between them.

rate     what a counter grew by, per second; a counter that fell began anew at 0
median   of what a histogram counted in between, straight within the bucket that holds it
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from services.cli.top.scrape import Scrape

Scrapes = Mapping[str, Scrape | None]
"""By address; None where a process did not answer."""


@dataclass(frozen=True, slots=True)
class EngineRow:
    """An engine. What is not known is None; rates are per second, shares from 0 to 1, times milliseconds."""

    address: str
    up: bool
    name: str | None = None
    model: str | None = None
    running: float | None = None
    waiting: float | None = None
    prompt_tokens_per_s: float | None = None
    output_tokens_per_s: float | None = None
    kv_use: float | None = None
    prefix_hit_rate: float | None = None
    preemptions_per_s: float | None = None
    preemptions: float | None = None
    queue_p50_ms: float | None = None
    silence_s: float | None = None


@dataclass(frozen=True, slots=True)
class GatewayRow:
    """A gateway."""

    address: str
    up: bool
    name: str | None = None
    ready: bool | None = None
    live: float | None = None
    finished_per_s: float | None = None
    ttft_p50_ms: float | None = None
    itl_p50_ms: float | None = None
    e2e_p50_ms: float | None = None
    replays: float | None = None


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """A worker."""

    address: str
    up: bool
    name: str | None = None
    rows: float | None = None
    steps_per_s: float | None = None
    tokens_per_step: float | None = None
    step_p50_ms: float | None = None
    memory_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Overview:
    """A row per process."""

    engines: Sequence[EngineRow]
    gateways: Sequence[GatewayRow]
    workers: Sequence[WorkerRow]

    @property
    def nobody(self) -> bool:
        """Whether not one process answered."""
        return not any(row.up for rows in (self.engines, self.gateways, self.workers) for row in rows)

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Addresses:
    """host:port of the metrics of each process."""

    engines: Sequence[str]
    gateways: Sequence[str]
    workers: Sequence[str]

    @property
    def all(self) -> list[str]:
        """All of them."""
        return [*self.engines, *self.gateways, *self.workers]


def overview(addresses: Addresses, before: Scrapes, after: Scrapes) -> Overview:
    """The rows. What was not scraped before has no rates yet."""

    def between(address: str) -> _Between | None:
        now = after.get(address)
        return None if now is None else _Between(before.get(address), now)

    return Overview(
        [_engine(address, between(address)) for address in addresses.engines],
        [_gateway(address, between(address)) for address in addresses.gateways],
        [_worker(address, between(address)) for address in addresses.workers],
    )


class _Between:
    """What happened between two scrapes of one process."""

    def __init__(self, before: Scrape | None, after: Scrape) -> None:
        self._before = before
        self.after = after

    def grew(self, name: str) -> float | None:
        """By how much a counter grew."""
        now = self.after.total(name)
        if now is None or self._before is None:
            return None
        then = self._before.total(name) or 0.0
        return now - then if now >= then else now

    def rate(self, name: str) -> float | None:
        """How much it grew by, per second."""
        grew = self.grew(name)
        seconds = self.after.seconds - self._before.seconds if self._before is not None else 0.0
        return None if grew is None or seconds <= 0 else grew / seconds

    def share(self, part: str, whole: str) -> float | None:
        """What one counter grew by, of what another did."""
        top, bottom = self.grew(part), self.grew(whole)
        return None if top is None or not bottom else top / bottom

    def median_ms(self, name: str) -> float | None:
        """Of a histogram of seconds."""
        if self._before is None:
            return None
        now, then = self.after.buckets(name), self._before.buckets(name)
        fell = any(now.get(bound, 0.0) < count for bound, count in then.items())
        seconds = median(now if fell else {bound: count - then.get(bound, 0.0) for bound, count in now.items()})
        return None if seconds is None else seconds * 1000


def median(buckets: Mapping[float, float]) -> float | None:
    """Of a histogram, from cumulative counts by ascending upper bound; beyond the last bound, that bound."""
    total = max(buckets.values(), default=0.0)
    low, below = 0.0, 0.0
    for bound, count in buckets.items():
        if total and count >= total / 2:
            part = (total / 2 - below) / (count - below)
            return low if math.isinf(bound) else min(bound, low + (bound - low) * part)
        low, below = bound, count
    return None


def _engine(address: str, seen: _Between | None) -> EngineRow:
    if seen is None:
        return EngineRow(address, False)
    return EngineRow(
        address,
        True,
        name=seen.after.label("vllm:num_requests_running", "engine"),
        model=seen.after.label("vllm:num_requests_running", "model_name"),
        running=seen.after.total("vllm:num_requests_running"),
        waiting=seen.after.total("vllm:num_requests_waiting"),
        prompt_tokens_per_s=seen.rate("vllm:prompt_tokens_total"),
        output_tokens_per_s=seen.rate("vllm:generation_tokens_total"),
        kv_use=seen.after.total("vllm:kv_cache_usage_perc"),
        prefix_hit_rate=seen.share("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
        preemptions_per_s=seen.rate("vllm:num_preemptions_total"),
        preemptions=seen.after.total("vllm:num_preemptions_total"),
        queue_p50_ms=seen.median_ms("vllm:request_queue_time_seconds"),
        silence_s=seen.after.total("triptych:engine_silence_seconds"),
    )


def _gateway(address: str, seen: _Between | None) -> GatewayRow:
    if seen is None:
        return GatewayRow(address, False)
    ready = seen.after.total("triptych:gateway_ready")
    return GatewayRow(
        address,
        True,
        name=seen.after.label("triptych:gateway_info", "gateway"),
        ready=None if ready is None else ready > 0,
        live=seen.after.total("triptych:gateway_live_requests"),
        finished_per_s=seen.rate("vllm:e2e_request_latency_seconds_count"),
        ttft_p50_ms=seen.median_ms("vllm:time_to_first_token_seconds"),
        itl_p50_ms=seen.median_ms("vllm:inter_token_latency_seconds"),
        e2e_p50_ms=seen.median_ms("vllm:e2e_request_latency_seconds"),
        replays=seen.after.total("triptych:gateway_replays"),
    )


def _worker(address: str, seen: _Between | None) -> WorkerRow:
    if seen is None:
        return WorkerRow(address, False)
    return WorkerRow(
        address,
        True,
        name=seen.after.label("triptych:worker_step_seconds_count", "worker"),
        rows=seen.after.total("triptych:worker_rows"),
        steps_per_s=seen.rate("triptych:worker_step_seconds_count"),
        tokens_per_step=seen.share("triptych:worker_step_tokens_sum", "triptych:worker_step_tokens_count"),
        step_p50_ms=seen.median_ms("triptych:worker_step_seconds"),
        memory_bytes=seen.after.total("triptych:worker_memory_bytes"),
    )
