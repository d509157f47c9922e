"""What is refused, and what it is told."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from services.common.errors import InvalidArgument, ResourceExhausted
from services.engine.intake import check, check_limit
from services.engine.request import Replay
from tests.engine.harness import make_spec


@pytest.mark.parametrize(
    ("prompt", "given", "field", "words"),
    [
        ([], {}, "prompt", "no tokens"),
        ([1] * 20, {}, "prompt", "20 tokens; the context holds 20"),
        ([1, 50], {}, "prompt", "50 is not in the vocabulary of 50"),
        ([1, -1], {}, "prompt", "-1 is not in the vocabulary"),
        ([1], {"n": 0}, "n", "n is 0"),
        ([1], {"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ([1], {"min_tokens": -1}, "min_tokens", "min_tokens is -1"),
        ([1], {"replay": (Replay(array("i")),), "n": 2}, "replay", "1 choices are replayed, but n is 2"),
        ([1], {"replay": (Replay(array("i", [99])),)}, "replay", "99 is not in the vocabulary"),
    ],
)
def test_a_request_that_cannot_run_is_refused(prompt: list[int], given: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words) as refused:
        check(make_spec(1, prompt, **given), 20, 50)
    assert refused.value.field == field


def test_the_longest_prompt_is_taken() -> None:
    check(make_spec(1, [49] * 19, 1000, min_tokens=1000), 20, 50)


def test_a_limit_is_exact() -> None:
    check_limit("choices", 3, 7, 10)
    check_limit("choices", 3, 1000, None)
    with pytest.raises(
        ResourceExhausted, match="8 choices wait already; 3 more would exceed the limit of 10"
    ) as refused:
        check_limit("choices", 3, 8, 10)
    assert refused.value.retry_after_ms is not None
    assert refused.value.reason == "QUEUE_FULL"


def test_what_exceeds_a_limit_alone_is_refused_for_good() -> None:
    with pytest.raises(InvalidArgument, match="11 choices are more than the 10"):
        check_limit("choices", 11, 0, 10)
