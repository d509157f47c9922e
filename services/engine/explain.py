"""Where a request is and why, for a person to read."""

from __future__ import annotations

from services.engine.report import Explanation
from services.engine.request import Family, Request
from services.engine.scheduler import Scheduler


def explain(family: Family, scheduler: Scheduler) -> Explanation:
    """The state of a live request; the reason is that of its first choice that runs, else of its first."""
    live = list(family.live)
    running = [request for request in live if request.epoch]
    first = running[0] if running else live[0]
    return Explanation(
        state="running" if running else "waiting",
        reason=_reason(first, scheduler),
        position=scheduler.position(first),
        prompt_tokens=len(family.spec.prompt),
        computed_tokens=sum(request.num_computed for request in live),
        output_tokens=sum(request.num_outputs for request in family.choices),
        preemptions=sum(request.preemptions for request in family.choices),
        tenant=family.spec.tenant,
    )


def _reason(request: Request, scheduler: Scheduler) -> str:
    if request.epoch:
        return f"runs on row {request.row}"
    before = scheduler.position(request)
    reason = f"{before} choices stand before it in the line" if before else scheduler.why(request) or "is next to run"
    if request.preemptions:
        reason += f"; preempted {request.preemptions} times, last by {request.preempted_by}"
    return reason
