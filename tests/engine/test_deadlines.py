"""Deadlines: in their order, once, and of nobody who ran or ended."""

from __future__ import annotations

from services.engine.deadlines import Deadlines
from services.engine.events import FINISH_ABORT
from services.engine.request import Family, make_family
from tests.engine.harness import make_spec


def make(arrival: int) -> Family:
    return make_family(make_spec(arrival, [1]), 100, 0.0, arrival)


def test_who_waits_past_its_time_is_told_once() -> None:
    deadlines = Deadlines()
    families = [make(arrival) for arrival in range(4)]
    for family, at in zip(families, (3.0, 1.0, 2.0, 2.0), strict=True):
        deadlines.add(family, at)
    assert deadlines.next == 1.0
    assert list(deadlines.passed(0.9)) == []
    assert list(deadlines.passed(2.0)) == [families[1], families[2], families[3]]
    assert list(deadlines.passed(9.0)) == [families[0]]
    assert list(deadlines.passed(9.0)) == []
    assert deadlines.next is None


def test_who_ran_or_ended_is_not_told() -> None:
    deadlines = Deadlines()
    ran, ended = make(0), make(1)
    for family in (ran, ended):
        deadlines.add(family, 1.0)
    ran.admitted = 0.5
    ended.choices[0].finish = FINISH_ABORT
    assert list(deadlines.passed(2.0)) == []
    assert len(deadlines) == 0


def test_those_that_ended_long_before_their_deadline_are_let_go() -> None:
    deadlines = Deadlines()
    waits = make(0)
    deadlines.add(waits, 1e6)
    for arrival in range(1, 2000):
        family = make(arrival)
        deadlines.add(family, 1e6 + arrival)
        family.admitted = 0.0
    assert len(deadlines) < 200
    assert list(deadlines.passed(2e6)) == [waits]
