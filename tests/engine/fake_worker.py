"""A worker without a model: it keeps rows and a paged KV, and checks every step against what must be there.

A slot of the KV holds a hash of all tokens up to its position. So a wrong block table, a position that
was never written, and a write into a block that another row reads are all seen. The next token is a
function of everything before it and of the seed, so every output has one right value.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.engine.events import LogprobColumns, StepFailure
from services.engine.plan import (
    PROMPT_LOGPROBS,
    ROW_FAILED,
    ROW_OK,
    SAMPLES,
    STEP_FAILED,
    STEP_OK,
    STEP_SKIPPED,
    NewRow,
    PromptLogprobsChunk,
    StepOutcome,
    StepPlan,
)

VOCABULARY = 50
LOGPROBS = b"logprobs"
"""What `sampling` says where a row is to give log probabilities."""


def chain(before: int, token: int) -> int:
    """The name of a prefix that is one token longer."""
    return hash((before, token))


def next_token(prefix: int, seed: int) -> int:
    """What this worker samples after a prefix."""
    return hash((prefix, seed, 7)) % VOCABULARY


def undisturbed(
    prompt: Sequence[int], seed: int, max_tokens: int, ends: frozenset[int] = frozenset(), min_tokens: int = 0
) -> list[int]:
    """What a request that runs alone gives."""
    prefix = 0
    for token in prompt:
        prefix = chain(prefix, token)
    outputs: list[int] = []
    while len(outputs) < max_tokens:
        outputs.append(next_token(prefix, seed))
        prefix = chain(prefix, outputs[-1])
        if outputs[-1] in ends and len(outputs) > min_tokens:
            break
    return outputs


def no_logprobs() -> LogprobColumns:
    """Columns with nothing in them."""
    return LogprobColumns(array("i"), array("i"), array("f"), array("i"))


@dataclass
class Row:
    """A request on a row, as the worker knows it."""

    new: NewRow
    tokens: list[int]
    prefixes: list[int] = field(default_factory=list)  # by position: the hash of the tokens up to it
    blocks: list[int] = field(default_factory=list)
    computed: int | None = None
    spoiled: bool = False  # gave no token, so that what follows has nothing to go on

    def prefix(self, position: int) -> int:
        while len(self.prefixes) <= position:
            at = len(self.prefixes)
            self.prefixes.append(chain(self.prefixes[-1] if at else 0, self.tokens[at]))
        return self.prefixes[position]


class FakeWorker:
    """Executes plans in their order. `fails` says whether a plan fails; `statuses` may spoil rows by request id."""

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.rows: dict[int, Row] = {}
        self.kv: dict[int, int] = {}
        self.fails: Callable[[list[str]], bool] = lambda _: False
        self.statuses: dict[str, int] = {}
        self.epochs: set[int] = set()
        self.last_step = 0
        self.broken = False
        self.flagged: list[tuple[str, int]] = []  # request id and position whose prompt log probability was asked

    def lose(self) -> None:
        """Dies; the one that takes its place knows nothing."""
        self.rows.clear()
        self.kv.clear()
        self.broken = False

    def execute(self, plan: StepPlan) -> StepOutcome:
        assert plan.step_id > self.last_step
        self.last_step = plan.step_id
        self._check_shape(plan)
        if self.broken and not plan.resync:
            return self._failed(plan, STEP_SKIPPED)
        self.broken = False
        for row in plan.freed_rows:
            self.rows.pop(row, None)
        for new in plan.new_rows:
            assert new.row not in self.rows, "a row was given twice"
            assert new.epoch not in self.epochs, "an epoch came back"
            self.epochs.add(new.epoch)
            self.rows[new.row] = Row(new, list(new.tokens))
        if self.fails([self.rows[row].new.request_id for row in plan.rows]):
            self.broken = True
            return self._failed(plan, STEP_FAILED)
        return self._compute(plan)

    def _check_shape(self, plan: StepPlan) -> None:
        rows = len(plan.rows)
        assert rows > 0
        assert len(set(plan.rows)) == rows
        columns = (plan.num_tokens, plan.num_computed, plan.flags, plan.first_writable, plan.block_counts, plan.entries)
        assert {len(column) for column in columns} == {rows}
        assert sum(plan.block_counts) == len(plan.block_ids)
        assert min(plan.num_tokens) >= 1

    def _failed(self, plan: StepPlan, status: int) -> StepOutcome:
        empty = array("i")
        return StepOutcome(plan.step_id, status, StepFailure(13, "broken", "id"), empty, array("Q"), b"", empty, empty)

    def _compute(self, plan: StepPlan) -> StepOutcome:
        rows, epochs, counts, ids, statuses = array("i"), array("Q"), array("i"), array("i"), bytearray()
        logprobs, chunks = no_logprobs(), []
        block_at = 0
        for at, number in enumerate(plan.rows):
            row = self.rows[number]
            row.blocks += plan.block_ids[block_at : block_at + plan.block_counts[at]]
            block_at += plan.block_counts[at]
            start, end = plan.num_computed[at], plan.num_computed[at] + plan.num_tokens[at]
            assert row.computed in {None, start}, "computed tokens do not follow on"
            row.computed = end
            if row.spoiled:
                rows.append(number)
                epochs.append(row.new.epoch)
                statuses.append(ROW_FAILED)
                counts.append(0)
                continue
            self._read_and_write(row, start, end, plan.first_writable[at])
            if plan.flags[at] & PROMPT_LOGPROBS:
                chunks.append(self._prompt_logprobs(row, start, end))
            if not plan.flags[at] & SAMPLES:
                assert end < len(row.tokens)
                continue
            assert end == len(row.tokens), "sampled before the last token"
            status = self.statuses.get(row.new.request_id, ROW_OK)
            rows.append(number)
            epochs.append(row.new.epoch)
            statuses.append(status)
            counts.append(1 if status == ROW_OK else 0)
            row.spoiled = status != ROW_OK
            if status == ROW_OK:
                token = next_token(row.prefix(end - 1), row.new.seed)
                row.tokens.append(token)
                ids.append(token)
                self._add_logprobs(logprobs, row, token)
        return StepOutcome(
            plan.step_id,
            STEP_OK,
            None,
            rows,
            epochs,
            bytes(statuses),
            counts,
            ids,
            logprobs if logprobs.token_ids else None,
            tuple(chunks),
        )

    def _read_and_write(self, row: Row, start: int, end: int, first_writable: int) -> None:
        size = self.block_size
        others = {block for other in self.rows.values() if other is not row for block in other.blocks}
        assert all(0 <= block < self.num_blocks for block in row.blocks)
        assert len(row.blocks) * size >= end, "a position without a block"
        for position in range(end):
            block = row.blocks[position // size]
            slot = block * size + position % size
            if position >= max(start, first_writable):
                assert block not in others, "a write into a block that another row holds"
                self.kv[slot] = row.prefix(position)
            else:
                assert self.kv.get(slot) == row.prefix(position), "the KV of a position is not there"

    def _prompt_logprobs(self, row: Row, start: int, end: int) -> PromptLogprobsChunk:
        columns = no_logprobs()
        first = 0 if start == 0 else start + 1
        for position in range(first, min(end + 1, row.new.prompt_len)):
            columns.counts.append(1 if position else 0)
            self.flagged.append((row.new.request_id, position))
            if position:
                columns.token_ids.append(row.tokens[position])
                columns.logprobs.append(-float(position))
                columns.ranks.append(1)
        return PromptLogprobsChunk(row.new.row, row.new.epoch, first, columns)

    def _add_logprobs(self, columns: LogprobColumns, row: Row, token: int) -> None:
        asked = row.new.sampling == LOGPROBS
        columns.counts.append(2 if asked else 0)
        if asked:
            columns.token_ids.extend((token, token + 1))
            columns.logprobs.extend((-float(len(row.tokens)), -99.0))
            columns.ranks.extend((1, 2))
