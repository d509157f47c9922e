"""The KV cache as a resource: admission, hits, block tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from services.engine.kv.blocks import BlockPool
from services.engine.kv.manager import KvCache
from services.engine.kv.naming import Naming
from services.engine.plan import StepPlan
from services.engine.report import Counters
from services.engine.request import Request, make_family
from tests.engine.harness import make_spec


def make_cache(num_blocks: int = 8, **given: Any) -> KvCache:
    values: dict[str, Any] = {
        "max_num_batched_tokens": 64,
        "reserve_blocks": 0,
        "prefix_caching": True,
        "counters": Counters(),
    }
    return KvCache(num_blocks, 4, **(values | given))


def make_request(prompt: Sequence[int], max_tokens: int = 100, **given: Any) -> Request:
    return make_family(make_spec(1, prompt, max_tokens, **given), 1000, 0.0, 0).choices[0]


def held(request: Request) -> list[int]:
    return [block for table in request.tables for block in table.blocks]


def compute(cache: KvCache, request: Request, num_tokens: int) -> None:
    """What a step does to a request."""
    assert cache.reserve(request, num_tokens)
    request.num_computed += num_tokens
    cache.applied(request, request.num_computed)


def prefill(cache: KvCache, request: Request) -> None:
    assert cache.admit(request)
    compute(cache, request, len(request.tokens) - request.num_computed)


def test_blocks_are_taken_as_the_tokens_reach_into_them() -> None:
    cache, request = make_cache(), make_request(range(10))
    assert cache.admit(request)
    for num_tokens, blocks in ((1, 1), (3, 1), (1, 2), (5, 3)):
        compute(cache, request, num_tokens)
        assert len(held(request)) == blocks
        assert cache.reserve(request, 0)
    cache.release(request)
    assert cache.pool.num_free == 8


def test_reserving_again_takes_nothing_again() -> None:
    cache, request = make_cache(), make_request(range(6))
    assert cache.admit(request)
    assert cache.reserve(request, 6)
    assert cache.reserve(request, 6)
    assert cache.pool.num_free == 6


def test_the_whole_prompt_must_fit_beside_what_was_promised() -> None:
    cache, first, second = make_cache(), make_request(range(20)), make_request(range(50, 66))
    assert cache.admit(first)
    compute(cache, first, 1)
    assert cache.pool.num_free == 7
    assert cache.available == 3
    assert not cache.admit(second)
    assert held(second) == []
    assert cache.available == 3
    cache.release(first)
    assert cache.admit(second)
    cache.release(second)
    assert cache.available == 8


def test_the_reserve_counts_per_running_request_and_not_for_the_first() -> None:
    cache = make_cache(reserve_blocks=2)
    whole, small = make_request(range(32)), make_request(range(50, 54))
    assert cache.admit(whole)
    cache.release(whole)
    prefill(cache, small)
    assert cache.available == 5
    assert not cache.admit(make_request(range(60, 84)))
    assert cache.admit(make_request(range(60, 80)))
    assert cache.available == 8 - 1 - 5 - 4


def test_a_running_request_may_take_what_was_promised_to_another() -> None:
    cache, first, second = make_cache(4), make_request(range(4)), make_request(range(50, 62))
    prefill(cache, first)
    assert cache.admit(second)
    first.num_computed = 4
    assert cache.reserve(first, 1)
    assert cache.available == -1
    assert not cache.admit(make_request([1]))
    assert not cache.reserve(second, 12)
    assert held(second) == []
    cache.release(first)
    assert cache.reserve(second, 12)
    cache.release(second)
    assert cache.available == 4


def test_a_prefix_is_found_up_to_the_last_full_block_that_is_equal() -> None:
    cache = make_cache(20)
    prefill(cache, make_request([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    for tokens, hit in (
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], 8),
        ([1, 2, 3, 4, 5, 6, 7, 0, 9], 4),
        ([1, 2, 3, 0, 5, 6, 7, 8, 9], 0),
        ([5, 6, 7, 8, 9], 0),
        ([1, 2, 3], 0),
    ):
        request = make_request(tokens)
        assert cache.admit(request)
        assert request.num_computed == hit
        assert request.first_writable == hit
        cache.release(request)


def test_a_full_hit_computes_the_last_token_again_and_writes_nothing() -> None:
    cache = make_cache(3)
    first, second = make_request(range(8)), make_request(range(8))
    prefill(cache, first)
    assert cache.admit(second)
    assert (second.num_computed, second.first_writable) == (7, 8)
    assert held(second) == held(first)
    assert cache.pool.refs[:2] == [2, 2]
    assert cache.reserve(second, 1)
    assert cache.pool.num_free == 1


def test_blocks_are_found_only_after_their_step_was_applied() -> None:
    cache, first = make_cache(), make_request(range(8))
    assert cache.admit(first)
    assert cache.reserve(first, 8)
    second = make_request(range(8))
    assert cache.admit(second)
    assert second.num_computed == 0
    cache.applied(first, 4)
    third = make_request(range(8))
    assert cache.admit(third)
    assert third.num_computed == 4


def test_outputs_are_found_like_prompts() -> None:
    cache, request = make_cache(), make_request([1, 2, 3])
    prefill(cache, request)
    request.tokens.extend([4, 5])
    request.known = 5
    compute(cache, request, 2)
    again = make_request([1, 2, 3, 4, 9])
    assert cache.admit(again)
    assert again.num_computed == 4


def test_free_blocks_that_are_hit_count_as_taken() -> None:
    cache, first = make_cache(4), make_request(range(8))
    prefill(cache, first)
    cache.release(first)
    filler = make_request(range(50, 58))
    assert cache.admit(filler)
    assert cache.available == 2
    assert not cache.admit(make_request([*range(8), 9]))
    assert cache.admit(make_request(range(8)))
    assert cache.available == 0


def test_salts_separate_prefixes() -> None:
    cache = make_cache(20)
    prefill(cache, make_request(range(9), cache_salt="a"))
    for salt, hit in (("a", 8), ("b", 0), ("", 0)):
        request = make_request(range(9), cache_salt=salt)
        assert cache.admit(request)
        assert request.num_computed == hit


def test_without_prefix_caching_nothing_is_found_nor_counted() -> None:
    counters = Counters()
    cache = make_cache(prefix_caching=False, counters=counters)
    for _ in range(2):
        request = make_request(range(8))
        prefill(cache, request)
        assert request.num_computed == 8
    assert cache.pool.num_indexed == 0
    assert counters == Counters()


def test_who_wants_prompt_logprobs_reads_no_prefix_but_leaves_one() -> None:
    cache, teller = make_cache(), make_request(range(8), prompt_logprobs=0)
    prefill(cache, make_request(range(4)))
    assert cache.admit(teller)
    assert teller.num_computed == 0
    compute(cache, teller, 8)
    assert cache.pool.num_indexed == 2
    cache.release(teller)
    teller.family.prompt_logprobs_sent = 8
    assert cache.admit(teller)
    assert teller.num_computed == 7


def test_the_plan_gets_each_block_once() -> None:
    cache, request = make_cache(), make_request(range(12))
    assert cache.admit(request)
    plan = StepPlan(1)
    plan.block_counts.extend([0, 0])
    plan.first_writable.extend([0, 0])
    assert cache.reserve(request, 5)
    cache.describe(request, plan, 0)
    cache.describe(request, plan, 1)
    assert cache.reserve(request, 9)
    cache.describe(request, plan, 1)
    assert list(plan.block_counts) == [2, 1]
    assert list(plan.block_ids) == held(request)


def test_a_reset_forgets_what_blocks_hold() -> None:
    cache, request = make_cache(), make_request(range(8))
    prefill(cache, request)
    cache.release(request)
    cache.reset()
    assert cache.pool.num_indexed == 0
    assert cache.admit(request)
    assert request.num_computed == 0


def test_why_names_the_numbers() -> None:
    cache = make_cache(reserve_blocks=1)
    prefill(cache, make_request(range(20)))
    reason = cache.why(make_request(range(50, 66)))
    assert reason is not None
    assert "needs 4 KV blocks" in reason
    assert "2 of 8" in reason
    assert cache.why(make_request(range(50, 54))) is None


def test_what_admit_refuses_takes_nothing() -> None:
    cache, first, second = make_cache(), make_request(range(24)), make_request(range(16))
    prefill(cache, first)
    before = (cache.available, cache.pool.free_blocks(), cache.pool.refs.copy())
    assert not cache.admit(make_request(range(50, 66)))
    assert (cache.available, cache.pool.free_blocks(), cache.pool.refs) == before
    assert cache.admit(second)


class Looks(BlockPool):
    """A pool that counts looks into its index."""

    looks = 0

    def find(self, name: bytes, group: int = 0) -> int | None:
        self.looks += 1
        return super().find(name, group)


@pytest.mark.parametrize("cached", [False, True])
def test_a_request_that_does_not_fit_costs_one_look_each_time(cached: bool) -> None:
    cache = make_cache(100)
    cache.pool = pool = Looks(100)
    waiting = make_request(range(384), cache_salt="" if cached else "other")
    first = make_request(range(380))
    prefill(cache, first)
    cache.release(first)  # its blocks are free and can be found, but what holds them is the pool's room
    prefill(cache, make_request(range(500, 540)))
    assert cache.available == 90
    assert pool.num_indexed == 100
    looks = pool.looks
    for _ in range(10):
        assert not cache.admit(waiting)
    assert pool.looks - looks <= 10


def test_hits_that_others_hold_make_room_where_free_ones_do_not() -> None:
    cache = make_cache(20)
    holder, other = make_request(range(40)), make_request(range(50, 82))
    prefill(cache, holder)
    prefill(cache, other)
    assert cache.available == 2
    assert cache.why(make_request(range(46))) is not None
    assert cache.admit(make_request(range(46)))
    assert not cache.admit(make_request([*range(36), *range(90, 98)]))


def test_held_hits_count_whoever_computed_them() -> None:
    """Two compute one prompt at once; the one whose blocks were found first is gone, the other goes on."""
    cache = make_cache(20)
    first, second = make_request(range(16)), make_request(range(17))
    assert cache.admit(first)
    assert cache.admit(second)
    compute(cache, first, 16)
    compute(cache, second, 17)
    cache.release(first)
    prefill(cache, make_request(range(50, 100)))
    assert cache.available == 2
    third = make_request([*range(16), 1, 2, 3, 4, 5])
    assert cache.admit(third)
    assert held(third) == held(second)[:4]


def test_a_firm_promise_covers_the_limit_and_is_kept() -> None:
    cache, running = make_cache(8), make_request(range(4))
    prefill(cache, running)
    protected = make_request(range(50, 58), max_tokens=16)
    protected.protected = True
    assert cache.admit(protected)
    assert cache.available == 8 - 1 - 6
    running.tokens.extend(range(4))
    compute(cache, running, 4)
    running.tokens.extend(range(4))
    assert not cache.reserve(running, 4), "what is left has been promised"
    compute(cache, protected, 8)
    for _ in range(16):
        compute(cache, protected, 1)
    assert len(held(protected)) == 6
    assert cache.available == 0
    cache.release(protected)
    assert cache.available == 6
    assert cache.reserve(running, 4)


def test_who_is_protected_while_it_runs_gives_back_what_it_was_promised() -> None:
    cache, request = make_cache(8), make_request(range(12), max_tokens=16)
    assert cache.admit(request)
    compute(cache, request, 4)
    request.protected = True
    compute(cache, request, 4)
    assert cache.available == 8 - 3
    cache.release(request)
    assert cache.available == 8
    assert cache.admit(request)
    assert cache.available == 8 - 7
    cache.release(request)
    assert cache.available == 8


def test_a_protected_request_needs_room_for_all_of_its_limit() -> None:
    cache, request = make_cache(8), make_request(range(8), max_tokens=20)
    prefill(cache, make_request(range(50, 58)))
    request.protected = True
    assert not cache.admit(request)
    assert "needs 7 KV blocks" in (cache.why(request) or "")
    request.protected = False
    assert cache.admit(request)


def test_only_tokens_that_are_known_for_good_are_named() -> None:
    """A step with drafts computes positions whose tokens become known after it was applied."""
    cache, request = make_cache(), make_request(range(6))
    prefill(cache, request)
    request.tokens.append(6)
    assert cache.reserve(request, 4)
    request.num_computed = 9
    cache.applied(request, 9)
    assert cache.pool.num_indexed == 1
    request.tokens.extend([7, 8])
    assert cache.reserve(request, 1)
    request.num_computed = 10
    cache.applied(request, 9)
    assert cache.pool.num_indexed == 2
    assert cache.admit(make_request(range(10)))
    assert request.block_hashes == make_names(range(8))


def make_names(tokens: Sequence[int]) -> list[bytes]:
    return Naming(4).names(make_request(tokens), len(tokens) // 4)


def test_blocks_of_drafts_that_were_wrong_are_used_by_the_next_step() -> None:
    cache, request = make_cache(), make_request(range(4))
    prefill(cache, request)
    request.tokens.append(4)
    assert cache.reserve(request, 6)
    blocks = list(held(request))
    assert len(blocks) == 3
    request.num_computed = 5
    cache.applied(request, 5)
    request.tokens.append(5)
    assert cache.reserve(request, 6)
    assert held(request) == blocks
    assert cache.pool.num_indexed == 1


def test_a_step_of_one_token_needs_nothing_as_far_as_the_described_blocks_reach() -> None:
    cache, request = make_cache(), make_request(range(6))
    assert cache.admit(request)
    assert cache.steady_until(request) == 0
    plan = StepPlan(1)
    plan.block_counts.append(0)
    plan.first_writable.append(0)
    assert cache.reserve(request, 6)
    cache.describe(request, plan, 0)
    assert cache.steady_until(request) == 8


def test_what_a_prompt_found_is_counted_once() -> None:
    counters = Counters()
    cache = make_cache(20, counters=counters)
    plan = StepPlan(1)
    plan.block_counts.extend([0])
    plan.first_writable.extend([0])
    family = make_family(make_spec(1, range(9), 10, n=2), 1000, 0.0, 0)
    for request, runs, queries, hits in (
        (make_request(range(9)), 1, 9, 0),
        (family.choices[0], 1, 18, 8),
        (family.choices[0], 2, 18, 8),
        (family.choices[1], 1, 18, 8),
    ):
        assert cache.admit(request)
        request.runs = runs
        assert cache.reserve(request, 9 - request.num_computed)
        cache.describe(request, plan, 0)
        cache.applied(request, 9)
        assert (counters.prefix_queries, counters.prefix_hits) == (queries, hits)
        cache.release(request)
        request.num_computed = 0
