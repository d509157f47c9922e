"""The KV cache as a resource: admission, hits, block tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.engine.kv.manager import KvCache
from services.engine.plan import StepPlan
from services.engine.report import Counters
from services.engine.request import Request, make_family
from tests.engine.harness import make_spec


def make_cache(num_blocks: int = 8, **given: Any) -> KvCache:
    values: dict[str, Any] = {"reserve_blocks": 0, "prefix_caching": True, "counters": Counters()}
    return KvCache(num_blocks, 4, **(values | given))


def make_request(prompt: Sequence[int], **given: Any) -> Request:
    return make_family(make_spec(1, prompt, 100, **given), 1000, 0.0, 0).choices[0]


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
        assert len(request.blocks) == blocks
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
    assert second.blocks == []
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
    assert second.blocks == []
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
    assert second.blocks == first.blocks
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
    assert list(plan.block_ids) == request.blocks


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
