"""The series of a request: names that dashboards know, and right counts for every way to end."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from services.gateway.metrics import GatewayMetrics
from services.gateway.request import FinishReason, GenerateSpec, SamplingParams


def series(metrics: GatewayMetrics) -> dict[tuple[str, str], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (sample.name, sample.labels.get("finished_reason", "")): sample.value
        for family in families
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_a_request_that_ends_counts_once_per_choice() -> None:
    metrics = GatewayMetrics()
    spec = GenerateSpec("r", "m", (1, 2, 3), SamplingParams(max_tokens=5, seed=0, n=2))
    timer = metrics.watch(spec, "e", 0.0)
    for count in (1, 2, 1):
        timer.tokens(count)
    timer.finish(FinishReason.EOS)
    timer.finish(FinishReason.LENGTH)
    fields = timer.end()
    got = series(metrics)
    assert got["vllm:time_to_first_token_seconds_count", ""] == 1
    assert got["vllm:inter_token_latency_seconds_count", ""] == 2
    assert got["vllm:request_prompt_tokens_sum", ""] == 3
    assert got["vllm:request_generation_tokens_sum", ""] == 4
    assert got["vllm:request_params_n_sum", ""] == 2
    assert got["vllm:request_params_max_tokens_sum", ""] == 5
    assert got["vllm:request_time_per_output_token_seconds_count", ""] == 1
    assert got["vllm:e2e_request_latency_seconds_count", ""] == 1
    assert got["vllm:request_success_total", "stop"] == 1
    assert got["vllm:request_success_total", "length"] == 1
    assert fields["finish"] == "eos,length"


def test_a_request_that_is_given_up_counts_its_unfinished_choices() -> None:
    metrics = GatewayMetrics()
    timer = metrics.watch(GenerateSpec("r", "m", (1,), SamplingParams(max_tokens=5, seed=0, n=3)), "e", 0.0)
    timer.tokens(1)
    timer.finish(FinishReason.EOS)
    timer.end(FinishReason.ABORT)
    got = series(metrics)
    assert got["vllm:request_success_total", "abort"] == 2
    assert got["vllm:request_success_total", "stop"] == 1
    assert ("vllm:request_time_per_output_token_seconds_count", "") not in got


def test_times_between_tokens_are_cumulative_and_end_at_their_count() -> None:
    metrics = GatewayMetrics()
    for seconds in (0.0001, 0.0005, 0.0006, 1000.0):
        metrics.itl.add(metrics.itl.series(("m", "e")), seconds)
    families = text_string_to_metric_families(metrics.render().decode())
    (family,) = [family for family in families if family.name == "vllm:inter_token_latency_seconds"]
    got = {sample.labels.get("le", sample.name): sample.value for sample in family.samples}
    assert (got["0.0005"], got["0.001"], got["80.0"], got["+Inf"]) == (2, 3, 3, 4)
    assert got["vllm:inter_token_latency_seconds_count"] == 4
    assert got["vllm:inter_token_latency_seconds_sum"] == pytest.approx(1000.0012)


def test_the_lowest_buckets_resolve_a_fast_step() -> None:
    metrics = GatewayMetrics()
    metrics.watch(GenerateSpec("r", "m", (1,), SamplingParams(max_tokens=5, seed=0)), "e", 0.0).end()
    assert 'le="0.0005"' in metrics.render().decode()
