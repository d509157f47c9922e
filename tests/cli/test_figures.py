"""Figures of a run, worked out by hand."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.figures import Timing, percentile, summarize


def timing(sent: float, texts: list[float], output: int, **other) -> Timing:
    return Timing(sent=sent, ended=texts[-1], texts=texts, prompt_tokens=10, output_tokens=output, **other)


def test_figures_of_two_requests() -> None:
    runs = [timing(0.0, [0.1, 0.2, 0.4], 3), timing(1.0, [1.3, 1.5], 5, cached_tokens=4)]
    figures = summarize(runs, 2.0)
    assert (figures.requests, figures.failed) == (2, 0)
    assert (figures.prompt_tokens, figures.output_tokens, figures.cached_tokens) == (20, 8, 4)
    assert figures.output_tokens_per_s == 4.0
    assert figures.total_tokens_per_s == 14.0
    assert figures.ttft_p50_ms == pytest.approx(200.0)
    assert figures.itl_p50_ms == pytest.approx(200.0)
    # Time per token counts tokens, not texts: 0.3 s over 2 and 0.2 s over 4.
    assert figures.tpot_p50_ms == pytest.approx((150 + 50) / 2)


def test_a_failed_request_counts_for_nothing_but_is_named() -> None:
    bad = Timing(sent=0.0, error="HTTP 500: no")
    figures = summarize([timing(0.0, [0.1, 0.2], 2), bad], 1.0)
    assert (figures.requests, figures.failed, figures.first_error) == (2, 1, "HTTP 500: no")
    assert figures.output_tokens == 2


def test_nothing_measured_is_null_in_json() -> None:
    figures = summarize([Timing(sent=0.0, error="refused")], 1.0)
    assert math.isnan(figures.ttft_p50_ms)
    assert json.loads(json.dumps(figures.as_dict(), allow_nan=False))["ttft_p50_ms"] is None


def test_percentiles_interpolate() -> None:
    assert percentile([4, 1, 3, 2], 50) == 2.5
    assert percentile([1, 2], 99) == pytest.approx(1.99)
    assert percentile([7], 99) == 7


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 100))
def test_a_percentile_lies_among_the_values(values: list[float], percent: float) -> None:
    assert min(values) <= percentile(values, percent) <= max(values)
