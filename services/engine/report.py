"""What the core says about itself: its load, its totals, and where one request is."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True, frozen=True)
class Load:
    """How busy the core is. `waiting` counts choices, as the queue limits do."""

    running: int
    waiting: int
    waiting_tokens: int
    running_tokens: int
    free_blocks: int
    total_blocks: int


@dataclass(slots=True, frozen=True)
class Explanation:
    """Where a request is and why, over all its choices."""

    state: str  # "waiting" or "running"
    reason: str  # one sentence for a person
    position: int | None  # choices before it in the line; None when it does not wait there
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    preemptions: int
    tenant: str


@dataclass(slots=True, frozen=True)
class Preemption:
    """A running choice was put back into the line to make room for another (or for itself, later)."""

    request_id: str
    choice: int
    by_request_id: str
    by_choice: int
    reason: str  # "kv_blocks" or "priority"


@dataclass(slots=True)
class Counters:
    """Totals since the start; they only grow."""

    preemptions: int = 0
    prefix_queries: int = 0  # tokens; the re-run of a choice counts in neither
    prefix_hits: int = 0  # tokens
    prompt_tokens: int = 0
    generated_tokens: int = 0
    drafts: int = 0  # rows of steps that verified drafts
    draft_tokens: int = 0
    draft_tokens_accepted: int = 0
    drafts_accepted_at: list[int] = field(default_factory=list)  # of the first, second, … token of a draft
