"""Inputs that broke other serving systems, each with the rule that makes the whole kind of fault impossible."""

from __future__ import annotations

import itertools

import pytest

from services.common.errors import ResourceExhausted, TriptychError
from services.engine.events import FINISH_ABORT, Owner, Started
from services.engine.kv.hashing import ExtraKey, KeyKind, block_hash, root
from services.engine.policies import FairShare, FirstCome, Policy, Priority
from tests.engine.fake_worker import entries, undisturbed
from tests.engine.harness import Harness, make_config, make_spec


def numbers(length: int, first: int = 0) -> list[int]:
    return [(first + at) % 50 for at in range(length)]


def handles(harness: Harness) -> list[int]:
    """Whose tokens the last step computed."""
    return [entry[0].owner.handle for entry in entries(harness.plans[-1])]


# The prefix cache.


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("length", [5, 8, 9])
def test_the_same_prompt_twice_in_one_batch(depth: int, length: int) -> None:
    harness = Harness(make_config(max_num_batched_tokens=64, steps_in_flight=depth))
    for handle in range(2):
        harness.submit(make_spec(handle, numbers(length), 9))
    harness.plan()
    assert handles(harness) == [0, 1]
    harness.run()
    assert harness.tokens(0) == harness.tokens(1) == undisturbed(numbers(length), 1, 9)


def test_chunks_make_the_same_names_as_a_whole_prompt() -> None:
    prompt = numbers(200)
    harness = Harness(make_config(max_num_batched_tokens=100, block_size=16, num_blocks=64))
    for handle in range(2):
        harness.submit(make_spec(handle, prompt, 2))
        harness.run()
    assert harness.started[0].cached_tokens == 0
    assert harness.started[1].cached_tokens == 192
    assert harness.core.counters.prefix_hits == 192
    assert harness.core.counters.prefix_queries == 400
    assert harness.tokens(0) == harness.tokens(1) == undisturbed(prompt, 1, 2)


def test_prompts_that_part_inside_a_block() -> None:
    harness = Harness()
    for handle, prompt in enumerate(([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 9, 7])):
        harness.submit(make_spec(handle, prompt, 6))
        harness.run()
        assert harness.tokens(handle) == undisturbed(prompt, 1, 6)
    assert harness.started[1].cached_tokens == 4


def test_a_salt_keeps_tenants_apart_and_the_cache_on() -> None:
    """The hit under the same salt shows that the misses under others mean something.

    That the gateway makes the salt of a client's key is not tested: there are no keys yet.
    """
    found = []
    for order in (["a", "a", "b", ""], ["", "", "a", "b"]):
        harness = Harness()
        for handle, salt in enumerate(order):
            harness.submit(make_spec(handle, numbers(9), 2, cache_salt=salt))
            harness.run()
            assert harness.tokens(handle) == undisturbed(numbers(9), 1, 2)
        found.append([harness.started[handle].cached_tokens for handle in range(4)])
    assert found == [[0, 8, 0, 0], [0, 8, 0, 0]]


def test_a_name_says_of_what_kind_its_keys_are() -> None:
    """The same text as a salt, as an adapter and as media; cut elsewhere; in blocks of another size."""
    keys = [
        (),
        *((ExtraKey(kind, b"x"),) for kind in KeyKind),
        (ExtraKey(KeyKind.SALT, b"xx"),),
        (ExtraKey(KeyKind.SALT, b"x"), ExtraKey(KeyKind.SALT, b"x")),
        (ExtraKey(KeyKind.SALT, b"x"), ExtraKey(KeyKind.ADAPTER, b"x")),
        (ExtraKey(KeyKind.MEDIA, b"x", 1),),
    ]
    tokens = make_spec(0, [1, 2, 3, 4]).prompt
    names = {block_hash(root(size), tokens, extra) for size in (4, 8) for extra in keys}
    assert len(names) == 2 * len(keys)


def test_a_block_that_fills_up_later_is_found_as_what_it_became_and_gone_once_given_out() -> None:
    harness = Harness(make_config(num_blocks=6))
    prompt = numbers(6)
    whole = prompt + undisturbed(prompt, 1, 7)
    harness.submit(make_spec(0, prompt, 7))
    harness.run()
    for handle, tokens, found in ((1, whole[:9], 8), (2, [*prompt, 49, 49, 49], 4)):
        harness.submit(make_spec(handle, tokens, 1))
        harness.run()
        assert harness.started[handle].cached_tokens == found
    harness.submit(make_spec(3, numbers(22, 20), 1))  # takes every block
    harness.run()
    harness.submit(make_spec(4, whole[:9], 1))
    harness.run()
    assert harness.started[4].cached_tokens == 0


# Preemption.


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("prompt_len", "budget"), [(8, 8), (7, 8), (8, 4), (16, 3)])
def test_preemption_changes_no_output(depth: int, prompt_len: int, budget: int) -> None:
    """Also in the middle of a prompt, and with a step in flight."""
    config = make_config(
        max_num_batched_tokens=budget,
        max_num_seqs=6,
        num_blocks=-(-(prompt_len + 16) // 4) + 1,
        output_reserve_blocks=0,
        steps_in_flight=depth,
    )
    harness = Harness(config)
    for handle in range(6):
        harness.submit(make_spec(handle, numbers(prompt_len, handle), 16))
    harness.run()
    assert {loss.request_id for loss in harness.core.take_preemptions()} == {f"r{handle}" for handle in range(1, 6)}
    for handle in range(6):
        assert harness.tokens(handle) == undisturbed(numbers(prompt_len, handle), 1, 16)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize(("num_blocks", "prompt_len"), [(8, 3), (8, 11), (9, 8), (16, 5)])
def test_an_exhausted_pool_keeps_going(depth: int, num_blocks: int, prompt_len: int) -> None:
    """Some token in every k turns.

    The first in rank is never a victim, so it gets a token per turn once it is computed. One that comes to be
    the first computes at most its whole limit anew, and is admitted in the step after one that preempted.
    """
    config = make_config(max_num_seqs=8, num_blocks=num_blocks, output_reserve_blocks=0, steps_in_flight=depth)
    harness = Harness(config)
    for handle in range(8):
        harness.submit(make_spec(handle, numbers(prompt_len, handle), 20))
    k = -(-(prompt_len + 20) // config.max_num_batched_tokens) + depth + 1
    told = quiet = 0
    while harness.turn():
        before, told = told, sum(len(heard.tokens) for heard in harness.heard.values())
        quiet = 0 if told > before else quiet + 1
        assert quiet < k
    assert harness.core.counters.preemptions > 0
    assert told == 8 * 20
    harness.run()


@pytest.mark.parametrize("limit", [1, 2, 8])
@pytest.mark.parametrize("policy", [FirstCome(), Priority(50.0), FairShare(50.0)], ids=lambda policy: policy.name)
def test_nobody_is_preempted_more_often_than_that(policy: Policy, limit: int) -> None:
    """Neither for blocks nor by urgent ones; who has lost its place so often runs to its end."""
    config = make_config(max_num_seqs=6, num_blocks=9, output_reserve_blocks=0, max_preemptions=limit)
    harness = Harness(config, policy)
    losses: dict[str, int] = {}
    for handle in range(40):
        priority = (7 * handle) % 5 if policy.preempts else 0
        harness.submit(
            make_spec(handle, numbers(3 + handle % 6, handle), 12, priority=priority, tenant=str(handle % 3))
        )
        harness.turn()
        for loss in harness.core.take_preemptions():
            losses[loss.request_id] = losses.get(loss.request_id, 0) + 1
    while harness.turn():
        for loss in harness.core.take_preemptions():
            losses[loss.request_id] = losses.get(loss.request_id, 0) + 1
    harness.run()
    assert max(losses.values()) == limit if limit < 8 else 2 < max(losses.values()) <= limit
    assert sum(losses.values()) == harness.core.counters.preemptions
    for handle in range(40):
        assert harness.tokens(handle) == undisturbed(numbers(3 + handle % 6, handle), 1, 12)


def test_a_preempted_request_goes_before_an_earlier_one_that_never_ran() -> None:
    """And what it had computed is still there."""
    harness = Harness(make_config(num_blocks=10, max_num_batched_tokens=64, max_num_seqs=3, output_reserve_blocks=0))
    harness.submit(make_spec(0, numbers(4), 30))
    harness.turn()
    harness.submit(make_spec(1, numbers(36, 9), 2))
    harness.submit(make_spec(2, numbers(8, 20), 30))
    harness.turn()
    assert harness.running() == [0, 2]
    while harness.running() != [0]:
        assert harness.turn()
    assert harness.core.counters.preemptions == 1
    explanations = [harness.core.explain(handle.to_bytes(16, "big")) for handle in (2, 1)]
    assert [explanation.position for explanation in explanations if explanation is not None] == [0, 1]
    plans = len(harness.plans)
    while 2 not in harness.running():
        assert harness.turn()
    resumed = next(
        start
        for plan in harness.plans[plans:]
        for entry, start in zip(entries(plan), plan.num_computed, strict=True)
        if entry[0].owner.handle == 2
    )
    assert resumed > 0
    harness.run()
    assert harness.tokens(2) == undisturbed(numbers(8, 20), 1, 30)


# Who goes first.


@pytest.mark.parametrize("depth", [1, 2])
def test_an_urgent_one_takes_the_only_place(depth: int) -> None:
    """It runs in the very next step; who lost the place ends with the same output."""
    harness = Harness(make_config(max_num_seqs=1, steps_in_flight=depth), Priority())
    harness.submit(make_spec(0, numbers(6), 20, priority=5))
    for _ in range(4):
        harness.turn()
    harness.submit(make_spec(1, numbers(6, 9), 5, priority=1))
    harness.plan()
    assert handles(harness) == [1]
    [loss] = harness.core.take_preemptions()
    assert (loss.request_id, loss.by_request_id, loss.reason) == ("r0", "r1", "priority")
    while not harness.heard[1, 0].ended:
        assert not harness.heard[0, 0].ended
        assert harness.turn()
    harness.submit(make_spec(2, numbers(6, 19), 5, priority=5))  # no more urgent: it waits
    harness.run()
    assert harness.core.counters.preemptions == 1
    for handle, first, count in ((0, 0, 20), (1, 9, 5), (2, 19, 5)):
        assert harness.tokens(handle) == undisturbed(numbers(6, first), 1, count)


def turns_of_the_short_one(policy: Policy) -> int:
    """How long a tenant with one short request waits beside one with a hundred long ones."""
    harness = Harness(make_config(max_num_seqs=2, num_blocks=40), policy)
    for handle in range(100):
        harness.submit(make_spec(handle, numbers(40, handle), 4, tenant="many"))
    for _ in range(25):
        harness.turn()
    harness.submit(make_spec(100, numbers(3), 1, tenant="one"))
    for turns in itertools.count(1):
        harness.turn()
        if harness.heard[100, 0].ended:
            return turns
    raise AssertionError


def test_a_short_request_does_not_wait_behind_another_tenants_hundred() -> None:
    """It comes in at no more than the other tenant had been charged at its last start, so it is the next to start,
    or the one after. A place is free as soon as the first of the running ends: its 40 tokens in budgets of 8
    and 3 more for its outputs, twice; then its own step, behind those in flight.
    """
    bound = 2 * (40 // 8 + 3) + 1 + 2
    assert turns_of_the_short_one(FairShare()) <= bound
    assert turns_of_the_short_one(FirstCome()) > 20 * bound


def test_an_endless_stream_of_urgent_requests_delays_by_a_bounded_number() -> None:
    """Before one of priority 5 only those start that came within 5 times the ageing time, and the one that ran.

    Then urgent ones may still take its place, as often as anybody's place may be taken.
    """
    ageing_s, most = 10.0, 3
    harness = Harness(make_config(max_num_seqs=1, max_preemptions=most), Priority(ageing_s))
    harness.submit(make_spec(0, [1], 4, priority=0))
    harness.submit(make_spec(1, [2, 3], 6, priority=5))
    for handle in range(2, 1000):
        harness.submit(make_spec(handle, [4], 3))  # one per second, each takes more than two
        harness.turn()
        if harness.heard[1, 0].ended:
            break
    starts = [new.request_id for plan in harness.plans for new in plan.new_rows]
    assert starts.index("r1") == 1 + 5 * ageing_s
    assert starts.count("r1") == 1 + most
    assert len(set(starts)) <= 1 + 1 + 5 * ageing_s + most
    assert harness.tokens(1) == undisturbed([2, 3], 1, 6)


def test_a_long_prompt_is_cut_only_while_others_wait_for_tokens() -> None:
    harness = Harness(make_config(max_prefill_tokens=2, max_num_batched_tokens=16, max_num_seqs=2, steps_in_flight=1))
    harness.submit(make_spec(0, numbers(40), 2))
    harness.turn()
    assert harness.plans[-1].num_tokens.tolist() == [16]  # alone
    harness.submit(make_spec(1, numbers(5, 20), 8))
    harness.turn()
    assert harness.plans[-1].num_tokens.tolist() == [2, 5]  # the other is the last that waits
    harness.submit(make_spec(2, [1], 1))
    harness.turn()
    assert harness.plans[-1].num_tokens.tolist() == [2, 1]  # there is no place for the third
    harness.abort(1)
    harness.turn()
    assert harness.plans[-1].num_tokens.tolist() == [2, 1]  # now there was one
    harness.turn()
    assert harness.plans[-1].num_tokens.tolist() == [16]
    harness.run()
    assert harness.tokens(0) == undisturbed(numbers(40), 1, 2)


# Coming and going.


def test_who_leaves_the_queue_is_never_scheduled() -> None:
    harness = Harness(make_config(max_num_seqs=1))
    harness.submit(make_spec(0, numbers(6), 8))
    harness.submit(make_spec(1, numbers(6, 9), 8))
    harness.submit(make_spec(2, numbers(6, 19), 8))
    harness.turn()
    harness.abort(1)
    assert harness.core.load().waiting == 1
    harness.run()
    assert {entry[0].owner.handle for plan in harness.plans for entry in entries(plan)} == {0, 2}
    assert 1 not in harness.started
    assert harness.tokens(1) == []


@pytest.mark.parametrize("choice", [None, 0, 1])
def test_an_abort_before_the_first_step(choice: int | None) -> None:
    """There are no blocks yet, and the other choices wait beside the line."""
    harness = Harness()
    harness.submit(make_spec(0, numbers(6), 3, n=2))
    harness.abort(0, choice)
    harness.abort(0, choice)
    harness.run()
    for index in range(2):
        aborted = choice in {None, index}
        assert (harness.heard[0, index].finish == FINISH_ABORT) == aborted
        assert bool(harness.tokens(0, index)) != aborted


def test_a_limit_of_the_queue_is_one_limit_for_all_gateways() -> None:
    """Each choice counts; what is taken is exactly the limit."""
    harness = Harness(make_config(max_waiting_requests=4))
    accepted = 0
    for handle in range(20):
        n = 1 + handle % 2
        spec = make_spec(handle, numbers(3), n=n, owner=Owner(1 + handle % 3, handle))
        if accepted + n <= 4:
            harness.core.submit(spec, 0.0)
            accepted += n
            continue
        with pytest.raises(ResourceExhausted) as refusal:
            harness.core.submit(spec, 0.0)
        assert refusal.value.retry_after_ms is not None
    assert accepted == 4
    assert harness.core.load().waiting == 4


def test_every_accepted_request_ends_once_and_a_refused_one_leaves_nothing() -> None:
    """Refused for the queue, for its names, for its length; then all of it is accepted."""
    harness = Harness(make_config(max_waiting_requests=3, num_blocks=8))
    harness.submit(make_spec(0, numbers(3), n=2))
    wrong = [
        make_spec(1, numbers(3), n=2),
        make_spec(0, numbers(3), token=b"another"),
        make_spec(2, numbers(3), token=bytes(16)),
        make_spec(3, numbers(32)),
    ]
    before = harness.core.load()
    for spec in wrong:
        with pytest.raises(TriptychError):
            harness.submit(spec)
        assert harness.core.load() == before
    harness.run()
    for spec in (wrong[0], make_spec(2, numbers(3)), make_spec(3, numbers(31))):
        harness.submit(spec)
        harness.run()
    assert set(harness.heard) == {(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0)}
    assert all(isinstance(harness.started[handle], Started) for handle in range(4))
