"""Heartbeats come on one beat, whenever somebody begins to wait."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.beats import until_next


@given(st.floats(0.05, 30), st.floats(0, 1e6))
def test_a_beat_is_a_multiple_of_the_pause_and_never_further_than_a_tenth_more(pause_s: float, now: float) -> None:
    left = until_next(pause_s, now)
    assert pause_s / 10 < left <= 1.1 * pause_s
    beats = (now + left) / pause_s
    assert beats == pytest.approx(round(beats), abs=1e-3)


def test_a_timer_that_is_early_waits_for_the_beat_after_next() -> None:
    assert until_next(3.0, 8.999) == pytest.approx(3.001)
