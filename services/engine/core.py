"""The engine's pure core: every request's state and the schedule. No I/O, no clock, no grpc.

    submit / abort ──▶ schedule(now) ──▶ StepPlan ──▶ worker ──▶ StepOutcome ──▶ apply ──▶ events

Whoever drives it passes the time in and sends the events on.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.engine.events import Event, Owner
from services.engine.plan import StepOutcome, StepPlan
from services.engine.request import RequestSpec


@dataclass(slots=True, frozen=True)
class CoreConfig:
    """What limits the core; all counts are per engine."""

    max_num_batched_tokens: int  # tokens of one step
    max_num_seqs: int  # choices that run at once: rows
    max_model_len: int  # prompt plus output of one choice
    block_size: int  # tokens per KV block
    num_blocks: int
    vocab_size: int
    enable_prefix_caching: bool = True
    output_reserve_blocks: int = 1  # kept free per running choice when another is admitted
    max_waiting_requests: int | None = None  # choices; None means no limit
    max_waiting_tokens: int | None = None
    steps_in_flight: int = 2


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
    reason: str
    position: int | None  # choices before it in the line; None when it does not wait
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    preemptions: int
    tenant: str


@dataclass(slots=True)
class Counters:
    """Totals since the start; they only grow."""

    preemptions: int = 0
    prefix_queries: int = 0  # tokens; the re-run of a preempted choice counts in neither
    prefix_hits: int = 0  # tokens
    prompt_tokens: int = 0
    generated_tokens: int = 0


class EngineCore:
    """The one object that knows every request. All calls come from one thread."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.counters = Counters()

    @property
    def context_len(self) -> int:
        """Longest prompt plus output of one choice: min(model length, KV capacity)."""
        raise NotImplementedError

    def submit(self, spec: RequestSpec, now: float) -> list[Event]:
        """Takes a request in, or raises a TriptychError and keeps nothing of it.

        The list is empty but for a replay of which a choice turns out to be complete.
        """
        raise NotImplementedError

    def abort(
        self, owner: Owner, choice: int | None, reason: int, kept_tokens: int | None, now: float
    ) -> list[Event]:
        """Ends a request or one choice of it; whoever is unknown or has ended is passed over."""
        raise NotImplementedError

    def abort_gateway(self, gateway: int, now: float) -> None:
        """Ends every request of a gateway that is gone; nobody is left to be told."""
        raise NotImplementedError

    def expire(self, now: float) -> list[Event]:
        """Ends the requests whose deadline passed before they ran. To be called before `schedule`."""
        raise NotImplementedError

    def schedule(self, now: float) -> StepPlan | None:
        """The next step; None when nothing can run or as many steps are in flight as may be.

        After None with nothing in flight only a new submit can change that.
        """
        raise NotImplementedError

    def apply(self, outcome: StepOutcome, now: float) -> list[Event]:
        """Takes a step's outcome, in the order of the plans; one of an unknown step changes nothing."""
        raise NotImplementedError

    def worker_lost(self, now: float) -> None:
        """Forgets all steps in flight and all KV; everything that ran waits to be sent as new."""
        raise NotImplementedError

    def reset_prefix_cache(self, preempt: bool, now: float) -> int:
        """Forgets cached prefixes; the count of blocks that left the index."""
        raise NotImplementedError

    @property
    def steps_in_flight(self) -> int:
        """Plans whose outcome has not been applied."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """A request is waiting or running."""
        raise NotImplementedError

    def load(self) -> Load:
        """How busy the core is."""
        raise NotImplementedError

    def explain(self, token: bytes) -> Explanation | None:
        """Where the request with this token is, and why; None when it is unknown."""
        raise NotImplementedError

    def live_handles(self, gateway: int) -> list[int]:
        """Handles of a gateway's requests that have not ended."""
        raise NotImplementedError
