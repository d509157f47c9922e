"""What a run of the load generator came to: times of each request, and the figures of all of them.

    sent            first text       second text            last text     end
     │──── TTFT ────│───── ITL ─────│───── ITL ─────│ … ──────│
                    │────────────── TPOT × (tokens - 1) ──────│

Text chunks carry the times; the number of tokens is what the server counts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field


@dataclass(slots=True)
class Timing:
    """One request. Times are seconds of one monotonic clock."""

    sent: float
    ended: float = 0.0
    texts: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Time to the first text."""
        return self.texts[0] - self.sent

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first."""
        return (self.texts[-1] - self.texts[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Times between texts."""
        return [later - earlier for earlier, later in zip(self.texts, self.texts[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Figures:
    """A run. Times are milliseconds, rates are tokens per second over the whole run."""

    requests: int
    failed: int
    first_error: str
    duration_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    tpot_p50_ms: float
    tpot_p99_ms: float

    def as_dict(self) -> dict[str, object]:
        """For JSON; a figure that nothing was measured for is null."""
        return {
            key: None if isinstance(value, float) and math.isnan(value) else value
            for key, value in asdict(self).items()
        }


def summarize(timings: Sequence[Timing], duration_s: float) -> Figures:
    """The figures of a run that took `duration_s`."""
    good = [timing for timing in timings if not timing.error]
    bad = [timing for timing in timings if timing.error]
    prompt = sum(timing.prompt_tokens for timing in good)
    output = sum(timing.output_tokens for timing in good)
    first = [timing.ttft for timing in good]
    gaps = [gap for timing in good for gap in timing.gaps]
    per_token = [timing.tpot for timing in good if timing.output_tokens > 1]
    return Figures(
        requests=len(timings),
        failed=len(bad),
        first_error=bad[0].error if bad else "",
        duration_s=round(duration_s, 3),
        prompt_tokens=prompt,
        output_tokens=output,
        cached_tokens=sum(timing.cached_tokens for timing in good),
        output_tokens_per_s=round(output / duration_s, 1),
        total_tokens_per_s=round((prompt + output) / duration_s, 1),
        ttft_p50_ms=_milliseconds(first, 50),
        ttft_p99_ms=_milliseconds(first, 99),
        itl_p50_ms=_milliseconds(gaps, 50),
        itl_p99_ms=_milliseconds(gaps, 99),
        tpot_p50_ms=_milliseconds(per_token, 50),
        tpot_p99_ms=_milliseconds(per_token, 99),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the two nearest; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _milliseconds(values: Sequence[float], percent: float) -> float:
    return round(percentile(values, percent) * 1000, 2)
