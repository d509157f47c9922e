"""What each gateway has been told, and what it has yet to be told. A session is one gateway process.

A stream that lags just finds more between the cursors of its records: steps merge by themselves,
and memory is bounded by the requests' own lengths. A gateway that attaches again is told all that
is live from `base` on, and drops by first_index what it had.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from services.common.errors import InvalidArgument, TriptychError
from services.engine.events import (
    FINISH_EOS,
    FINISH_ERROR,
    FINISH_NONE,
    Event,
    Failed,
    LogprobColumns,
    Owner,
    Pooled,
    PromptLogprobs,
    Started,
    Tokens,
)
from services.engine.records import Choice, Record, empty_logprobs

_MOST_ENTRIES = 21  # log probability entries of one token: itself and the 20 likeliest
FRAME_TOKENS = 32_768
"""Tokens and log probability entries in one frame, about: a frame stays far below 1 MiB."""


@dataclass(slots=True)
class Rows:
    """The columns of StepOutputs; one element per choice that has something to tell."""

    handles: array[int] = field(default_factory=lambda: array("I"))
    choices: array[int] = field(default_factory=lambda: array("I"))
    first_indexes: array[int] = field(default_factory=lambda: array("I"))
    token_counts: array[int] = field(default_factory=lambda: array("I"))
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    finishes: bytearray = field(default_factory=bytearray)
    logprobs: LogprobColumns | None = None

    def take(self, choice: Choice, room: int) -> int:
        """Moves up to `room` unsent tokens of the choice here, and its end if they were the last.

        Returns the room taken, log probability entries included.
        """
        tokens, start = choice.tokens, choice.sent
        if choice.logprobs is not None:
            room = max(1, room // _MOST_ENTRIES)
        count = len(tokens) - start
        whole = count <= room
        if not whole:
            count = room
        taken = count
        if choice.logprobs is not None:
            taken += self._take_logprobs(choice, choice.logprobs, start, start + count)
        elif self.logprobs is not None:
            self.logprobs.counts.extend([0] * count)
        self.handles.append(choice.handle)
        self.choices.append(choice.index)
        self.first_indexes.append(choice.base + start)
        self.token_counts.append(count)
        if count == 1:
            self.token_ids.append(tokens[start])
        else:
            self.token_ids.extend(tokens[start : start + count])
        choice.sent = start + count
        ends = whole and choice.finish != FINISH_NONE and choice.failure is None
        self.finishes.append(choice.finish if ends else FINISH_NONE)
        choice.told = ends
        return taken

    def _take_logprobs(self, choice: Choice, source: LogprobColumns, start: int, stop: int) -> int:
        if self.logprobs is None:
            self.logprobs = empty_logprobs()
            self.logprobs.counts.extend([0] * len(self.token_ids))
        counts = source.counts[start:stop]
        first, last = choice.sent_entries, choice.sent_entries + sum(counts)
        self.logprobs.counts.extend(counts)
        self.logprobs.token_ids.extend(source.token_ids[first:last])
        self.logprobs.logprobs.extend(source.logprobs[first:last])
        self.logprobs.ranks.extend(source.ranks[first:last])
        choice.sent_entries = last
        return last - first


@dataclass(slots=True)
class Outgoing:
    """What one frame, and the few single ones behind it, will tell a gateway."""

    rows: Rows = field(default_factory=Rows)
    started: list[Started] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    pooled: list[Pooled] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    rejected: list[tuple[int, TriptychError]] = field(default_factory=list)
    draining: bool = False
    grace_s: float | None = None  # until live requests are ended, where draining does so

    @property
    def has_outputs(self) -> bool:
        """Whether there is anything for a StepOutputs."""
        return bool(self.rows.handles or self.started or self.prompt_logprobs or self.pooled)


class Session:
    """One gateway process: its live requests, and what its stream has yet to tell it."""

    def __init__(self, gateway: int, name: str, forgotten: Callable[[], None]) -> None:
        self._forgotten = forgotten  # called when a request has been told to its end
        self.gateway = gateway
        self.name = name
        self.records: dict[int, Record] = {}
        self.wake = asyncio.Event()
        self.blob_address = ""  # host:port where its media can be fetched; empty where it serves none
        self.stream = 0  # counts attachments; an older stream ends when it sees a newer number
        self.attached = False
        self.gone: asyncio.TimerHandle | None = None
        self._dirty: dict[Choice, None] = {}
        self._started: list[Started] = []
        self._prompt_logprobs: list[PromptLogprobs] = []
        self._rejected: list[tuple[int, TriptychError]] = []
        self._draining = False
        self._grace_s: float | None = None

    def attach(self) -> int:
        """A new stream for the gateway, which is told again all that is live."""
        self.stream += 1
        self.attached = True
        if self.gone is not None:
            self.gone.cancel()
            self.gone = None
        self._dirty.clear()
        self._rejected.clear()
        self._started = [record.started for record in self.records.values() if record.started]
        self._prompt_logprobs = [chunk for record in self.records.values() for chunk in record.prompt_logprobs]
        for record in self.records.values():
            for choice in record.choices:
                choice.rewind()
                if choice.tokens or choice.finish != FINISH_NONE:
                    self._dirty[choice] = None
        self.wake.set()
        return self.stream

    def detach(self, stream: int) -> bool:
        """The stream ended; True if it was the gateway's newest."""
        if stream == self.stream:
            self.attached = False
        return stream == self.stream

    def accept(self, record: Record) -> None:
        """A request that the core has accepted; one that a replay brought complete has nothing to tell."""
        if not all(choice.told for choice in record.choices):
            self.records[record.spec.owner.handle] = record

    def check_free(self, handle: int) -> None:
        """Refuses a handle that names a live request."""
        if handle in self.records:
            raise InvalidArgument(f"handle {handle} is in use on this stream", field="handle", reason="HANDLE_IN_USE")

    def reject(self, handle: int, error: TriptychError) -> None:
        """A request was refused; nothing of it is here."""
        self._rejected.append((handle, error))
        self.wake.set()

    def drain(self, grace_s: float | None) -> None:
        """The gateway is told that nothing new is taken, and when live requests are ended, if they are."""
        self._draining, self._grace_s = True, grace_s
        self.wake.set()

    def tell(self, event: Event, record: Record, now: float) -> Sequence[Choice]:
        """Notes an event of one of the session's requests for its stream; the choices that it ends."""
        self.wake.set()
        if isinstance(event, Tokens):
            choice = record.choices[event.choice]
            choice.add(event)
            self._dirty[choice] = None
            if event.token_ids:
                record.stamp_token(now)
            if event.finish != FINISH_NONE:
                return (choice,)
        elif isinstance(event, Started):
            record.started = event
            record.started_at = record.accepted_at + event.queue_s
            self._started.append(event)
        elif isinstance(event, PromptLogprobs):
            record.prompt_logprobs.append(event)
            self._prompt_logprobs.append(event)
        elif isinstance(event, Pooled):
            choice = record.choices[0]
            choice.vector, choice.finish = event.values, FINISH_EOS
            self._dirty[choice] = None
            record.stamp_token(now)
            return (choice,)
        else:
            return self._fail(event, record)
        return ()

    def _fail(self, event: Failed, record: Record) -> Sequence[Choice]:
        named = record.choices if event.choice is None else [record.choices[event.choice]]
        failed = [choice for choice in named if choice.finish == FINISH_NONE]
        for choice in failed:
            choice.finish, choice.failure = FINISH_ERROR, event.failure
            self._dirty[choice] = None
        return failed

    def take(self) -> Outgoing:
        """What to tell next. More may be left; then `wake` stays set."""
        out = Outgoing(
            started=self._started,
            prompt_logprobs=self._prompt_logprobs,
            rejected=self._rejected,
            draining=self._draining,
            grace_s=self._grace_s,
        )
        self._started, self._prompt_logprobs, self._rejected, self._draining = [], [], [], False
        rows, room = out.rows, FRAME_TOKENS
        dirty, self._dirty = self._dirty, {}
        for choice in dirty:
            if choice.vector is not None:
                room = self._take_vector(choice, choice.vector, out, room)
            elif room > 0 and (choice.failure is None or choice.sent < len(choice.tokens)):
                room -= rows.take(choice, room)
            if choice.sent < len(choice.tokens):
                self._dirty[choice] = None
            elif choice.failure is not None:
                choice.told = True
                out.failed.append(Failed(choice.record.spec.owner, choice.index, choice.failure))
            elif choice.finish != FINISH_NONE and not choice.told:
                self._dirty[choice] = None  # no room was left for a row without tokens
            if choice.told:
                self._forget_if_told(choice.record)
        if not self._dirty:
            self.wake.clear()
        return out

    def _take_vector(self, choice: Choice, vector: array[float], out: Outgoing, room: int) -> int:
        """Tells the vector if there is room in the frame; the room that is left."""
        if room <= 0:
            return room
        choice.told = True
        out.pooled.append(Pooled(choice.record.spec.owner, vector))
        return room - len(vector)

    def _forget_if_told(self, record: Record) -> None:
        if all(choice.told for choice in record.choices):
            self.records.pop(record.spec.owner.handle, None)
            self._forgotten()


class Sessions:
    """All gateways that have a stream or live requests."""

    def __init__(self) -> None:
        self._by_gateway: dict[int, Session] = {}
        self.idle = asyncio.Event()  # no request is live; looked at whenever one is forgotten
        self.look()

    def look(self) -> None:
        """Sets or clears `idle`."""
        if self.live:
            self.idle.clear()
        else:
            self.idle.set()

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._by_gateway.values()))

    @property
    def live(self) -> int:
        """Accepted requests whose end has not been handed to a stream yet."""
        return sum(len(session.records) for session in self._by_gateway.values())

    def unfinished(self) -> list[Record]:
        """Accepted requests without their terminal event."""
        return [
            record
            for session in self._by_gateway.values()
            for record in session.records.values()
            if not record.finished
        ]

    def open(self, gateway: int, name: str) -> Session:
        """The session of a gateway process, made if it is new."""
        if gateway not in self._by_gateway:
            self._by_gateway[gateway] = Session(gateway, name, self.look)
        return self._by_gateway[gateway]

    def close(self, session: Session) -> None:
        """Forgets a gateway and all that it has not been told."""
        if self._by_gateway.get(session.gateway) is session:
            del self._by_gateway[session.gateway]
            self.look()

    def find(self, owner: Owner) -> tuple[Session, Record] | None:
        """The request of an event, or None where nobody is left to be told."""
        session = self._by_gateway.get(owner.gateway)
        record = session.records.get(owner.handle) if session else None
        return (session, record) if session and record else None

    def by_token(self, token: bytes) -> Record | None:
        """The request of that token, whichever gateway has it."""
        for session in self._by_gateway.values():
            for record in session.records.values():
                if record.spec.token == token:
                    return record
        return None
