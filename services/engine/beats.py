"""When heartbeats come: at whole multiples of their pause by the clock, so that all that are due cost one wake-up."""

from __future__ import annotations


def until_next(pause_s: float, now: float) -> float:
    """Time to the next beat; one that is almost there is passed over, since a timer may be early by a little."""
    left = pause_s - now % pause_s
    return left if left > pause_s / 10 else left + pause_s
