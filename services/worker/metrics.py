"""The worker's Prometheus metrics, all `triptych:worker_…`: vLLM's names belong to engine and gateway, so that
a sum over the scrapes of all roles counts nothing twice."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.common.metrics import STEP_TOKENS_BUCKETS, TOKEN_TIME_BUCKETS

_LABELS = ("model_name", "worker")


class WorkerMetrics:
    """What one worker process counts. It does not know who scrapes."""

    def __init__(self, registry: CollectorRegistry, worker: str) -> None:
        self._worker = worker
        self._step_tokens = Histogram(
            "triptych:worker_step_tokens",
            "Tokens computed by a step.",
            _LABELS,
            buckets=STEP_TOKENS_BUCKETS,
            registry=registry,
        )
        self._step_seconds = Histogram(
            "triptych:worker_step_seconds",
            "Time from taking a step to its result.",
            _LABELS,
            buckets=TOKEN_TIME_BUCKETS,
            registry=registry,
        )
        self._kernel_seconds = Counter(
            "triptych:worker_kernel_seconds", "Time of steps spent in native kernels.", _LABELS, registry=registry
        )
        self._steps = Counter(
            "triptych:worker_steps", "Steps by how they went.", (*_LABELS, "status"), registry=registry
        )
        self._sampled = Counter("triptych:worker_sampled_tokens", "Tokens sampled.", _LABELS, registry=registry)
        self._bad_rows = Counter(
            "triptych:worker_failed_rows",
            "Rows that gave no token, by reason.",
            (*_LABELS, "reason"),
            registry=registry,
        )
        self._encoded = Counter(
            "triptych:worker_encoded_media", "Items that were encoded.", (*_LABELS, "modality"), registry=registry
        )
        self._missing = Counter(
            "triptych:worker_missing_media", "Items to encode whose content was not found.", _LABELS, registry=registry
        )
        self._rows = Gauge("triptych:worker_rows", "Rows that hold a request.", _LABELS, registry=registry)
        self._memory = Gauge(
            "triptych:worker_memory_bytes", "Memory by part: weights, step, kv.", (*_LABELS, "part"), registry=registry
        )
        self._by_model = (
            self._step_tokens,
            self._step_seconds,
            self._kernel_seconds,
            self._steps,
            self._sampled,
            self._bad_rows,
            self._encoded,
            self._missing,
            self._rows,
            self._memory,
        )
        self._labels = ("", worker)

    def serve(self, model_name: str) -> None:
        """From now on the metrics are those of this model, and there are none of another. Comes before any step."""
        labels = (model_name, self._worker)
        if labels == self._labels:
            return
        for metric in self._by_model:
            metric.clear()
        self._labels = labels
        self._tokens_of_step = self._step_tokens.labels(*labels)
        self._seconds_of_step = self._step_seconds.labels(*labels)
        self._seconds_of_kernels = self._kernel_seconds.labels(*labels)
        self._sampled_tokens = self._sampled.labels(*labels)
        self._steps_done = self._steps.labels(*labels, "ok")
        self._held_rows = self._rows.labels(*labels)

    def step_done(self, tokens: int, seconds: float, sampled: int, rows: int, kernel_s: float = 0.0) -> None:
        """A step ran, `kernel_s` of its seconds in native kernels; `rows` hold a request after it."""
        self._steps_done.inc()
        self._tokens_of_step.observe(tokens)
        self._seconds_of_step.observe(seconds)
        self._seconds_of_kernels.inc(kernel_s)
        self._sampled_tokens.inc(sampled)
        self._held_rows.set(rows)

    def step_lost(self, status: str) -> None:
        """A step was "failed" or "skipped"."""
        self._steps.labels(*self._labels, status).inc()

    def row_failed(self, reason: str) -> None:
        """A row gave no token: "not_finite" or "failed"."""
        self._bad_rows.labels(*self._labels, reason).inc()

    def media(self, encoded: Iterable[str], missing: int) -> None:
        """A step encoded items of these modalities; of so many others the content was missing."""
        for modality in encoded:
            self._encoded.labels(*self._labels, modality).inc()
        self._missing.labels(*self._labels).inc(missing)

    def memory(self, weights: int, step: int, kv: int) -> None:
        """The memory plan in bytes."""
        for part, size in (("weights", weights), ("step", step), ("kv", kv)):
            self._memory.labels(*self._labels, part).set(size)
