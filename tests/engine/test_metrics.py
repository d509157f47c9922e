"""Names, labels and sums of the engine's series."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.engine.events import FINISH_ABORT, FINISH_EOS, FINISH_ERROR, FINISH_LENGTH, FINISH_STOP_STRING
from services.engine.metrics import EngineMetrics, finished_reason
from services.engine.report import Counters, Load, Preemption
from services.engine.standing import ModelCard, Standing

LABELS = {"model_name": "m", "engine": "e"}
STANDING = Standing(
    model=ModelCard("m", "llama", 10, 100, "f", "float32", ("generate",), 1),
    device="cpu",
    kv_windows=(None,),
    num_blocks=20,
    block_size=16,
    bytes_per_block=1000,
    max_model_len=100,
    text_files=(),
)


def test_series() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, "m", "e")

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"vllm:{name}", LABELS | more)

    def finished(reason: str) -> float | None:
        return registry.get_sample_value("triptych:engine_finished_choices_total", LABELS | {"finished_reason": reason})

    metrics.cache_config(STANDING, True)
    assert (
        value(
            "cache_config_info",
            block_size="16",
            num_gpu_blocks="20",
            enable_prefix_caching="True",
            kv_cache_bytes="20000",
        )
        == 1
    )
    metrics.load(Load(3, 4, 5, 6, free_blocks=15, total_blocks=20))
    assert (value("num_requests_running"), value("num_requests_waiting")) == (3, 4)
    assert value("kv_cache_usage_perc") == 0.25

    totals = Counters(preemptions=1, prefix_queries=10, prefix_hits=4, prompt_tokens=9, generated_tokens=7)
    metrics.counters(totals)
    totals.generated_tokens = 8
    metrics.counters(totals)
    metrics.new_core()
    metrics.counters(Counters(generated_tokens=5))
    assert value("generation_tokens_total") == 13
    assert (value("prefix_cache_queries_total"), value("prefix_cache_hits_total")) == (10, 4)
    assert (value("num_preemptions_total"), value("prompt_tokens_total")) == (1, 9)

    metrics.step(33)
    assert value("iteration_tokens_total_sum") == 33
    for finish in (FINISH_EOS, FINISH_STOP_STRING, FINISH_LENGTH, FINISH_ERROR):
        metrics.finished(finish)
    assert finished("stop") == 2
    assert finished("length") == 1
    assert finished("abort") == 0
    assert finished("error") == 1

    metrics.times(0.5, 0.004, 2.0)
    metrics.times(None, None, None)
    assert value("request_queue_time_seconds_sum") == 0.5
    assert value("request_prefill_time_seconds_bucket", le="0.005") == 1
    assert value("request_decode_time_seconds_count") == 1
    assert value("request_inference_time_seconds_sum") == 2.004


def test_drafts_by_position() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, "m", "e")

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"vllm:spec_decode_{name}_total", LABELS | more)

    totals = Counters(drafts=2, draft_tokens=8, draft_tokens_accepted=3, drafts_accepted_at=[2, 1])
    metrics.counters(totals)
    totals.drafts, totals.draft_tokens, totals.draft_tokens_accepted = 3, 12, 7
    totals.drafts_accepted_at[0] += 1
    totals.drafts_accepted_at[1] += 1
    totals.drafts_accepted_at += [1, 1]
    metrics.counters(totals)
    metrics.new_core()
    metrics.counters(Counters(drafts=1, draft_tokens=4, draft_tokens_accepted=1, drafts_accepted_at=[1]))
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    assert [value(name) for name in names] == [4, 16, 8]
    positions = [value("num_accepted_tokens_per_pos", position=str(at)) for at in range(5)]
    assert positions == [4, 2, 1, 1, None]


def test_finished_reasons() -> None:
    assert (finished_reason(FINISH_ABORT), finished_reason(99)) == ("abort", "error")


def test_preemptions_by_reason_and_silence_when_asked() -> None:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, "m", "e")
    metrics.preempted([Preemption("a", 0, "b", 0, "kv_blocks"), Preemption("c", 0, "b", 0, "priority")])
    metrics.preempted([Preemption("a", 0, "c", 0, "kv_blocks")])
    silence = 1.5
    metrics.silence(lambda: silence)

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"triptych:{name}", LABELS | more)

    assert value("preemptions_total", reason="kv_blocks") == 2
    assert value("preemptions_total", reason="priority") == 1
    assert value("engine_silence_seconds") == 1.5
    silence = 0.0
    assert value("engine_silence_seconds") == 0
