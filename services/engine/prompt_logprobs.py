"""Prompt log probabilities: which rows compute them. Each position is told once per request."""

from __future__ import annotations

from services.engine.plan import PROMPT_LOGPROBS, StepPlan
from services.engine.request import Request
from services.engine.resources import ENDLESS, Resource


class PromptLogprobsFlag(Resource):
    """Flags the rows of the choice that computes the prompt until every position has been told."""

    def concerns(self, request: Request) -> bool:
        """Only who asked and has not been told before."""
        return not request.family.reads_prefix

    def describe(self, request: Request, plan: StepPlan, at: int) -> None:
        """After a preemption the prompt runs again, flagged again if anything is left to tell."""
        if request.num_computed < request.prompt_len and not request.family.reads_prefix:
            plan.flags[at] |= PROMPT_LOGPROBS

    def steady_until(self, request: Request) -> int:
        """Nothing is flagged behind the prompt."""
        return 0 if request.num_computed < request.prompt_len else ENDLESS
