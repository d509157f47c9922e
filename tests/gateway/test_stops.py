"""The oracle looks for the stop strings in the whole text after every token."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.stops import Span, StopMatch, StopMatcher, StopScanner


def scan(
    stops: list[str], tokens: list[str], *, min_tokens: int = 0, include_stop: bool = False
) -> tuple[list[str], list[str], StopMatch | None]:
    """Texts released while running, texts at the end, the match."""
    scanner = StopScanner(StopMatcher(stops), min_tokens=min_tokens, include_stop=include_stop)
    released: list[str] = []
    for i, text in enumerate(tokens):
        match = scanner.push(Span(i, text))
        if match is not None:
            return released, [span.text for span in scanner.cut(match)], match
        released += [span.text for span in scanner.released()]
    return released, [span.text for span in scanner.drain()], None


def oracle(stops: list[str], tokens: list[str], min_tokens: int, include_stop: bool) -> tuple[str, str | None, int]:
    """Text, stop and number of tokens."""
    text = ""
    for count, token in enumerate(tokens, 1):
        before, text = len(text), text + token
        found = [
            (at + len(stop), at, stop)
            for stop in stops
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > before and count >= min_tokens
        ]
        if found:
            end, at, stop = min(found)
            return text[: end if include_stop else at], stop, count
    return text, None, len(tokens)


texts = st.lists(st.text(alphabet="abX", max_size=4), max_size=12)
stop_strings = st.lists(st.text(alphabet="abX", min_size=1, max_size=4), min_size=1, max_size=4)


@settings(max_examples=600, deadline=None)
@given(stop_strings, texts, st.integers(0, 5), st.booleans())
def test_equals_the_oracle(stops: list[str], tokens: list[str], min_tokens: int, include_stop: bool) -> None:
    released, rest, match = scan(stops, tokens, min_tokens=min_tokens, include_stop=include_stop)
    text, stop, count = oracle(stops, tokens, min_tokens, include_stop)
    assert "".join(released + rest) == text
    assert (None if match is None else match.stop) == stop
    assert len(released + rest) == count


@settings(max_examples=300, deadline=None)
@given(stop_strings, st.text(alphabet="abX", max_size=16), st.lists(st.integers(0, 16), max_size=6), st.booleans())
def test_how_the_text_is_cut_into_tokens_does_not_matter(
    stops: list[str], text: str, cuts: list[int], include_stop: bool
) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    tokens = [text[start:end] for start, end in itertools.pairwise(bounds)]
    released, rest, match = scan(stops, tokens, include_stop=include_stop)
    whole_released, whole_rest, whole_match = scan(stops, [text], include_stop=include_stop)
    assert "".join(released + rest) == "".join(whole_released + whole_rest)
    assert match == whole_match


@settings(max_examples=300, deadline=None)
@given(stop_strings, texts)
def test_holds_back_what_may_become_a_match_and_nothing_else(stops: list[str], tokens: list[str]) -> None:
    scanner = StopScanner(StopMatcher(stops))
    text = ""
    shown = 0
    for i, token in enumerate(tokens):
        if scanner.push(Span(i, token)) is not None:
            return
        text += token
        before = shown
        shown += sum(len(span.text) for span in scanner.released())
        hold = max(
            (n for n in range(len(text) + 1) if any(stop[:n] == text[len(text) - n :] for stop in stops)), default=0
        )
        assert shown <= len(text) - hold
        ends = [sum(map(len, tokens[: j + 1])) for j in range(i + 1)]
        assert shown == max([before, *(end for end in ends if end <= len(text) - hold)])


@pytest.mark.parametrize(
    ("stops", "tokens", "text", "stop"),
    [
        (["own fox"], ["The quick br", "own", " fox", " jumps"], "The quick br", "own fox"),
        (["gamma"], ["gamma delta"], "", "gamma"),
        (["abc", "bX"], ["a", "b", "X"], "a", "bX"),
        (["Observation:"], ["Obs", "erv", "ation:"], "", "Observation:"),
        (["END."], ["th", "e E", "N"], "the EN", None),
        (["delta", "gamma"], ["x gamma delta"], "x ", "gamma"),
        (["abcd", "bc"], ["abcd"], "a", "bc"),
        (["abcd", "bc"], ["a", "b", "c", "d"], "a", "bc"),
        (["bc", "c", "abc"], ["xabc"], "x", "abc"),
        (["fox", "o"], ["the", " fox", " jumps"], "the f", "o"),
        (["fox", "o"], ["the f", "o", "x jumps"], "the f", "o"),
        (["aab"], ["a", "a", "a", "b"], "a", "aab"),
        (["日本"], ["今日", "本"], "今", "日本"),
    ],
)
def test_examples(stops: list[str], tokens: list[str], text: str, stop: str | None) -> None:
    released, rest, match = scan(stops, tokens)
    assert "".join(released + rest) == text
    assert (None if match is None else match.stop) == stop


def test_the_stop_may_be_kept() -> None:
    released, rest, _ = scan(["own fox"], ["br", "own", " fox jumps"], include_stop=True)
    assert (released, rest) == (["br"], ["own", " fox"])


def test_text_that_waits_for_min_tokens_is_still_held() -> None:
    """A match that is complete too early is passed over; one that ends later may begin before."""
    assert scan(["ab"], ["ab", "c"], min_tokens=2)[2] is None
    released, rest, match = scan(["ab"], ["x", "a", "b"], min_tokens=3)
    assert (released, rest) == (["x"], ["", ""])
    assert match == StopMatch("ab", 1, 3)


def test_many_stops_over_a_long_text_in_linear_time() -> None:
    stops = ["a" * n + "b" for n in range(1, 60)]
    released, rest, match = scan(stops, ["a" * 50] * 2000)
    assert match is None
    assert len("".join(released + rest)) == 100_000
