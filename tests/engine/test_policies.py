"""The orders: who goes first in the line, among the running, and who may take whose place."""

from __future__ import annotations

import random
from typing import Any

import pytest

from services.common.errors import InvalidArgument
from services.engine.policies import FairShare, FirstCome, Priority, make_policy
from services.engine.request import Request, make_family
from tests.engine.fake_worker import entries
from tests.engine.harness import Harness, make_config, make_spec


def make_request(arrival: int, arrived: float = 0.0, runs: int = 0, **given: Any) -> Request:
    request = make_family(make_spec(arrival, [1], **given), 100, arrived, arrival).choices[0]
    request.runs = runs
    return request


def test_every_policy_is_made_by_its_name() -> None:
    made = [make_policy(name, 1.0) for name in ("fcfs", "priority", "fair")]
    assert [type(policy) for policy in made] == [FirstCome, Priority, FairShare]
    with pytest.raises(KeyError):
        make_policy("lottery", 1.0)


def test_first_come_is_by_arrival_and_knows_no_priority() -> None:
    policy = FirstCome()
    requests = [make_request(0), make_request(1, runs=1), make_request(2)]
    assert sorted(requests, key=policy.place) == [requests[1], requests[0], requests[2]]
    assert sorted(requests, key=policy.rank) == requests
    assert not policy.outranks(requests[0], requests[1])
    harness = Harness(make_config(policy="fcfs"))
    with pytest.raises(InvalidArgument, match="the engine's policy is fcfs") as caught:
        harness.submit(make_spec(1, [1], priority=1))
    assert caught.value.field == "priority"
    assert not harness.core.has_work


def test_priority_is_strict_without_ageing() -> None:
    policy = Priority()
    requests = [make_request(at, arrived=1e9 * at, priority=priority) for at, priority in enumerate((3, -2, 0, 0))]
    assert sorted(requests, key=policy.place) == [requests[at] for at in (1, 2, 3, 0)]
    assert policy.outranks(requests[1], requests[2])
    assert not policy.outranks(requests[2], requests[3])


def test_waiting_makes_up_for_priority() -> None:
    policy = Priority(ageing_s=10.0)
    old = make_request(0, arrived=5.0, priority=2)
    assert policy.place(make_request(1, arrived=19.0, priority=0)) < policy.place(old)
    assert policy.place(make_request(1, arrived=31.0, priority=0)) > policy.place(old)
    assert policy.place(make_request(1, arrived=25.0, priority=0)) > policy.place(old)  # equal levels: by arrival
    assert policy.place(make_request(1, arrived=25.0, priority=0, runs=1)) < policy.place(old)


def test_age_takes_no_place_away() -> None:
    policy = Priority(ageing_s=1.0)
    assert not policy.outranks(make_request(0, arrived=0.0, priority=1), make_request(1, arrived=1e6, priority=0))
    assert policy.outranks(make_request(1, arrived=1e6, priority=0), make_request(0, arrived=0.0, priority=1))


@pytest.mark.parametrize("ageing_s", [1.0, 5.0])
def test_an_endless_stream_of_urgent_requests_delays_by_a_bounded_time(ageing_s: float) -> None:
    harness = Harness(make_config(max_num_seqs=1, max_num_batched_tokens=4, policy="priority", ageing_s=ageing_s))
    harness.submit(make_spec(0, [1, 2], 1, priority=3))
    for handle in range(1, 200):
        harness.submit(make_spec(handle, [1, 2], 1, priority=0))
        harness.turn()
        if harness.heard[0, 0].ended:
            break
    admitted_at = harness.started[0].queue_s
    assert 2 * ageing_s <= admitted_at <= 4 * ageing_s + 4


def test_a_tenant_that_used_less_goes_first() -> None:
    policy = FairShare()
    a, b = make_request(0, tenant="a"), make_request(1, tenant="b")
    for request in (a, b):
        policy.entered(request)
    policy.charge(a, 10)
    policy.charge(b, 3)
    assert (policy.used("a"), policy.used("b")) == (10, 3)


def test_nobody_saves_up_a_share() -> None:
    policy = FairShare()
    busy = make_request(0, tenant="busy")
    policy.entered(busy)
    policy.charge(busy, 1000)
    policy.taken(busy)
    late = make_request(1, tenant="late")
    policy.entered(late)
    assert policy.used("late") == 1000


def test_going_idle_for_a_moment_forgives_no_debt() -> None:
    policy = FairShare()
    greedy, modest = make_request(0, tenant="greedy"), make_request(1, tenant="modest")
    policy.entered(greedy)
    policy.entered(modest)
    policy.charge(greedy, 500)
    policy.left(greedy)
    policy.entered(make_request(2, tenant="greedy"))
    assert policy.used("greedy") == 500
    assert policy.used("modest") == 0


def test_idle_tenants_are_forgotten_once_they_owe_nothing() -> None:
    policy = FairShare()
    stays = make_request(0, tenant="stays")
    policy.entered(stays)
    for number in range(1000):
        request = make_request(number + 1, tenant=f"t{number}")
        policy.entered(request)
        policy.charge(request, 5)
        policy.charge(stays, 5)
        policy.taken(stays)
        policy.left(request)
    assert len(policy._used) < 5
    assert len(policy._idle) < 5


def test_tenants_that_come_once_are_forgotten() -> None:
    policy = FairShare()
    for number in range(1000):
        request = make_request(number, tenant=f"t{number}")
        policy.entered(request)
        policy.taken(request)
        policy.charge(request, 5)
        policy.left(request)
    assert len(policy._used) < 5
    assert len(policy._idle) < 5


def test_tenants_that_always_wait_get_equal_shares_of_tokens() -> None:
    """Prompts of one tenant are ten times as long; the shares are counted in tokens."""
    draw = random.Random(5)
    harness = Harness(make_config(policy="fair", max_num_seqs=2, max_num_batched_tokens=16, num_blocks=64))
    lengths = {"long": 40, "short": 4}
    for handle in range(400):
        tenant = "long" if handle % 2 else "short"
        prompt = [draw.randrange(50) for _ in range(lengths[tenant])]
        harness.submit(make_spec(handle, prompt, 2, tenant=tenant))
    for _ in range(150):
        harness.turn()
    used = dict.fromkeys(lengths, 0)
    for plan in harness.plans:
        for entry, count in zip(entries(plan), plan.num_tokens, strict=True):
            used[entry[0].family.spec.tenant] += count
    assert min(used.values()) > 400
    assert abs(used["long"] - used["short"]) <= 3 * 42
    harness.run()


def test_a_short_request_waits_for_one_of_a_greedy_tenant_at_most() -> None:
    harness = Harness(make_config(policy="fair", max_num_seqs=1, max_num_batched_tokens=16, num_blocks=64))
    for handle in range(100):
        harness.submit(make_spec(handle, [handle % 50] * 30, 3, tenant="a"))
    for _ in range(10):
        harness.turn()
    ran = len(harness.started)
    harness.submit(make_spec(100, [1, 2], 1, tenant="b"))
    while 100 not in harness.started:
        harness.turn()
    assert len(harness.started) - ran <= 2
    harness.run()
