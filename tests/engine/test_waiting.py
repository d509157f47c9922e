"""The waiting line against a sorted list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.engine.policies import FairShare, Priority
from services.engine.request import Request, make_family
from services.engine.waiting import WaitingLine
from tests.engine.harness import make_spec


def make_request(arrival: int, priority: int = 0, runs: int = 0, tenant: str = "") -> Request:
    spec = make_spec(arrival, [1] * (arrival + 1), priority=priority, tenant=tenant)
    request = make_family(spec, 2000, 0.0, arrival).choices[0]
    request.runs = runs
    return request


def test_priority_then_who_ran_before_then_arrival() -> None:
    line = WaitingLine(Priority())
    requests = [make_request(0), make_request(1), make_request(2, runs=1), make_request(3, -1), make_request(4, 1, 1)]
    for request in requests:
        line.add(request)
    assert [line.position(request) for request in requests] == [2, 3, 1, 0, 4]
    order = []
    while (first := line.pop()) is not None:
        order.append(first.arrival)
    assert order == [3, 2, 0, 1, 4]
    assert line.tokens == 0


def test_the_parked_count_and_are_not_taken() -> None:
    line = WaitingLine(Priority())
    parked = make_request(4)
    line.park(parked)
    assert (len(line), line.tokens, line.parked(parked), line.position(parked)) == (1, 5, True, None)
    assert line.pop() is None
    line.add(parked)
    assert (len(line), line.tokens, line.parked(parked)) == (1, 5, False)
    assert line.pop() is parked
    line.park(parked)
    line.discard(parked)
    assert (len(line), line.tokens) == (0, 0)


def test_discarding_who_does_not_wait_changes_nothing() -> None:
    line = WaitingLine(Priority())
    line.add(make_request(1))
    line.discard(make_request(2))
    assert (len(line), line.tokens) == (1, 2)


@given(st.lists(st.tuples(st.sampled_from(["add", "pop", "discard"]), st.integers(0, 200)), max_size=300))
def test_the_line_is_the_one_that_a_sorted_list_would_be(calls: list[tuple[str, int]]) -> None:
    line, sorted_line = WaitingLine(Priority()), list[Request]()
    policy = Priority()
    for arrival, (verb, number) in enumerate(calls):
        if verb == "add":
            request = make_request(arrival, priority=number % 3, runs=number % 2)
            line.add(request)
            sorted_line.append(request)
            sorted_line.sort(key=policy.place)
        elif verb == "pop":
            assert line.pop() is (sorted_line.pop(0) if sorted_line else None)
        elif sorted_line:
            line.discard(sorted_line.pop(number % len(sorted_line)))
        assert len(line) == len(sorted_line)
        assert line.tokens == sum(len(request.tokens) for request in sorted_line)


class Levels(FairShare):
    """Fair shares that the test sets itself."""

    def __init__(self) -> None:
        super().__init__()
        self.shares = {"a": 0, "b": 0, "c": 0}

    def used(self, tenant: str) -> int:
        return self.shares[tenant]


@given(st.lists(st.tuples(st.sampled_from(["add", "pop", "discard", "charge"]), st.integers(0, 200)), max_size=300))
def test_tenants_take_turns_as_a_sorted_list_would_have_it(calls: list[tuple[str, int]]) -> None:
    policy = Levels()
    line, waiting = WaitingLine(policy), list[Request]()

    def rank(request: Request) -> tuple[int, ...]:
        level, ran, arrival = policy.place(request)
        return (level, policy.used(policy.tenant(request)), ran, arrival)

    for arrival, (verb, number) in enumerate(calls):
        if verb == "add":
            request = make_request(arrival, priority=number % 2, runs=number % 3 % 2, tenant="abc"[number % 3])
            line.add(request)
            waiting.append(request)
        elif verb == "charge":
            policy.shares["abc"[number % 3]] += number
        elif verb == "pop":
            first = min(waiting, key=rank, default=None)
            assert line.peek() is first
            assert line.pop() is first
            if first is not None:
                waiting.remove(first)
        elif waiting:
            line.discard(waiting.pop(number % len(waiting)))
        assert len(line) == len(waiting)
        assert [line.position(request) for request in sorted(waiting, key=rank)] == list(range(len(waiting)))


def test_a_line_that_many_leave_does_not_keep_them() -> None:
    line = WaitingLine(Priority())
    line.add(make_request(0, -1))
    for number in range(1, 1000):
        request = make_request(number, priority=-number)
        line.add(request)
        line.discard(request)
    assert len(line._tenants) < 200
    assert len(line._queues[""]) < 200


def test_tenants_that_leave_the_line_leave_nothing_in_it() -> None:
    line = WaitingLine(FairShare())
    line.add(make_request(0, -1, tenant="stays"))
    for number in range(1, 1000):
        request = make_request(number, tenant=f"t{number}")
        line.add(request)
        line.discard(request)
    assert len(line._tenants) < 200
    assert len(line._entries) == len(line._queues) == 1
