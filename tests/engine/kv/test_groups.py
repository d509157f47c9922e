"""The KV cache with several groups: tables, what leaves a window, prefix hits, and the longest request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.kv.manager import KvCache
from services.engine.kv.windows import Groups, Windows
from services.engine.plan import StepPlan
from services.engine.report import Counters
from services.engine.request import BlockTable, Request
from tests.engine.fake_worker import undisturbed
from tests.engine.harness import Harness, make_config, make_spec
from tests.engine.kv.test_manager import compute, held, make_request, prefill

MIXED: Windows = (None, 6)
"""Full attention, and a window of 6 tokens over blocks of 4."""


def make_cache(windows: Windows = MIXED, num_blocks: int = 40, most: int = 8, **given: Any) -> KvCache:
    values: dict[str, Any] = {"reserve_blocks": 0, "prefix_caching": True, "counters": Counters(), **given}
    return KvCache(num_blocks, 4, windows=windows, max_num_batched_tokens=most, **values)


def decode(cache: KvCache, request: Request, count: int) -> None:
    for token in range(count):
        request.tokens.append(token)
        compute(cache, request, 1)


def leave(cache: KvCache, tokens: Sequence[int], chunk: int = 8) -> None:
    """Computes a prompt in chunks, and ends."""
    request = make_request(tokens)
    assert cache.admit(request)
    while request.num_computed < len(tokens):
        compute(cache, request, min(chunk, len(tokens) - request.num_computed))
    cache.release(request)


def test_a_window_gives_back_what_no_later_token_reads() -> None:
    cache, request = make_cache(), make_request(range(8))
    prefill(cache, request)
    full, sliding = request.tables
    for known, first in ((9, 0), (10, 0), (12, 0), (13, 1), (16, 1), (17, 2), (21, 3)):
        decode(cache, request, known - request.num_computed)
        assert (full.first, len(full.blocks)) == (0, -(-known // 4))
        assert (sliding.first, len(sliding.blocks)) == (first, -(-known // 4) - first)
    assert cache.pool.num_free == 40 - 6 - 3


def test_a_long_request_holds_no_more_of_a_window_than_it_claims() -> None:
    cache, request = make_cache((6,), num_blocks=5), make_request(range(3))
    assert cache.capacity > 10_000
    prefill(cache, request)
    decode(cache, request, 400)
    assert len(held(request)) <= 3
    assert request.blocks_covered == 101
    cache.release(request)
    assert cache.available == 5


def test_what_is_in_flight_stays_until_it_can_be_found() -> None:
    """Two steps are planned before the first is applied, and the second moves past the window of the first."""
    tokens = range(40)
    for num_blocks, kept in ((40, True), (16, False)):
        cache, request = make_cache((None, 4), num_blocks, most=16), make_request(tokens)
        assert cache.admit(request)
        for _ in range(2):
            assert cache.reserve(request, 16)
            request.num_computed += 16
        cache.applied(request, 16)
        assert cache.reserve(request, 8)
        names = request.block_hashes
        assert [cache.pool.find(name, 1) is not None for name in names[:4]] == [kept] * 3 + [True]
        assert all(cache.pool.find(name, 0) is not None for name in names[:4])


def test_a_new_row_is_told_of_zeros_for_what_left_the_window() -> None:
    cache = make_cache()
    leave(cache, range(24))
    request = make_request([*range(24), 7, 7])
    assert cache.admit(request)
    assert request.num_computed == 24
    assert cache.reserve(request, 2)
    plan = StepPlan(1, kv_groups=2)
    plan.block_counts.extend([0] * 4)
    plan.first_writable.extend([0] * 2)
    cache.describe(request, plan, 1)
    full, sliding = request.tables
    assert sliding.first == 4
    assert list(plan.block_counts) == [0, 0, 7, 7]
    assert list(plan.block_ids) == [*full.blocks, 0, 0, 0, 0, *sliding.blocks]
    assert list(plan.first_writable) == [0, 24]
    request.num_computed = 26
    request.tokens.extend([7] * 3)
    assert cache.reserve(request, 3)
    cache.describe(request, plan, 0)
    assert list(plan.block_counts) == [1, 1, 7, 7]
    assert list(plan.block_ids)[-2:] == [full.blocks[-1], sliding.blocks[-1]]


def test_groups_of_one_request_share_no_block() -> None:
    cache, request = make_cache((None, 6, None)), make_request(range(20))
    prefill(cache, request)
    assert len(set(held(request))) == len(held(request)) == 15


def evict(cache: KvCache, group: int, tokens: Sequence[int], at: int) -> None:
    """Makes one block of a chain unfindable in one group."""
    name = cache._naming.names(make_request(tokens), at + 1)[at]
    block = cache.pool.find(name, group)
    assert block is not None
    cache.pool._forget(block)


@pytest.mark.parametrize(
    ("windows", "gone", "length", "hits"),
    [
        ((None, 6), [], 24, 6),  # a full hit: position 23 reads 18 to 23
        ((None, 6), [(1, 0), (1, 1), (1, 2), (1, 3)], 24, 6),
        ((None, 6), [(1, 0), (1, 1), (1, 2), (1, 3)], 25, 6),
        ((None, 6), [(1, 5)], 25, 5),
        ((None, 6), [(1, 4)], 25, 4),  # 6 blocks need numbers 4 and 5, 5 blocks need 3 and 4
        ((None, 6), [(0, 3)], 25, 3),
        ((None, 6), [(0, 3), (1, 2)], 25, 2),
        ((None, 6), [(0, 3), (1, 2), (1, 0)], 25, 0),
        ((None, 6), [(0, 0)], 25, 0),
        ((None, 5), [(1, 4)], 25, 6),  # position 24 reads 20 to 24
        ((None, 5), [(1, 4)], 24, 4),  # recomputing position 23 reads 19
        ((None, 1), [(1, at) for at in range(5)], 25, 6),  # a window of the token itself
        ((1,), [(0, 5)], 25, 5),
        ((6,), [(0, 4)], 25, 4),
        ((6, 14), [(1, 1)], 25, 6),
        ((6, 14), [(1, 2)], 25, 2),
        ((None, 6, 14), [(1, 5), (2, 0)], 25, 5),
        ((None, 6, 14), [(1, 5), (2, 2)], 25, 2),
        ((None, 6, None), [(2, 4)], 25, 4),
    ],
)
def test_a_hit_ends_where_every_group_has_what_the_next_position_reads(
    windows: Windows, gone: list[tuple[int, int]], length: int, hits: int
) -> None:
    cache = make_cache(windows, num_blocks=60, most=24)
    leave(cache, range(24), chunk=24)
    for group, at in gone:
        evict(cache, group, range(24), at)
    request = make_request(range(length))
    assert cache.admit(request)
    assert request.blocks_covered == hits
    assert request.num_computed == min(4 * hits, length - 1)
    assert request.first_writable == 4 * hits


def fits(cache: KvCache, windows: Windows, request: Request, hits: int) -> bool:
    """Whether every group has what computing behind so many blocks reads, position by position."""
    names, start = request.block_hashes, min(hits * 4, len(request.tokens) - 1)
    for group, window in enumerate(windows):
        oldest = 0 if window is None else max(0, start - window + 1)
        needed = {position // 4 for position in range(oldest, hits * 4)} | ({hits - 1} if hits else set())
        if any(cache.pool.find(names[at], group) is None for at in needed):
            return False
    return True


@given(
    windows=st.lists(st.none() | st.integers(1, 14), min_size=1, max_size=3).map(tuple),
    gone=st.sets(st.tuples(st.integers(0, 2), st.integers(0, 6))),
    length=st.integers(1, 31),
)
def test_the_hit_is_the_longest_there_is(windows: Windows, gone: set[tuple[int, int]], length: int) -> None:
    cache = make_cache(windows, num_blocks=100, most=28)
    leave(cache, range(28), chunk=28)
    for group, at in gone:
        if group < len(windows):
            evict(cache, group, range(28), at)
    request = make_request([*range(28), 5, 5, 5][:length])
    cache._naming.names(request, length // 4)
    right = max(hits for hits in range(length // 4 + 1) if fits(cache, windows, request, hits))
    assert cache.admit(request)
    assert request.blocks_covered == right
    for group, window in enumerate(windows):
        table = request.tables[group]
        assert table.blocks == [cache.pool.find(name, group) for name in request.block_hashes[table.first : right]]
        assert table.first == (0 if window is None else max(0, request.num_computed - window + 1) // 4)


def test_short_prompts_hit_as_well_as_long_ones() -> None:
    """A hit may end behind any block, however far the windows reach."""
    cache = make_cache((None, 30), num_blocks=80, most=40)
    leave(cache, range(9), chunk=9)
    request = make_request([*range(8), 50])
    assert cache.admit(request)
    assert request.num_computed == 8


def test_tails_of_all_groups_are_given_out_before_their_heads() -> None:
    cache, request = make_cache((None, 100), num_blocks=6), make_request(range(12))
    prefill(cache, request)
    full, sliding = (table.blocks for table in request.tables)
    cache.release(request)
    assert cache.pool.free_blocks() == [full[2], sliding[2], full[1], sliding[1], full[0], sliding[0]]


def test_admission_adds_up_what_the_groups_need() -> None:
    cache = make_cache((None, 6), num_blocks=13)
    request = make_request(range(40))
    assert not cache.admit(request)
    assert "needs 14 KV blocks" in (cache.why(request) or "")  # 10 and span(5 + 8)
    cache = make_cache((None, 6), num_blocks=14)
    assert cache.admit(request)
    assert cache.available == 0
    while request.num_computed < 40:
        compute(cache, request, 8)
        assert cache.available >= 0
        assert cache.pool.num_free + len(held(request)) == 14
    assert cache.available == cache.pool.num_free == 14 - 10 - 4


def test_free_blocks_that_are_hit_count_as_taken_in_every_group() -> None:
    cache = make_cache((None, 6), num_blocks=10)
    leave(cache, range(16))
    filler = make_request(range(50, 58))
    assert cache.admit(filler)
    assert cache.available == 6
    again, shorter = make_request([*range(16), 9]), make_request(range(16))
    assert not cache.admit(again)  # 4 and 2 that are free, and one of each group for the last token
    assert cache.pool.num_free == 10
    assert cache.admit(shorter)
    assert (cache.available, cache.pool.num_free) == (0, 4)


def test_the_reserve_is_kept_in_every_group() -> None:
    cache, request = make_cache((None, 6), reserve_blocks=2), make_request(range(4))
    prefill(cache, request)
    assert cache.available == 40 - 2 - 4


def test_a_firm_promise_lets_a_request_reach_its_limit_whatever_others_do() -> None:
    cache = make_cache((None, 6), num_blocks=24)
    request, other = make_request(range(8), max_tokens=24), make_request(range(50, 58))
    request.protected = True
    assert cache.admit(request)
    assert cache.admit(other)
    compute(cache, other, 8)
    while cache.reserve(other, 1):
        other.tokens.append(0)
        other.num_computed += 1
    compute(cache, request, 8)
    decode(cache, request, 24)
    assert len(request.tokens) == request.limit


@pytest.mark.parametrize("newcomer", [False, True])
@pytest.mark.parametrize("windows", [(6,), (None, 6), (9, 6)])
def test_a_firm_promise_holds_beside_one_with_the_same_prompt(windows: Windows, newcomer: bool) -> None:
    """A shared block that leaves the window would not be free, and the promise counts on those that leave it."""
    cache = make_cache(windows, num_blocks=60)
    request, other = make_request(range(16), max_tokens=40), make_request(range(16))
    request.protected = True
    for each in (request, other) if newcomer else (other, request):
        assert cache.admit(each)
        while each.num_computed < 16:
            compute(cache, each, min(8, 16 - each.num_computed))
    cache.pool.take(cache.pool.num_free - request.blocks_promised)
    while len(request.tokens) < request.limit:
        decode(cache, request, 1)
        assert cache._firm <= cache.pool.num_free


def test_a_firm_promise_outlasts_drafts_that_were_wrong() -> None:
    cache, request = (
        KvCache(
            40,
            1,
            windows=(None, 1),
            max_num_batched_tokens=8,
            reserve_blocks=0,
            prefix_caching=True,
            counters=Counters(),
        ),
        make_request(range(13), max_tokens=8),
    )
    request.protected = True
    assert cache.admit(request)
    compute(cache, request, 8)
    compute(cache, request, 5)
    request.tokens.append(0)
    assert cache.reserve(request, 5)
    request.num_computed += 1  # of the token and four drafts
    cache.applied(request, 14)
    cache.pool.take(cache.pool.num_free - request.blocks_promised)
    request.tokens.append(0)
    assert cache.reserve(request, 6)


@given(
    windows=st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    steps=st.lists(st.tuples(st.sampled_from((16, 16, 5, 1)), st.integers(0, 2)), max_size=20),
    spare=st.integers(0, 12),
)
def test_a_firm_promise_is_always_what_may_still_be_needed(
    windows: Windows, steps: list[tuple[int, int]], spare: int
) -> None:
    """In steps of any size, of which some are in flight when the next is planned."""
    limit, prompt_len = 210, 200
    needed = Groups(windows, 4, 16).claim(0, limit)
    cache, request = make_cache(windows, needed + spare, most=16), make_request(range(prompt_len), limit - prompt_len)
    request.protected = True
    assert cache.admit(request)
    in_flight: list[int] = []
    for wanted, applied in steps:
        num_tokens = min(wanted, len(request.tokens) - request.num_computed)
        if num_tokens == 0:
            break
        assert cache.reserve(request, num_tokens)
        request.num_computed += num_tokens
        in_flight.append(request.num_computed)
        for _ in range(min(applied, len(in_flight))):
            cache.applied(request, in_flight.pop(0))
        if request.num_computed == len(request.tokens) < limit:
            request.tokens.append(0)
        rest = cache._groups.claim(request.num_computed, limit) if request.num_computed < limit else 0
        assert len(held(request)) + request.blocks_promised >= rest
        assert request.blocks_promised <= cache.pool.num_free


@settings(max_examples=25, deadline=None)
@given(
    windows=st.lists(st.none() | st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    num_blocks=st.integers(4, 20),
    budget=st.integers(1, 9),
    share=st.floats(0, 1),
    caching=st.booleans(),
)
def test_the_longest_request_there_can_be_runs_to_its_end_alone(
    windows: Windows, num_blocks: int, budget: int, share: float, caching: bool
) -> None:
    harness = Harness(
        make_config(
            kv_windows=windows,
            num_blocks=num_blocks,
            max_num_batched_tokens=budget,
            max_model_len=90,
            block_size=2,
            enable_prefix_caching=caching,
        )
    )
    length = harness.core.context_len
    if length < 2:
        return
    prompt_len = 1 + round(share * (length - 2))
    prompt = [at % 7 for at in range(prompt_len)]
    for handle in range(2):  # the second one finds what the first left
        harness.submit(make_spec(handle, prompt, length))
        harness.run()
        assert harness.tokens(handle) == undisturbed(prompt, 1, length - prompt_len)
    assert harness.core.counters.preemptions == 0


def test_tables_say_where_they_begin() -> None:
    cache = make_cache((None, 6))
    leave(cache, range(16))
    request = make_request(range(16))
    assert cache.admit(request)
    assert [table.first for table in request.tables] == [0, 2]
    assert all(isinstance(table, BlockTable) for table in request.tables)
    cache.release(request)
    assert request.tables == []
