"""A worker that computes nothing: it says how long a step takes, and what would have come of it.

engine   plan n ──hop──▶                    plan n+1 waits here ▶
worker                  [ step n: start … end ][ step n+1 …
engine                                   ◀──hop── outcome n
"""

from __future__ import annotations

from array import array
from collections import deque
from typing import NamedTuple

from services.cli.simulate.workload import Costs
from services.engine.plan import ROW_OK, SAMPLES, STEP_OK, StepOutcome, StepPlan

_FIRST_OUTPUT = 1 << 29
"""Output ids are unlike those of prompts, and no two of a request are the same."""


class Work(NamedTuple):
    """What is in a step."""

    prefill_tokens: int
    decode_rows: int
    draft_tokens: int
    embeddings: int
    decodes: bytearray  # per row of the plan: 1 where it decodes


class Running(NamedTuple):
    """A step on the worker."""

    plan: StepPlan
    start_ns: int
    end_ns: int
    told_ns: int  # the engine knows the outcome


def work_of(plan: StepPlan, prompt_lens: list[int]) -> Work:
    """`prompt_lens` has the length of the prompt of each row number.

    A row that makes its next output from the one before it decodes; everything else is prefill, what
    is computed again after a preemption too.
    """
    decode_rows = decode_tokens = 0
    drafts = plan.draft_counts or bytes(len(plan.rows))
    decodes = bytearray(len(plan.rows))
    columns = zip(plan.rows, plan.num_tokens, plan.num_computed, plan.flags, drafts, strict=True)
    for at, (row, tokens, computed, flags, draft) in enumerate(columns):
        if tokens == 1 + draft and flags & SAMPLES and computed >= prompt_lens[row]:
            decodes[at] = 1
            decode_rows += 1
            decode_tokens += tokens
    embeddings = sum([item.embeddings for item in plan.encode]) if plan.encode else 0
    return Work(plan.total_tokens - decode_tokens, decode_rows, decode_tokens - decode_rows, embeddings, decodes)


class VirtualWorker:
    """Runs steps one after another."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._steps: deque[Running] = deque()
        self._free_ns = 0

    def execute(self, plan: StepPlan, work: Work, now_ns: int) -> Running:
        """Takes a step that the engine sends now."""
        costs = self._costs
        hop_ns = round(costs.hop_us * 1e3)
        tokens = work.prefill_tokens + work.draft_tokens  # a draft costs what any further position of a row does
        took_ns = round(
            costs.step_ms * 1e6
            + costs.prefill_us_per_token * 1e3 * tokens
            + costs.decode_us_per_row * 1e3 * work.decode_rows
            + costs.encoder_us_per_embedding * 1e3 * work.embeddings
        )
        start_ns = max(now_ns + hop_ns, self._free_ns)
        self._free_ns = start_ns + took_ns
        step = Running(plan, start_ns, self._free_ns, self._free_ns + hop_ns)
        self._steps.append(step)
        return step

    @property
    def next_ns(self) -> int | None:
        """When the engine hears of the oldest step; None when there is none."""
        return self._steps[0].told_ns if self._steps else None

    def take(self, now_ns: int) -> StepOutcome | None:
        """The oldest step's outcome, once it is there."""
        if not self._steps or self._steps[0].told_ns > now_ns:
            return None
        return outcome_of(self._steps.popleft().plan)


def outcome_of(plan: StepPlan) -> StepOutcome:
    """Every row that samples gets one token; drafts are all rejected."""
    at = [index for index, flags in enumerate(plan.flags) if flags & SAMPLES]
    ends = plan.num_computed
    return StepOutcome(
        step_id=plan.step_id,
        status=STEP_OK,
        failure=None,
        rows=array("i", [plan.rows[index] for index in at]),
        epochs=array("Q", [plan.epochs[index] for index in at]),
        row_status=bytes([ROW_OK]) * len(at),
        token_counts=array("i", [1]) * len(at),
        token_ids=array("i", [_FIRST_OUTPUT + ends[index] for index in at]),
    )
