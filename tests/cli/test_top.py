"""What `triptych top` makes of two scrapes, and what it says where nobody answers."""

from __future__ import annotations

import io
import json
from bisect import bisect_left
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from rich.console import Console

from services.cli import __main__
from services.cli.top.overview import Addresses, EngineRow, GatewayRow, WorkerRow, median, overview
from services.cli.top.scrape import Scrape
from services.cli.top.tables import tables
from services.engine.metrics import EngineMetrics
from services.engine.report import Counters, Load
from services.gateway.metrics import GatewayMetrics
from services.local.cluster import free_port
from services.worker.metrics import WorkerMetrics

ADDRESSES = Addresses(["e:1"], ["g:1"], ["w:1"])


def engine_scrape(seconds: float, **counters: int) -> Scrape:
    """What an engine with those totals shows."""
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, "model", "engine-a")
    metrics.load(Load(running=3, waiting=2, waiting_tokens=0, running_tokens=0, free_blocks=25, total_blocks=100))
    metrics.counters(Counters(**counters))
    metrics.silence(lambda: 2.5)
    metrics.times(0.004, None, None)
    return Scrape.parse(generate_latest(registry).decode(), seconds)


def gateway_scrape(seconds: float, ttft: list[float]) -> Scrape:
    """What a gateway shows whose requests were answered at once after those times."""
    metrics = GatewayMetrics()
    metrics.introduce("gateway-7", "1.0")
    metrics.ready.set(1)
    metrics.live.set(4)
    for each in ttft:
        metrics.ttft.labels("model", "engine").observe(each)
        metrics.e2e.labels("model", "engine").observe(each)
    return Scrape.parse(metrics.render().decode(), seconds)


def engine_row(before: Scrape | None, after: Scrape | None) -> EngineRow:
    return overview(ADDRESSES, {"e:1": before}, {"e:1": after}).engines[0]


def gateway_row(before: Scrape | None, after: Scrape | None) -> GatewayRow:
    return overview(ADDRESSES, {"g:1": before}, {"g:1": after}).gateways[0]


def test_levels_rates_and_shares_of_an_engine() -> None:
    before = engine_scrape(10.0, prompt_tokens=100, generated_tokens=1000, prefix_queries=100, prefix_hits=50)
    after = engine_scrape(
        14.0, prompt_tokens=500, generated_tokens=1100, prefix_queries=300, prefix_hits=100, preemptions=2
    )
    assert engine_row(before, after) == EngineRow(
        address="e:1",
        up=True,
        name="engine-a",
        model="model",
        running=3,
        waiting=2,
        prompt_tokens_per_s=100,
        output_tokens_per_s=25,
        kv_use=0.75,
        prefix_hit_rate=0.25,
        preemptions_per_s=0.5,
        preemptions=2,
        queue_p50_ms=None,  # the histogram has not changed
        silence_s=2.5,
    )


def test_a_process_that_began_anew_is_counted_from_nothing() -> None:
    before = engine_scrape(10.0, generated_tokens=1000, prefix_queries=10, prefix_hits=10)
    after = engine_row(before, engine_scrape(12.0, generated_tokens=60, prefix_queries=20, prefix_hits=5))
    assert after.output_tokens_per_s == 30
    assert after.prefix_hit_rate == 0.5


def test_what_was_not_there_before_has_levels_and_no_rates() -> None:
    seen = engine_row(None, engine_scrape(1.0, generated_tokens=7))
    assert (seen.running, seen.output_tokens_per_s, seen.queue_p50_ms) == (3, None, None)
    assert engine_row(Scrape(0.0), Scrape(1.0)) == EngineRow("e:1", True)  # its worker has not come yet


def test_who_does_not_answer_has_a_row_without_figures() -> None:
    seen = overview(ADDRESSES, {"e:1": Scrape(0.0)}, {})
    for row in (*seen.engines, *seen.gateways, *seen.workers):
        assert not row.up
        assert {getattr(row, field.name) for field in fields(row)[2:]} == {None}
    assert seen.nobody
    assert not overview(ADDRESSES, {}, {"w:1": Scrape(0.0)}).nobody


def test_medians_are_of_what_came_in_between() -> None:
    before, after = gateway_scrape(0.0, [9.0] * 100), gateway_scrape(2.0, [9.0] * 100 + [0.03, 0.03, 0.03, 0.6])
    seen = gateway_row(before, after)
    assert (seen.name, seen.ready, seen.live, seen.finished_per_s) == ("gateway-7", True, 4, 2.0)
    assert seen.ttft_p50_ms == pytest.approx(1000 * (0.025 + 0.015 * 2 / 3))  # two of the three within 25 and 40 ms
    assert seen.itl_p50_ms is None
    assert gateway_row(after, before).ttft_p50_ms == pytest.approx(8750)  # began anew: all of its own


def test_a_worker() -> None:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry, "worker-a")
    metrics.serve("model")
    metrics.memory(1, 2, 3)
    metrics.step_done(10, 0.004, 1, 5)
    before = Scrape.parse(generate_latest(registry).decode(), 0.0)
    for tokens in (20, 30, 40, 50):
        metrics.step_done(tokens, 0.004, 1, 6)
    after = Scrape.parse(generate_latest(registry).decode(), 2.0)
    seen = overview(ADDRESSES, {"w:1": before}, {"w:1": after}).workers[0]
    assert seen == WorkerRow("w:1", True, "worker-a", 6, 2.0, 35.0, pytest.approx(4.0), 6)


BOUNDS = (0.1, 0.5, 2.0, 8.0)


@given(st.lists(st.floats(0.0, 20.0), max_size=40))
def test_the_median_lies_in_the_bucket_of_the_true_one(values: list[float]) -> None:
    registry = CollectorRegistry()
    histogram = Histogram("times", "x", buckets=BOUNDS, registry=registry)
    for value in values:
        histogram.observe(value)
    found = median(Scrape.parse(generate_latest(registry).decode(), 0.0).buckets("times"))
    if not values:
        assert found is None
        return
    true = sorted(values)[(len(values) - 1) // 2]  # the lower of the two in the middle
    place = bisect_left(BOUNDS, true)
    edges = (0.0, *BOUNDS, BOUNDS[-1])
    assert found is not None
    assert edges[place] <= found <= edges[place + 1]


def drawn(before: Scrape | None, after: Scrape | None, width: int = 140) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(tables(overview(ADDRESSES, {"e:1": before}, {"e:1": after, "g:1": gateway_scrape(0.0, [])})))
    return console.export_text()


def test_the_tables() -> None:
    text = drawn(engine_scrape(0.0, generated_tokens=1), engine_scrape(1.0, generated_tokens=2001))
    engine = next(line for line in text.splitlines() if line.startswith("engine-a"))
    assert all(word in engine for word in ("e:1", "model", "2,000", "75%", "stuck for 2 s"))
    assert "gateway-7" in text
    assert "w:1" in next(line for line in text.splitlines() if line.startswith("no answer"))
    assert "no worker yet" in drawn(Scrape(0.0), Scrape(1.0))
    narrow = drawn(None, engine_scrape(1.0), width=80).splitlines()
    assert narrow[0].startswith("engine   address run wait in tok/s out tok/s  KV hits preempt queue model")


def test_nobody_there_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    options = [f"--{role}=127.0.0.1:{port}" for role in ("engines", "gateways", "workers")]
    assert __main__.main(["top", "--once", *options]) == 1
    error = capsys.readouterr().err
    assert f"nothing answers at 127.0.0.1:{port}" in error
    assert "`triptych serve` starts a cluster" in error


def test_rows_are_json() -> None:
    document = json.loads(json.dumps(overview(ADDRESSES, {}, {"e:1": engine_scrape(0.0)}).as_dict()))
    assert document["engines"][0]["model"] == "model"
    assert document["workers"] == [{**dict.fromkeys(document["workers"][0]), "address": "w:1", "up": False}]
