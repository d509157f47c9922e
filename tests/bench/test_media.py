"""The bench of media runs and finds each figure."""

from __future__ import annotations

import asyncio

import pytest

from tests.bench import media


@pytest.mark.slow
def test_a_small_run() -> None:
    found = asyncio.run(media.measure(videos=3, processes=[1], seconds=0.5, rounds=2))
    assert found["decoded"] == 1 + 3 + 3, "each video once"
    assert found["text_alone"]["count"] >= 10
    assert found["text_beside"]["p50_ms"] > 0
    assert found["frames_per_s"][1] > 0
    assert 0 < found["loop_beside"]["block_ms"] < 1000
    media.show(found)
