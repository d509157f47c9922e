"""Every knob of the engine, each with its one definition."""

from __future__ import annotations

from typing import ClassVar, Literal, NamedTuple

from pydantic import ValidationInfo, field_validator

from services.common.settings import Settings, knob


class OnDevice(NamedTuple):
    """Knobs whose defaults depend on the worker's device."""

    block_size: int
    max_speculative_tokens: int
    speculative_batch: int
    ngram_min: int


ON_CPU = OnDevice(block_size=64, max_speculative_tokens=12, speculative_batch=4, ngram_min=1)
"""A step costs more with each token beyond a few, and attention reads longer pieces faster."""
ELSEWHERE = OnDevice(block_size=16, max_speculative_tokens=4, speculative_batch=16, ngram_min=2)
"""Graphs of a GPU hold rows of at most 4 drafts."""


def _by_device(cpu: int, elsewhere: int) -> str:
    return f"by default {cpu} on a CPU and {elsewhere} elsewhere"


class EngineSettings(Settings):
    """The engine: owns every request's state and the schedule, and drives one worker group."""

    section: ClassVar[str] = "engine"

    name: str = knob("engine", "stable name of this process in logs and metrics")
    listen: str = knob("127.0.0.1:50052", "address for gateways: host:port or unix:/path")
    worker: str = knob("127.0.0.1:50053", "address of the worker: host:port or unix:/path")
    served_model_name: str | None = knob(None, "name that clients ask for; by default the model file's own name")

    max_num_batched_tokens: int = knob(512, "tokens that one step computes at most", ge=1)
    max_num_seqs: int = knob(64, "requests that run at once", ge=1, le=4096)
    max_model_len: int | None = knob(None, "longest prompt plus output, in tokens; by default the model's own", ge=1)
    max_n: int = knob(16, "choices of one request at most", ge=1, le=1024)

    speculative: Literal["off", "ngram"] = knob(
        "ngram", "draft tokens for requests that do not say how many they want; no output changes through them"
    )
    max_speculative_tokens: int | None = knob(
        None,
        "draft tokens of one request in a step at most; "
        + _by_device(ON_CPU.max_speculative_tokens, ELSEWHERE.max_speculative_tokens),
        ge=0,
        le=128,
    )
    speculative_batch: int | None = knob(
        None,
        "tokens of a step up to which drafts are nearly free; "
        + _by_device(ON_CPU.speculative_batch, ELSEWHERE.speculative_batch),
        ge=0,
    )
    ngram_min: int | None = knob(
        None,
        "tokens that must have occurred before, to draft what followed them; "
        + _by_device(ON_CPU.ngram_min, ELSEWHERE.ngram_min),
        ge=1,
        le=16,
    )
    ngram_max: int = knob(24, "tokens that are compared to find the best such place", ge=1, le=64)
    grammar_threads: int = knob(2, "threads that compile grammars", ge=1, le=64)
    grammar_timeout_s: float = knob(10.0, "a grammar that takes longer to compile fails its request", gt=0)

    block_size: int | None = knob(
        None,
        "tokens in one KV block; " + _by_device(ON_CPU.block_size, ELSEWHERE.block_size),
        ge=1,
        le=1024,
    )
    kv_cache_bytes: int | None = knob(None, "memory for KV blocks; by default what the worker's settings leave", ge=1)
    num_blocks: int | None = knob(None, "KV blocks, where a smaller pool than fits is wanted", ge=1)
    enable_prefix_caching: bool = knob(True, "requests with equal beginnings share KV blocks")
    output_reserve_blocks: int = knob(1, "KV blocks kept free per running request when one is admitted", ge=0)

    policy: Literal["fcfs", "priority", "fair"] = knob(
        "priority", "who goes first: by arrival, by priority, or by priority and then each tenant its share"
    )
    ageing_s: float = knob(60.0, "seconds of waiting that make up for one level of priority", ge=0.001)
    max_prefill_tokens: int | None = knob(
        None, "tokens that one request computes in a step while others wait; by default no limit", ge=1
    )
    max_preemptions: int = knob(8, "how often one request may be preempted before it is given all it will need", ge=1)
    encoder_budget: int = knob(
        16_384, "media embeddings that one step encodes at most; an item that makes more is refused", ge=1
    )
    encoder_cache_size: int = knob(
        16_384, "media embeddings that the worker keeps; an item that makes more is refused", ge=1
    )

    max_waiting_requests: int = knob(1024, "requests that may wait; more are refused", ge=1)
    max_waiting_tokens: int = knob(1_000_000, "prompt tokens that may wait; more are refused", ge=1)

    steps_in_flight: int = knob(2, "steps sent to the worker before the first result is awaited", ge=1, le=2)
    step_timeout_s: float = knob(120.0, "a step without a result for this long means that the worker is lost", gt=0)
    ready_silence_s: float = knob(10.0, "not ready once work has made no progress for this long", gt=0)
    lease_s: float = knob(10.0, "a worker that hears nothing for this long frees its KV cache", ge=0.3)

    heartbeat_s: float = knob(3.0, "time between frames to a gateway when no step gives it any", gt=0)
    gateway_grace_s: float = knob(10.0, "requests of a gateway that is gone are ended after this time", ge=0)
    drain_s: float = knob(30.0, "time that live requests get to finish at the first SIGTERM", ge=0)

    metrics_host: str = knob("127.0.0.1", "address of the Prometheus endpoint")
    metrics_port: int = knob(9101, "port of the Prometheus endpoint; 0 takes any free one", ge=0, le=65535)
    log_level: Literal["debug", "info", "warning", "error"] = knob("info", "least urgent events that are logged")
    log_style: Literal["json", "text"] = knob("json", "one JSON object per line, or short lines for a terminal")

    def on(self, device: str) -> OnDevice:
        """What depends on the worker's device: as given, or its defaults."""
        usual = ON_CPU if device == "cpu" else ELSEWHERE
        return OnDevice(
            _first(self.block_size, usual.block_size),
            _first(self.max_speculative_tokens, usual.max_speculative_tokens),
            _first(self.speculative_batch, usual.speculative_batch),
            _first(self.ngram_min, usual.ngram_min),
        )

    @field_validator("ngram_max")
    @classmethod
    def _no_less_than_ngram_min(cls, value: int, others: ValidationInfo) -> int:
        if value < (others.data.get("ngram_min") or 0):
            raise ValueError(f"less than --ngram-min, {others.data['ngram_min']}")
        return value


def _first(given: int | None, otherwise: int) -> int:
    return otherwise if given is None else given
