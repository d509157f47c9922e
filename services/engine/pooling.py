"""Pooled vectors: which rows give one. Such a request ends with its prompt, and no token is sampled for it."""

from __future__ import annotations

from services.engine.plan import POOLS, SAMPLES, StepPlan
from services.engine.request import Request
from services.engine.resources import Resource


class PoolingFlag(Resource):
    """Lets a row pool where it would sample: in the step that computes the last token of its prompt."""

    def concerns(self, request: Request) -> bool:
        """Only who asked for a vector."""
        return request.family.spec.pooling is not None

    def describe(self, request: Request, plan: StepPlan, at: int) -> None:
        """After a preemption the whole prompt runs again, and pools at its end."""
        del request
        if plan.flags[at] & SAMPLES:
            plan.flags[at] = POOLS
