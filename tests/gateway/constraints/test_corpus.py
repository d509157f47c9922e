"""Schemas by the hundred: each is refused with its place, or whatever is sampled under it validates.

Half of them are made from seeds, half are the official test suite of JSON schema (suite.json, with its
licence beside it), which also says which values must not fit.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from decimal import localcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from services.common.errors import InvalidArgument
from services.gateway.asked import Asked
from services.gateway.constraints.building import build
from services.gateway.constraints.parts import Surroundings
from services.gateway.fields import Api, Caller
from services.gateway.request import Constraint
from tests.gateway.constraints.schemas import Maker
from tests.gateway.constraints.walks import accepts, hints_of, matcher, read, validator, walk

SEED = 20_000
PLACE = "response_format.json_schema.schema"


class Case(NamedTuple):
    """A schema, and values that do or do not fit it."""

    name: str
    schema: Any
    values: Sequence[tuple[Any, bool]] = ()


@cache
def suite() -> list[Case]:
    return [Case(*entry) for entry in json.loads(Path(__file__).with_name("suite.json").read_text())]


def made(count: int) -> list[Case]:
    return [Case(f"seed {SEED + at}", Maker(SEED + at).make()) for at in range(count)]


def constraint_of(schema: Any) -> Constraint | InvalidArgument:
    """What a client gets that sends this schema. Any other failure than a refusal fails the test."""
    asked = Asked(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    try:
        constraint = build(asked, Caller(Api.CHAT), None, Surroundings())
    except InvalidArgument as refused:
        return refused
    assert constraint is not None
    return constraint


def check(case: Case, walks: int) -> bool:
    """Whether the schema was taken, and then held."""
    constraint = constraint_of(case.schema)
    if isinstance(constraint, InvalidArgument):
        assert constraint.field is not None
        assert constraint.field.startswith("response_format.json_schema")
        assert constraint.message.startswith(constraint.field)
        return False
    judge, hints = validator(case.schema), hints_of(case.schema)
    for number in range(walks):
        draw = random.Random(f"{case.name} {number}")
        output = walk(matcher(constraint), draw, hints if number % 2 else ())
        if output is not None:
            with localcontext(prec=2000):  # digits of a quotient, which the judge divides for multipleOf
                faults = [fault.message for fault in judge.iter_errors(read(output))]
            assert not faults, (case, output)
    for value, fits in case.values:
        if not fits:
            for ascii_only in (True, False):
                assert not accepts(constraint, json.dumps(value, ensure_ascii=ascii_only)), (case, value)
    return True


def counts(cases: Sequence[Case], walks: int) -> tuple[int, int]:
    taken = sum(check(case, walks) for case in cases)
    return taken, len(cases) - taken


def test_fifty_schemas_are_refused_or_held() -> None:
    taken, refused = counts([*made(25), *suite()[::18]], walks=3)
    assert taken + refused >= 49
    assert taken >= 20
    assert refused >= 5


@pytest.mark.slow
def test_a_thousand_schemas_are_refused_or_held() -> None:
    from_seeds, from_suite = counts(made(700), walks=6), counts(suite(), walks=6)
    print(f"made: {from_seeds[0]} held, {from_seeds[1]} refused; suite: {from_suite[0]} held, {from_suite[1]} refused")
    assert sum((*from_seeds, *from_suite)) >= 1000
    assert from_seeds[0] >= 400
    assert from_suite[0] >= 150


def test_values_that_fit_are_taken_by_far_the_most() -> None:
    """A grammar that took nothing would pass the other tests."""
    taken = total = 0
    for case in suite()[::6]:
        constraint = constraint_of(case.schema)
        if isinstance(constraint, Constraint):
            fitting = [value for value, fits in case.values if fits]
            taken += sum(accepts(constraint, json.dumps(value)) for value in fitting)
            total += len(fitting)
    assert total >= 40
    assert taken >= 0.85 * total
