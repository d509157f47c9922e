"""What one step is, on its way to the workers, and what comes back. Plain columns, no protobuf.

StepPlan ── wire ──▶ worker ── wire ──▶ StepOutcome
   └── requests, epochs: what apply() needs to know again when the outcome is there
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.engine.events import LogprobColumns, StepFailure
from services.engine.request import MediaItem, Request

SAMPLES, PROMPT_LOGPROBS, POOLS, MASKED = 1, 2, 4, 8
"""Bits of StepPlan.flags."""


@dataclass(slots=True, frozen=True)
class NewRow:
    """A request put on a row; a resumed one comes with all its ids."""

    row: int
    epoch: int
    tokens: array[int]  # 'i': prompt, then outputs so far
    prompt_len: int
    sampling: bytes  # serialized SamplingParams, as the gateway sent it
    seed: int  # of this choice
    request_id: str
    traceparent: str | None
    media: tuple[MediaItem, ...] = ()
    pooling: str | None = None


def _column() -> array[int]:
    return array("i")


@dataclass(slots=True)
class StepPlan:
    """The columns of the contract's Step; one element per row that computes unless said otherwise."""

    step_id: int
    resync: bool = False
    kv_groups: int = 1
    freed_rows: array[int] = field(default_factory=_column)
    new_rows: list[NewRow] = field(default_factory=list)
    rows: array[int] = field(default_factory=_column)
    num_tokens: array[int] = field(default_factory=_column)
    num_computed: array[int] = field(default_factory=_column)
    flags: bytearray = field(default_factory=bytearray)
    first_writable: array[int] = field(default_factory=_column)  # KV of positions below it is not written
    block_counts: array[int] = field(default_factory=_column)  # per row and KV group
    block_ids: array[int] = field(default_factory=_column)
    draft_counts: array[int] = field(default_factory=_column)  # per row; empty where no row has any
    draft_ids: array[int] = field(default_factory=_column)
    encode: list[MediaItem] = field(default_factory=list)  # items whose embeddings this step's rows read first
    dropped_media: list[bytes] = field(default_factory=list)  # hashes of encoder outputs to forget
    requests: list[Request] = field(default_factory=list)  # for the engine alone: who computes,
    epochs: list[int] = field(default_factory=list)  # and on which epoch; lists, as nothing is made to add to them
    masked: list[int] = field(default_factory=list)  # places of the rows whose masks have yet to be made

    @property
    def total_tokens(self) -> int:
        """Tokens computed by the step."""
        return sum(self.num_tokens)

    @property
    def empty(self) -> bool:
        """Nothing computes."""
        return not self.rows

    @property
    def live(self) -> list[Request]:
        """Those that are still where they were when this was planned."""
        return [who for who, epoch in zip(self.requests, self.epochs, strict=True) if who.epoch == epoch]


@dataclass(slots=True, frozen=True)
class StepMasks:
    """The grammar masks of a step that has been sent: StepMasks of the contract."""

    step_id: int
    rows: array[int]
    drop: bytes  # per row: 1 where its result is to be dropped
    masks: bytes  # whole masks one after another; a row with drafts has one per position that it samples


@dataclass(slots=True, frozen=True)
class PromptLogprobsChunk:
    """Log probabilities of prompt positions from first_position on."""

    row: int
    epoch: int
    first_position: int
    columns: LogprobColumns


ROW_OK, ROW_NOT_FINITE, ROW_DROPPED, ROW_FAILED, ROW_NO_TOKEN = 0, 1, 2, 3, 4
"""Values of StepOutcome.row_status."""
STEP_OK, STEP_FAILED, STEP_SKIPPED = 1, 2, 3
"""Values of StepOutcome.status."""


@dataclass(slots=True, frozen=True)
class StepOutcome:
    """What a worker answered to a step; one element per row that sampled, pooled or failed."""

    step_id: int
    status: int
    failure: StepFailure | None
    rows: array[int]
    epochs: array[int]  # 'Q'
    row_status: bytes
    token_counts: array[int]
    token_ids: array[int]
    logprobs: LogprobColumns | None = None  # one position per token
    prompt_logprobs: tuple[PromptLogprobsChunk, ...] = ()
    pooled: Mapping[int, array[float]] = field(default_factory=dict)  # vectors by epoch
    missing_media: tuple[bytes, ...] = ()  # hashes of items that there was nothing to encode from
    duration_us: int = 0
