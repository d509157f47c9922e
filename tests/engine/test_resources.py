"""The verbs of resources."""

from __future__ import annotations

from services.engine.plan import StepPlan
from services.engine.request import Request, make_family
from services.engine.resources import Resource, verbs_of
from tests.engine.harness import make_spec


class Half(Resource):
    """Lets half of the tokens run."""

    def clip(self, request: Request, num_tokens: int, budget: int) -> int:
        return num_tokens // 2

    def applied(self, request: Request, end: int) -> None:
        """Hears of everything."""


def test_a_resource_without_a_say_limits_nothing() -> None:
    request = make_family(make_spec(1, [1, 2]), 100, 0.0, 0).choices[0]
    resource, plan = Resource(), StepPlan(1)
    assert resource.concerns(request)
    assert resource.admit(request)
    assert resource.clip(request, 5, 9) == 5
    assert resource.reserve(request, 5)
    assert resource.why(request) is None
    resource.describe(request, plan, 0)
    resource.applied(request, 2)
    resource.release(request)
    resource.reset()
    assert plan == StepPlan(1)


def test_only_verbs_with_a_say_are_called() -> None:
    verbs = verbs_of([Resource(), Half(), Half()])
    request = make_family(make_spec(1, [1, 2]), 100, 0.0, 0).choices[0]
    assert [clip(request, 8, 9) for clip in verbs.clip] == [4, 4]
    assert [until(request) for until in verbs.steady_until] == [0, 0]
    assert len(verbs.applied) == 2
    assert [until(request) for until in verbs.settled_until] == [0, 0]
    assert verbs._replace(clip=(), applied=(), steady_until=(), settled_until=()) == verbs_of([])
