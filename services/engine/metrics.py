"""The engine's Prometheus series, under the names and labels that dashboards for vLLM know."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import chain, repeat

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.common.metrics import LATENCY_BUCKETS, STEP_TOKENS_BUCKETS
from services.engine import events
from services.engine.report import Counters, Load, Preemption
from services.engine.standing import Standing

_LABELS = ("model_name", "engine")
_FINISHED_REASONS = {
    events.FINISH_EOS: "stop",
    events.FINISH_STOP_ID: "stop",
    events.FINISH_STOP_STRING: "stop",
    events.FINISH_LENGTH: "length",
    events.FINISH_ABORT: "abort",
    events.FINISH_ERROR: "error",
}


def finished_reason(finish: int) -> str:
    """A FinishReason of the contract as the metrics and the log call it."""
    return _FINISHED_REASONS.get(finish, "error")


class EngineMetrics:
    """What one engine has done. Made once its model is known, because every series carries its name."""

    def __init__(self, registry: CollectorRegistry, model_name: str, engine: str) -> None:
        self._registry = registry
        self._labels = (model_name, engine)
        self._seen = Counters()
        self._told: Load | None = None

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"vllm:{name}", text, _LABELS, registry=registry).labels(*self._labels)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, _LABELS, registry=registry).labels(*self._labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = LATENCY_BUCKETS) -> Histogram:
            return Histogram(f"vllm:{name}", text, _LABELS, buckets=buckets, registry=registry).labels(*self._labels)

        self._running = gauge("num_requests_running", "Requests in the running set, each choice counted.")
        self._waiting = gauge("num_requests_waiting", "Requests that wait, each choice counted.")
        self._kv_usage = gauge("kv_cache_usage_perc", "KV blocks held by requests, from 0 to 1.")
        self._prefix_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._preemptions = counter("num_preemptions", "Requests put back from running to waiting.")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that ran.")
        self._generation_tokens = counter("generation_tokens", "Tokens sampled.")
        self._drafts = counter("spec_decode_num_drafts", "Drafts that were verified.")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Tokens of those drafts.")
        self._accepted = counter("spec_decode_num_accepted_tokens", "Tokens of those drafts that were accepted.")
        self._accepted_at = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Tokens of drafts that were accepted, by their place in the draft.",
            (*_LABELS, "position"),
            registry=registry,
        )
        self._step_tokens = histogram("iteration_tokens_total", "Tokens computed by a step.", STEP_TOKENS_BUCKETS)
        self._queue = histogram("request_queue_time_seconds", "From acceptance to the first step.")
        self._prefill = histogram("request_prefill_time_seconds", "From the first step to the first token.")
        self._decode = histogram("request_decode_time_seconds", "From the first token to the last.")
        self._inference = histogram("request_inference_time_seconds", "From the first step to the last token.")
        self._success = Counter(  # vllm:request_success is the gateway's, which knows of stop strings
            "triptych:engine_finished_choices", "Finished choices.", (*_LABELS, "finished_reason"), registry=registry
        )
        for reason in sorted(set(_FINISHED_REASONS.values())):
            self._success.labels(*self._labels, reason)
        self._preempted = Counter(
            "triptych:preemptions",
            "Requests put back from running to waiting, by what they had to make room for.",
            (*_LABELS, "reason"),
            registry=registry,
        )
        self._silence = Gauge(
            "triptych:engine_silence_seconds",
            "Time since the last completed step while work is pending; 0 when idle.",
            _LABELS,
            registry=registry,
        ).labels(*self._labels)

    def silence(self, read: Callable[[], float]) -> None:
        """Asks for the silence whenever somebody scrapes; a stuck engine still answers."""
        self._silence.set_function(read)

    def cache_config(self, standing: Standing, enable_prefix_caching: bool) -> None:
        """The cache's settings, as labels of a gauge that is always 1."""
        config = {
            "block_size": standing.block_size,
            "num_gpu_blocks": standing.num_blocks,
            "enable_prefix_caching": enable_prefix_caching,
            "kv_cache_bytes": standing.num_blocks * standing.bytes_per_block,
        }
        info = Gauge(
            "vllm:cache_config_info", "Settings of the KV cache.", (*_LABELS, *config), registry=self._registry
        )
        info.labels(*self._labels, *(str(value) for value in config.values())).set(1)

    def load(self, load: Load) -> None:
        """How busy the core is now. Told at every step, in most of which little changes."""
        told, self._told = self._told, load
        if told is None or load.running != told.running:
            self._running.set(load.running)
        if told is None or load.waiting != told.waiting:
            self._waiting.set(load.waiting)
        if told is None or load.free_blocks != told.free_blocks:
            self._kv_usage.set(1 - load.free_blocks / load.total_blocks if load.total_blocks else 0)

    def counters(self, now: Counters) -> None:
        """The core's totals; what they grew by is added."""
        seen = self._seen
        if now.generated_tokens != seen.generated_tokens:
            self._generation_tokens.inc(now.generated_tokens - seen.generated_tokens)
            seen.generated_tokens = now.generated_tokens
        if now != seen:  # not so in most steps
            self._preemptions.inc(now.preemptions - seen.preemptions)
            self._prefix_queries.inc(now.prefix_queries - seen.prefix_queries)
            self._prefix_hits.inc(now.prefix_hits - seen.prefix_hits)
            self._prompt_tokens.inc(now.prompt_tokens - seen.prompt_tokens)
            if now.drafts != seen.drafts:
                self._count_drafts(now, seen)
            self._seen = replace(now, drafts_accepted_at=now.drafts_accepted_at.copy())

    def _count_drafts(self, now: Counters, seen: Counters) -> None:
        self._drafts.inc(now.drafts - seen.drafts)
        self._draft_tokens.inc(now.draft_tokens - seen.draft_tokens)
        self._accepted.inc(now.draft_tokens_accepted - seen.draft_tokens_accepted)
        before = chain(seen.drafts_accepted_at, repeat(0))
        for position, (accepted, known) in enumerate(zip(now.drafts_accepted_at, before, strict=False)):
            self._accepted_at.labels(*self._labels, str(position)).inc(accepted - known)

    def preempted(self, preemptions: Iterable[Preemption]) -> None:
        """Who was preempted, by why."""
        for each in preemptions:
            self._preempted.labels(*self._labels, each.reason).inc()

    def new_core(self) -> None:
        """The core was made anew: its totals begin at 0 again."""
        self._seen = Counters()

    def step(self, tokens: int) -> None:
        """A step was sent."""
        self._step_tokens.observe(tokens)

    def finished(self, finish: int) -> None:
        """A choice has its terminal event."""
        self._success.labels(*self._labels, finished_reason(finish)).inc()

    def times(self, queue_s: float | None, prefill_s: float | None, decode_s: float | None) -> None:
        """The spans of a finished request, as far as it came."""
        if queue_s is not None:
            self._queue.observe(queue_s)
        if prefill_s is not None:
            self._prefill.observe(prefill_s)
        if decode_s is not None:
            self._decode.observe(decode_s)
            self._inference.observe((prefill_s or 0) + decode_s)
