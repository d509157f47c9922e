"""Requests: limits, ends and seeds."""

from __future__ import annotations

import hashlib
from array import array

import pytest

from services.engine.events import FINISH_EOS, FINISH_LENGTH, FINISH_NONE, FINISH_STOP_ID
from services.engine.request import Replay, choice_seed, make_family
from tests.engine.harness import make_spec


@pytest.mark.parametrize(
    ("asked", "context_len", "limit"), [(5, 100, 8), (97, 100, 100), (98, 100, 100), (2**31, 100, 100), (1, 4, 4)]
)
def test_max_tokens_is_cut_to_the_context(asked: int, context_len: int, limit: int) -> None:
    request = make_family(make_spec(1, [1, 2, 3], asked), context_len, 0.0, 0).choices[0]
    assert request.limit == limit


@pytest.mark.parametrize(
    ("outputs", "finish"),
    [
        ([7], FINISH_NONE),
        ([8], FINISH_NONE),
        ([7, 7], FINISH_NONE),
        ([1, 1, 7], FINISH_EOS),
        ([1, 1, 8], FINISH_STOP_ID),
        ([1, 1, 9], FINISH_EOS),
        ([1, 1, 1], FINISH_NONE),
        ([1, 1, 1, 1], FINISH_LENGTH),
        ([1, 1, 1, 7], FINISH_EOS),
    ],
)
def test_how_it_ends(outputs: list[int], finish: int) -> None:
    spec = make_spec(1, [7, 8], 4, min_tokens=2, eos_ids=frozenset({7, 9}), stop_ids=frozenset({8, 9}))
    request = make_family(spec, 100, 0.0, 0).choices[0]
    request.tokens.extend(outputs)
    assert request.finish_after_last() == finish


def test_min_tokens_beyond_the_limit_do_not_keep_it_from_ending() -> None:
    spec = make_spec(1, [1], 50, min_tokens=40, eos_ids=frozenset({7}))
    request = make_family(spec, 4, 0.0, 0).choices[0]
    for token, finish in ((7, FINISH_NONE), (7, FINISH_NONE), (7, FINISH_LENGTH)):
        request.tokens.append(token)
        assert request.finish_after_last() == finish


def test_the_gap_closes_when_what_is_in_flight_may_reach_the_limit() -> None:
    request = make_family(make_spec(1, [1, 2, 3], 2), 100, 0.0, 0).choices[0]
    assert request.gap == 3
    request.num_computed = 3
    request.known = 4
    assert request.gap == 1
    request.num_computed = 4
    request.known = 5
    assert request.gap == 0


def test_choices_have_tokens_and_seeds_of_their_own() -> None:
    replay = (Replay(array("i")), Replay(array("i", [5, 6])), Replay(array("i", [9]), FINISH_EOS))
    family = make_family(make_spec(1, [1], n=3, replay=replay), 100, 0.0, 10)
    assert [list(choice.tokens) for choice in family.choices] == [[1], [1, 5, 6], [1, 9]]
    assert [choice.arrival for choice in family.choices] == [10, 11, 12]
    assert [choice.known for choice in family.choices] == [1, 3, 2]
    assert [choice.choice for choice in family.live] == [0, 1]
    assert family.leader is family.choices[0]
    family.choices[0].tokens.append(2)
    assert list(family.spec.prompt) == [1]


def test_seeds_of_choices() -> None:
    assert choice_seed(2**64 - 1, 0) == 2**64 - 1
    digest = hashlib.sha256((5).to_bytes(8, "little") + (2).to_bytes(4, "little")).digest()
    assert choice_seed(5, 2) == int.from_bytes(digest[:8], "little")
    assert len({choice_seed(seed, choice) for seed in range(10) for choice in range(10)}) == 100


@pytest.mark.parametrize(
    ("asked", "replayed", "reads"), [(None, [], True), (0, [], False), (3, [5], True), (None, [5], True)]
)
def test_prompt_logprobs_are_told_before_the_prefix_cache_is_read(
    asked: int | None, replayed: list[int], reads: bool
) -> None:
    spec = make_spec(1, [1, 2], prompt_logprobs=asked, replay=(Replay(array("i", replayed)),))
    assert make_family(spec, 100, 0.0, 0).reads_prefix is reads
