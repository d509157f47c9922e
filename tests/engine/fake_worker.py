"""A worker without a model: it keeps rows and a paged KV, and checks every step against what must be there.

A slot of the KV holds a hash of all tokens up to its position. So a wrong block table, a position that
was never written, and a write into a block that another row reads are all seen. The next token is a
function of everything before it and of the seed, so every output has one right value.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from services.engine.events import LogprobColumns, StepFailure
from services.engine.plan import (
    MASKED,
    POOLS,
    PROMPT_LOGPROBS,
    ROW_DROPPED,
    ROW_FAILED,
    ROW_OK,
    SAMPLES,
    STEP_FAILED,
    STEP_OK,
    STEP_SKIPPED,
    NewRow,
    PromptLogprobsChunk,
    StepMasks,
    StepOutcome,
    StepPlan,
)
from services.engine.request import Request

VOCABULARY = 50
MASK_BYTES = -(-VOCABULARY // 32) * 4
LOGPROBS = b"logprobs"
"""What `sampling` says where a row is to give log probabilities."""


def entries(plan: StepPlan) -> list[tuple[Request, int, int, bool]]:
    """Row by row: who, its epoch, the position after the last token computed, and whether it samples."""
    columns = zip(plan.requests, plan.epochs, plan.num_computed, plan.num_tokens, plan.flags, strict=True)
    return [(request, epoch, first + count, bool(flags & SAMPLES)) for request, epoch, first, count, flags in columns]


def chain(before: int, token: int) -> int:
    """The name of a prefix that is one token longer."""
    return hash((before, token))


def next_token(prefix: int, seed: int) -> int:
    """What this worker samples after a prefix."""
    return hash((prefix, seed, 7)) % VOCABULARY


PERIOD = 3
Mask = frozenset[int]
"""Tokens that a grammar allows."""


def next_of_refrain(prefix: int, seed: int, length: int) -> int:
    """The same for a worker that says the same few tokens again and again, with a slip now and then."""
    return next_token(prefix, seed) if hash((prefix, seed, 11)) % 7 == 0 else length % PERIOD


def choose(prefix: int, seed: int, length: int, refrain: bool, allowed: Mask | None) -> int:
    """What is sampled after a prefix of so many tokens: the wish, or the next token after it that is allowed."""
    wish = next_of_refrain(prefix, seed, length) if refrain else next_token(prefix, seed)
    while allowed is not None and wish not in allowed:
        wish = (wish + 1) % VOCABULARY
    return wish


def undisturbed(
    prompt: Sequence[int],
    seed: int,
    max_tokens: int,
    ends: frozenset[int] = frozenset(),
    min_tokens: int = 0,
    refrain: bool = False,
    allowed: Callable[[list[int]], Mask | None] = lambda _: None,
) -> list[int]:
    """What a request that runs alone gives. `allowed` says what may come after some outputs."""
    prefix = 0
    for token in prompt:
        prefix = chain(prefix, token)
    outputs: list[int] = []
    while len(outputs) < max_tokens:
        length = len(prompt) + len(outputs)
        outputs.append(choose(prefix, seed, length, refrain, allowed(outputs)))
        prefix = chain(prefix, outputs[-1])
        if outputs[-1] in ends and len(outputs) > min_tokens:
            break
    return outputs


def _unpack(plan: StepPlan, masks: StepMasks | None) -> tuple[set[int], dict[int, list[Mask]]]:
    """Rows to be dropped, and the masks of the others."""
    waiting = [row for row, flag in zip(plan.rows, plan.flags, strict=True) if flag & MASKED]
    if masks is None:
        assert not waiting, "a step ran without its masks"
        return set(), {}
    assert masks.step_id == plan.step_id
    assert list(masks.rows) == waiting, "masks are in the order of the rows"
    dropped: set[int] = set()
    allowed: dict[int, list[Mask]] = {}
    drafts = dict(zip(plan.rows, plan.draft_counts or [0] * len(plan.rows), strict=True))
    at = 0
    for row, drop in zip(masks.rows, masks.drop, strict=True):
        if drop:
            dropped.add(row)
            continue
        allowed[row] = []
        for _ in range(1 + drafts[row]):
            bits = int.from_bytes(masks.masks[at : at + MASK_BYTES], "little")
            allowed[row].append(frozenset(token for token in range(VOCABULARY) if bits >> token & 1))
            at += MASK_BYTES
    assert at == len(masks.masks)
    return dropped, allowed


def vector_of(pooling: str, prefixes: Sequence[int]) -> array[float]:
    """What a request that pools gets, of the prefixes that it computed: all of them, or the last."""
    pooled = prefixes if pooling == "mean" else prefixes[-1:]
    return array("f", [hash((pooling, prefix)) % 1000 for prefix in pooled])


def undisturbed_vector(prompt: Sequence[int], pooling: str) -> array[float]:
    """What a request that runs alone gets."""
    return vector_of(pooling, list(accumulate(prompt, chain, initial=0))[1:])


def no_logprobs() -> LogprobColumns:
    """Columns with nothing in them."""
    return LogprobColumns(array("i"), array("i"), array("f"), array("i"))


@dataclass
class Row:
    """A request on a row, as the worker knows it."""

    new: NewRow
    tokens: list[int]
    prefixes: list[int] = field(default_factory=list)  # by position: the hash of the tokens up to it
    blocks: list[list[int]] = field(default_factory=list)  # per KV group
    computed: int | None = None
    spoiled: bool = False  # gave no token, so that what follows has nothing to go on
    seen: list[int] = field(default_factory=list)  # prefixes computed on this row, for the mean

    def forget(self, length: int) -> None:
        """Nothing from there on is known."""
        del self.tokens[length:], self.prefixes[length:]

    def live_blocks(self, group: int, window: int | None, block_size: int) -> list[int]:
        """Blocks that later tokens read; the engine may have given the others to somebody else."""
        oldest = 0 if window is None else max(0, (self.computed or 0) - window + 1)
        return self.blocks[group][oldest // block_size :]

    def prefix(self, position: int) -> int:
        while len(self.prefixes) <= position:
            at = len(self.prefixes)
            self.prefixes.append(chain(self.prefixes[-1] if at else 0, self.tokens[at]))
        return self.prefixes[position]


class FakeWorker:
    """Executes plans in their order. `fails` says whether a plan fails; `statuses` may spoil rows by request id."""

    def __init__(
        self, block_size: int, num_blocks: int, refrain: bool = False, windows: Sequence[int | None] = (None,)
    ) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.windows = windows  # per KV group
        self.refrain = refrain
        self.rows: dict[int, Row] = {}
        self.kv: dict[int, tuple[int, int]] = {}  # by slot: the KV group, and the hash of all tokens up to it
        self.fails: Callable[[list[str]], bool] = lambda _: False
        self.statuses: dict[str, int] = {}
        self.mute: set[str] = set()  # request ids that get no vector
        self.epochs: set[int] = set()
        self.last_step = 0
        self.broken = False
        self.encoded: dict[bytes, int] = {}  # embeddings by hash of the item
        self.encoded_per_step: list[int] = []
        self.flagged: list[tuple[str, int]] = []  # request id and position whose prompt log probability was asked

    def lose(self) -> None:
        """Dies; the one that takes its place knows nothing."""
        self.rows.clear()
        self.kv.clear()
        self.encoded.clear()
        self.broken = False

    def execute(self, plan: StepPlan, masks: StepMasks | None = None) -> StepOutcome:
        """Runs a step; with rows that are flagged for it, not before its masks are there."""
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
            self.rows[new.row] = Row(new, list(new.tokens), blocks=[[] for _ in self.windows])
        if self.fails([self.rows[row].new.request_id for row in plan.rows]):
            self.broken = True
            return self._failed(plan, STEP_FAILED)
        self._encode(plan)
        return self._compute(plan, masks)

    def _encode(self, plan: StepPlan) -> None:
        for name in plan.dropped_media:
            self.encoded.pop(name, None)
        for item in plan.encode:
            assert item.hash not in self.encoded, "encoded twice"
            self.encoded[item.hash] = item.embeddings
        self.encoded_per_step.append(sum(item.embeddings for item in plan.encode))

    def _check_shape(self, plan: StepPlan) -> None:
        rows = len(plan.rows)
        assert rows > 0
        assert len(set(plan.rows)) == rows
        columns = (plan.num_tokens, plan.num_computed, plan.flags, plan.first_writable, entries(plan))
        assert {len(column) for column in columns} == {rows}
        assert plan.kv_groups == len(self.windows)
        assert len(plan.block_counts) == rows * plan.kv_groups
        assert sum(plan.block_counts) == len(plan.block_ids)
        assert min(plan.num_tokens) >= 1

    def _failed(self, plan: StepPlan, status: int) -> StepOutcome:
        empty = array("i")
        return StepOutcome(plan.step_id, status, StepFailure(13, "broken", "id"), empty, array("Q"), b"", empty, empty)

    def _compute(self, plan: StepPlan, masks: StepMasks | None) -> StepOutcome:
        dropped, allowed = _unpack(plan, masks)
        rows, epochs, counts, ids, statuses = array("i"), array("Q"), array("i"), array("i"), bytearray()
        logprobs, chunks, pooled = no_logprobs(), [], {}
        block_at = draft_at = 0
        for at, number in enumerate(plan.rows):
            row = self.rows[number]
            for group in range(plan.kv_groups):
                count = plan.block_counts[at * plan.kv_groups + group]
                row.blocks[group] += plan.block_ids[block_at : block_at + count]
                block_at += count
            start, end = plan.num_computed[at], plan.num_computed[at] + plan.num_tokens[at]
            assert row.computed in {None, start}, "computed tokens do not follow on"
            row.computed = end
            draft = plan.draft_ids[draft_at : draft_at + plan.draft_counts[at]] if plan.draft_counts else array("i")
            draft_at += len(draft)
            if row.spoiled:
                rows.append(number)
                epochs.append(row.new.epoch)
                statuses.append(ROW_FAILED)
                counts.append(0)
                continue
            row.tokens += draft
            self._read_and_write(row, start, end, plan.first_writable[at])
            row.seen += [row.prefix(position) for position in range(start, end)]
            row.forget(len(row.tokens) - len(draft))
            for item in row.new.media:
                if item.offset < end and start < item.offset + item.length:
                    assert item.hash in self.encoded, "the embeddings of a position are not there"
            if plan.flags[at] & PROMPT_LOGPROBS:
                chunks.append(self._prompt_logprobs(row, start, end))
            if plan.flags[at] & POOLS:
                self._pool(row, end, plan.flags[at])
                rows.append(number)
                epochs.append(row.new.epoch)
                counts.append(0)
                statuses.append(self.statuses.get(row.new.request_id, ROW_OK))
                if row.new.request_id not in self.mute:
                    pooled[row.new.epoch] = vector_of(row.new.pooling or "", row.seen)
                continue
            if not plan.flags[at] & SAMPLES:
                assert end < len(row.tokens)
                assert not draft
                continue
            assert end == len(row.tokens) + len(draft), "sampled before the last token"
            status = self.statuses.get(row.new.request_id, ROW_OK)
            if plan.flags[at] & MASKED and number in dropped:
                status = ROW_DROPPED
            rows.append(number)
            epochs.append(row.new.epoch)
            statuses.append(status)
            row.spoiled = status != ROW_OK
            given = [] if row.spoiled else self._sample(row, draft, allowed.get(number, []))
            counts.append(len(given))
            row.computed = end - len(draft) + max(len(given), 1) - 1
            for token in given:
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
            pooled,
        )

    def _pool(self, row: Row, end: int, flags: int) -> None:
        assert flags == POOLS, "a row that pools does nothing else"
        assert end == len(row.tokens) == row.new.prompt_len
        if row.new.pooling == "mean":
            assert len(row.seen) == end, "a mean over less than the prompt"

    def _sample(self, row: Row, draft: Sequence[int], masks: Sequence[Mask]) -> list[int]:
        """Tokens as long as they agree with the draft, and the first that does not or that is behind it."""
        given: list[int] = []
        tokens = row.tokens
        prefix = row.prefix(len(tokens) - 1)
        assert len(masks) in {0, 1 + len(draft)}, "a row with drafts has a mask per position"
        for at in range(1 + len(draft)):
            allowed = masks[at] if masks else None
            given.append(choose(prefix, row.new.seed, len(tokens) + at, self.refrain, allowed))
            prefix = chain(prefix, given[-1])
            if at < len(draft) and given[-1] != draft[at]:
                break
        return given

    def _read_and_write(self, row: Row, start: int, end: int, first_writable: int) -> None:
        """Writes the new positions and reads what attention reads: of a sliding window nothing older."""
        size = self.block_size
        row.computed = start
        live = [row.live_blocks(group, window, size) for group, window in enumerate(self.windows)]
        assert len({block for blocks in live for block in blocks}) == sum(map(len, live)), "a block has two uses"
        others = {
            block
            for other in self.rows.values()
            if other is not row
            for group, window in enumerate(self.windows)
            for block in other.live_blocks(group, window, size)
        }
        for group, window in enumerate(self.windows):
            blocks = row.blocks[group]
            assert all(0 <= block < self.num_blocks for block in blocks)
            assert len(blocks) * size >= end, "a position without a block"
            for position in range(0 if window is None else max(0, start - window + 1), end):
                block = blocks[position // size]
                slot, there = block * size + position % size, (group, row.prefix(position))
                if position >= max(start, first_writable):
                    assert block not in others, "a write into a block that another row holds"
                    self.kv[slot] = there
                else:
                    assert self.kv.get(slot) == there, "the KV of a position is not there"
        row.computed = end

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
