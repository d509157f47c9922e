"""What came of each accepted request, with a cursor per choice for its gateway:

0       base                 sent                len
├─────────┼────────────────────┼───────────────────┤   output tokens of one choice
 gateway    told on this stream   to be told next
 has them
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from services.engine.events import FINISH_NONE, LogprobColumns, PromptLogprobs, Started, StepFailure, Tokens
from services.engine.request import RequestSpec


def empty_logprobs() -> LogprobColumns:
    """Columns with nothing in them yet."""
    return LogprobColumns(array("i"), array("i"), array("f"), array("i"))


@dataclass(slots=True, eq=False)
class Choice:
    """What one choice has produced. Indexes count its output tokens."""

    record: Record
    handle: int
    index: int
    base: int
    tokens: array[int]  # from base on
    logprobs: LogprobColumns | None  # one position per token
    sent: int = 0
    sent_entries: int = 0
    finish: int = FINISH_NONE
    failure: StepFailure | None = None
    vector: array[float] | None = None  # what it ended with, where it was asked for instead of tokens
    told: bool = False  # its terminal event has been handed to a stream
    kept: int | None = None  # output tokens that the client keeps, where the text ended before the ids

    def add(self, event: Tokens) -> None:
        """Takes new tokens, and the end if they come with it."""
        self.tokens.extend(event.token_ids)
        self.finish = event.finish
        if self.logprobs is not None:
            self._add_logprobs(self.logprobs, event)

    def _add_logprobs(self, own: LogprobColumns, event: Tokens) -> None:
        if event.logprobs is None:
            own.counts.extend([0] * len(event.token_ids))
            return
        own.counts.extend(event.logprobs.counts)
        own.token_ids.extend(event.logprobs.token_ids)
        own.logprobs.extend(event.logprobs.logprobs)
        own.ranks.extend(event.logprobs.ranks)

    def rewind(self) -> None:
        """Everything from base on is to be told again, the end included."""
        self.sent = self.sent_entries = 0
        self.told = False

    def acknowledge(self, tokens: int) -> None:
        """The gateway has this many; they are never told again."""
        known = min(tokens, self.base + self.sent) - self.base
        if known <= 0:
            return
        if self.logprobs is not None:
            entries = sum(self.logprobs.counts[:known])
            self.logprobs = LogprobColumns(
                self.logprobs.counts[known:],
                self.logprobs.token_ids[entries:],
                self.logprobs.logprobs[entries:],
                self.logprobs.ranks[entries:],
            )
            self.sent_entries -= entries
        del self.tokens[:known]
        self.base, self.sent = self.base + known, self.sent - known


@dataclass(slots=True, eq=False)
class Record:
    """One accepted request: what was asked, what came of it, and when."""

    spec: RequestSpec
    accepted_at: float
    choices: list[Choice] = field(default_factory=list)
    started: Started | None = None
    started_at: float | None = None
    first_token_at: float | None = None
    last_token_at: float | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Every choice has its terminal event."""
        return all(choice.finish != FINISH_NONE for choice in self.choices)

    @property
    def prefill_s(self) -> float | None:
        """From the first step to the first token."""
        if self.started_at is None or self.first_token_at is None:
            return None
        return self.first_token_at - self.started_at

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last."""
        if self.first_token_at is None or self.last_token_at is None:
            return None
        return self.last_token_at - self.first_token_at

    def stamp_token(self, now: float) -> None:
        """A token came."""
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now

    @property
    def output_tokens(self) -> int:
        """Over all choices, those of a replay included, without what the text left behind."""
        return sum(choice.base + len(choice.tokens) if choice.kept is None else choice.kept for choice in self.choices)


def record_of(spec: RequestSpec, now: float) -> Record:
    """The record of a request that was just accepted; what a replay brought is told already."""
    record = Record(spec, now)
    for index in range(spec.n):
        replay = spec.replay[index] if spec.replay else None
        choice = Choice(
            record,
            spec.owner.handle,
            index,
            base=len(replay.token_ids) if replay else 0,
            tokens=array("i"),
            logprobs=None if spec.logprobs is None else empty_logprobs(),
        )
        if replay is not None and replay.finish != FINISH_NONE:
            choice.finish, choice.told = replay.finish, True
        record.choices.append(choice)
    return record
