"""Whom to suspect when a worker died over a step. Nobody is suspected for one death, since a process
may end for reasons of its own; who was in the step at two of them, without getting further in
between, runs alone from then on, and is guilty if a worker dies again over it alone.

    death 1 ──▶ replayed ──▶ death 2, same place ──▶ alone ──▶ death 3 ──▶ fails
                                   └── was alone already ──▶ fails
"""

from __future__ import annotations

from services.engine.plan import StepPlan
from services.engine.request import Request

FEARED_DEATHS = 2
"""Deaths at one place after which a request is suspected."""
_PLACE_TOKENS = 2
"""Tokens that a request may have gained and still be at the same place: those of the steps in flight."""


def find_guilty(plan: StepPlan) -> Request | None:
    """Counts a worker's death against all that the step computed. The request that is guilty beyond doubt, if any."""
    accused = plan.live
    for request in accused:
        if len(request.tokens) - request.died_at > _PLACE_TOKENS:
            request.deaths = 0
        request.deaths += 1
        request.died_at = len(request.tokens)
        request.suspect = request.suspect or request.deaths >= FEARED_DEATHS
    if len(plan.requests) == len(accused) == 1 and accused[0].deaths >= FEARED_DEATHS:
        return accused[0]
    return None
