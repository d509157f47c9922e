"""Prompt log probabilities: which rows compute them. Each position is told once per request."""

from __future__ import annotations

from collections.abc import Sequence

from services.engine.events import Event, PromptLogprobs
from services.engine.outcome import not_yet_told
from services.engine.plan import PROMPT_LOGPROBS, StepOutcome, StepPlan
from services.engine.request import Request
from services.engine.resources import ENDLESS, Resource


class PromptLogprobsFlag(Resource):
    """Flags the rows of the choice that computes the prompt until every position has been told."""

    def concerns(self, request: Request) -> bool:
        """Only who asked and has not been told before."""
        return not request.family.prompt_told

    def describe(self, request: Request, plan: StepPlan, at: int) -> None:
        """After a preemption the prompt runs again, flagged again if anything is left to tell."""
        if request.num_computed < request.prompt_len and not request.family.prompt_told:
            plan.flags[at] |= PROMPT_LOGPROBS

    def steady_until(self, request: Request) -> int:
        """Nothing is flagged behind the prompt."""
        return 0 if request.num_computed < request.prompt_len else ENDLESS


def tell_prompt_logprobs(outcome: StepOutcome, rows: Sequence[Request | None]) -> list[Event]:
    """What a step says of prompts, as far as their requests still run and have not been told."""
    events: list[Event] = []
    for chunk in outcome.prompt_logprobs:
        request = rows[chunk.row]
        if request is None or request.epoch != chunk.epoch:
            continue
        family = request.family
        part = not_yet_told(chunk, family.prompt_logprobs_sent)
        if part is not None:
            first, columns = part
            family.prompt_logprobs_sent = first + len(columns.counts)
            events.append(PromptLogprobs(family.spec.owner, first, columns))
    return events
