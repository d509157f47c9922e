"""The worker's metrics: one series per model, and no name that another role exports too."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.worker.metrics import WorkerMetrics


def series(registry: CollectorRegistry) -> dict[str, set[str]]:
    """Model names by metric."""
    found: dict[str, set[str]] = {}
    for metric in registry.collect():
        for sample in metric.samples:
            found.setdefault(metric.name, set()).add(sample.labels["model_name"])
    return found


def test_nothing_is_exported_of_a_model_that_is_not_there() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "w")
    assert series(registry) == {}
    metrics.serve("llama")
    metrics.step_done(5, 0.1, 2, 1, kernel_s=0.075)
    metrics.memory(1, 2, 3)
    metrics.row_failed("failed")
    assert {names for found in series(registry).values() for names in found} == {"llama"}
    metrics.serve("llama")
    labels = {"model_name": "llama", "worker": "w"}
    assert registry.get_sample_value("triptych:worker_sampled_tokens_total", labels) == 2
    assert registry.get_sample_value("triptych:worker_kernel_seconds_total", labels) == 0.075
    metrics.serve("qwen3")
    metrics.step_lost("failed")
    assert {names for found in series(registry).values() for names in found} == {"qwen3"}


def test_the_names_are_the_workers_own() -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry, "w").serve("llama")
    assert all(metric.name.startswith("triptych:worker_") for metric in registry.collect())
