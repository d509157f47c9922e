"""What the gateway counts, under the names that dashboards for vLLM know. One registry per process."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from services.common.metrics import LATENCY_BUCKETS, TOKEN_TIME_BUCKETS, TTFT_BUCKETS, token_count_buckets
from services.gateway.request import FinishReason, GenerateSpec

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("model_name", "engine")
_TOKENS = token_count_buckets(131_072)
_N = (1, 2, 5, 10, 20)
_SUCCESS = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_ID: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.TOOL_CALLS: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}


class TokenTimes(Collector):
    """A histogram that is cheap to add to, since it is added to at every token."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._series: dict[tuple[str, str], list[float]] = {}  # a count per bucket, then the sum

    def series(self, labels: tuple[str, str]) -> list[float]:
        """What `add` adds to."""
        return self._series.setdefault(labels, [0.0] * (len(TOKEN_TIME_BUCKETS) + 2))

    @staticmethod
    def add(series: list[float], seconds: float) -> None:
        """One observation."""
        series[bisect_left(TOKEN_TIME_BUCKETS, seconds)] += 1
        series[-1] += seconds

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """The series as Prometheus wants them: cumulative."""
        family = HistogramMetricFamily(self._name, self._text, labels=_LABELS)
        for labels, series in self._series.items():
            bounds = [*map(floatToGoString, TOKEN_TIME_BUCKETS), "+Inf"]
            family.add_metric(labels, list(zip(bounds, accumulate(series[:-1]), strict=True)), series[-1])
        yield family


class HttpMetrics:
    """What a process that speaks HTTP counts."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._http = Counter(
            "http_requests", "HTTP requests answered.", ("method", "handler", "status"), registry=self.registry
        )
        self._http_seconds = Histogram(
            "http_request_duration_seconds", "Time to the end of the answer.", ("handler",), registry=self.registry
        )

    def http_answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """An HTTP request was answered, or its client left (499)."""
        self._http.labels(method, route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def render(self) -> bytes:
        """The scrape."""
        return generate_latest(self.registry)


class MediaMetrics:
    """Images and videos of requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._items = Counter(
            "triptych:media_items", "Images and videos prepared for requests.", ("modality",), registry=registry
        )
        self._seconds = Histogram(
            "triptych:media_seconds",
            "Time from the part of a request to its blob: got, waited, decoded, or found.",
            ("modality",),
            buckets=LATENCY_BUCKETS,
            registry=registry,
        )
        self.made = Gauge(
            "triptych:media_made", "Images and videos that were decoded, not found made already.", registry=registry
        )
        self._failures = Counter(
            "triptych:media_failures", "Parts that were refused, by reason.", ("modality", "reason"), registry=registry
        )

        self.found = Gauge(
            "triptych:media_cache_hits", "Images and videos that were prepared before.", registry=registry
        )

    def prepared(self, modality: str, seconds: float) -> None:
        """An item is there."""
        self._items.labels(modality).inc()
        self._seconds.labels(modality).observe(seconds)

    def failed(self, modality: str, reason: str) -> None:
        """A part could not be read; `reason` is the word of its error."""
        self._failures.labels(modality, reason.lower()).inc()


class GatewayMetrics(HttpMetrics):
    """All series of one gateway process."""

    def __init__(self) -> None:
        super().__init__()
        registry = self.registry

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=registry)

        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS)
        self.itl = TokenTimes("vllm:inter_token_latency_seconds", "Time between two deliveries of tokens.")
        registry.register(self.itl)
        self.tpot = histogram(
            "request_time_per_output_token_seconds", "Mean time per token after the first.", TOKEN_TIME_BUCKETS
        )
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to last token.", LATENCY_BUCKETS)
        self.prompt = histogram("request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.generation = histogram("request_generation_tokens", "Tokens produced for a request.", _TOKENS)
        self.params_n = histogram("request_params_n", "Choices asked for.", _N)
        self.params_max_tokens = histogram("request_params_max_tokens", "max_tokens of a request.", _TOKENS)
        self.success = Counter(
            "vllm:request_success",
            "Choices that ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=registry,
        )
        self.media = MediaMetrics(registry)
        self.live = Gauge("triptych:gateway_live_requests", "Requests that have not ended.", registry=registry)
        self.replays = Gauge(
            "triptych:gateway_replays", "Requests submitted again after a lost engine.", registry=registry
        )
        self.aborts = Gauge("triptych:gateway_aborts", "Aborts sent to the engine.", registry=registry)
        self.ready = Gauge("triptych:gateway_ready", "1 while requests can run.", registry=registry)

    def introduce(self, name: str, version: str) -> None:
        """Which process this is, as labels of a gauge that is always 1."""
        info = Gauge("triptych:gateway_info", "This process.", ("gateway", "version"), registry=self.registry)
        info.labels(name, version).set(1)

    def watch(self, spec: GenerateSpec, engine: str, arrived: float) -> RequestTimer:
        """Begins to time a request that arrived at `arrived` (time.monotonic)."""
        return RequestTimer(self, spec, engine, arrived)


class RequestTimer:
    """The times and counts of one request; its series are looked up once."""

    __slots__ = ("_arrived", "_finishes", "_first", "_itl", "_labels", "_last", "_metrics", "_spec", "_tokens")

    def __init__(self, metrics: GatewayMetrics, spec: GenerateSpec, engine: str, arrived: float) -> None:
        self._metrics = metrics
        self._spec = spec
        self._labels = (spec.model, engine)
        self._itl = metrics.itl.series(self._labels)
        self._arrived = arrived
        self._first: float | None = None
        self._last = arrived
        self._tokens = 0
        self._finishes: list[FinishReason] = []

    def tokens(self, count: int) -> None:
        """Tokens came from the engine."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
            self._metrics.ttft.labels(*self._labels).observe(now - self._arrived)
        else:
            TokenTimes.add(self._itl, now - self._last)
        self._last = now
        self._tokens += count

    def finish(self, reason: FinishReason) -> None:
        """A choice ended."""
        self._finishes.append(reason)

    def end(self, failed: FinishReason | None = None) -> dict[str, object]:
        """The request is over, `failed` for what did not finish; answers what the log line says."""
        metrics, labels, now = self._metrics, self._labels, time.monotonic()
        unfinished = self._spec.sampling.n - len(self._finishes)
        if failed is not None:
            self._finishes += [failed] * unfinished
        metrics.e2e.labels(*labels).observe(now - self._arrived)
        metrics.prompt.labels(*labels).observe(len(self._spec.prompt_ids))
        metrics.generation.labels(*labels).observe(self._tokens)
        metrics.params_n.labels(*labels).observe(self._spec.sampling.n)
        metrics.params_max_tokens.labels(*labels).observe(self._spec.sampling.max_tokens)
        for reason in self._finishes:
            metrics.success.labels(*labels, _SUCCESS.get(reason, "error")).inc()
        ttft = None if self._first is None else self._first - self._arrived
        if self._first is not None and self._tokens > 1:
            metrics.tpot.labels(*labels).observe((self._last - self._first) / (self._tokens - 1))
        return {
            "prompt_tokens": len(self._spec.prompt_ids),
            "completion_tokens": self._tokens,
            "finish": ",".join(sorted({reason.name.lower() for reason in self._finishes})),
            "ttft_ms": None if ttft is None else round(ttft * 1000, 1),
            "total_ms": round((now - self._arrived) * 1000, 1),
        }
