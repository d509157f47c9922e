"""One request between the router and its reader: what came in, and what has not been read.

    engine ──▶ ids of a choice: | delivered | pending | ◀── next tokens        finish: NONE until it ends
                                0        delivered   len(ids)

All ids stay, since a request is submitted again with them when its engine is lost. What a reader
has not fetched is merged into one event per choice, so the engine's stream never waits for anybody
and a slow reader holds no more than its own output.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections import deque
from collections.abc import Callable, Sequence

from services.common.errors import TriptychError
from services.gateway.request import (
    ChoiceTokens,
    EngineEvent,
    FinishReason,
    GenerateSpec,
    PooledVector,
    Position,
    PromptLogprobs,
    RequestStarted,
)

_NONE = FinishReason.NONE
AbortSender = Callable[["EngineRequest", FinishReason, int | None, int | None], None]
"""Tells the engine: (request, reason, the one choice or None for all, tokens that are kept)."""


_TOLD = 32
"""Readers that are told in one turn of the loop. With twice as many, 256 streams were all told before the router
had the next step: nothing was merged, and half as many tokens went through (measured: 22,000 instead of 35,000/s)."""


class Turns:
    """Who has news, first come first told. Between a few of them the loop does what else there is.

    So what comes meanwhile for those who wait is merged, just when there is more than can be told singly.
    """

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, tell: Callable[[], None]) -> None:
        """Calls `tell` soon, once."""
        self._waiting.append(tell)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        try:
            for _ in range(min(_TOLD, len(self._waiting))):
                self._waiting.popleft()()
        finally:
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._run)


class TokenGap(Exception):
    """Tokens are missing between what was received and what came now."""


Take = Callable[[Sequence[EngineEvent]], bool]
"""Takes events; tells whether it wants more."""


class _Choice:
    __slots__ = ("delivered", "finish", "ids", "logprobs")

    def __init__(self) -> None:
        self.ids: array[int] = array("i")
        self.delivered = 0
        self.finish = _NONE
        self.logprobs: list[Position] = []  # of the pending tokens

    def deliver(self, index: int) -> ChoiceTokens:
        """What is pending, as an event of choice `index`."""
        ids, first = self.ids, self.delivered
        self.delivered = end = len(ids)
        fresh = (ids[first],) if end == first + 1 else tuple(ids[first:])
        if not self.logprobs:
            return ChoiceTokens(index, first, fresh, self.finish)
        logprobs = tuple(self.logprobs)
        self.logprobs.clear()
        return ChoiceTokens(index, first, fresh, self.finish, logprobs)


class EngineRequest:
    """A submitted request. `receive` or `feed` gives its events until the last choice has ended."""

    __slots__ = (
        "_abort",
        "_choices",
        "_error",
        "_fed",
        "_loop",
        "_news",
        "_queued",
        "_ready",
        "_take",
        "_turns",
        "_waiter",
        "handle",
        "media_put_back",
        "seen_prompt",
        "spec",
        "submitted_at",
        "token",
        "unfinished",
    )  # fmt: skip

    def __init__(
        self, spec: GenerateSpec, handle: int, now: float, abort: AbortSender, turns: Turns | None = None
    ) -> None:
        self.spec = spec
        self.handle = handle
        self.token = secrets.token_bytes(16)
        self.submitted_at = now
        self.unfinished = spec.sampling.n
        self.media_put_back = False  # it was submitted again because the worker did not find its media
        self.seen_prompt = -1  # last prompt position whose log probabilities came
        self._abort = abort
        self._choices = [_Choice() for _ in range(spec.sampling.n)]
        self._ready: dict[int, _Choice] = {}
        self._news: list[RequestStarted | PromptLogprobs | PooledVector] = []
        self._error: TriptychError | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._turns = turns or Turns()
        self._take: Take | None = None  # who is fed, until `_fed` is done
        self._fed: asyncio.Future[None] | None = None
        self._queued = False  # for its turn to be fed

    @property
    def live(self) -> bool:
        """Whether anything can still come from the engine."""
        return self.unfinished > 0 and self._error is None

    def replay(self) -> list[tuple[Sequence[int], FinishReason]]:
        """What each choice has given so far; empty before the first token."""
        if not any(choice.ids or choice.finish for choice in self._choices):
            return []
        return [(choice.ids, choice.finish) for choice in self._choices]

    def remaining_ms(self, now: float) -> int | None:
        """What is left of the client's deadline."""
        if self.spec.deadline_ms is None:
            return None
        return max(0, self.spec.deadline_ms - round((now - self.submitted_at) * 1000))

    def take(
        self,
        index: int,
        first_index: int,
        ids: array[int],
        finish: FinishReason,
        logprobs: list[Position] | None,
    ) -> None:
        """New tokens of a choice. What was received before is dropped; a hole raises TokenGap."""
        choice = self._choices[index]
        if choice.finish:
            return
        known = len(choice.ids)
        if first_index > known:
            raise TokenGap(f"choice {index} has {known} tokens, the next is number {first_index}")
        skip = known - first_index
        if skip >= len(ids) and not finish:
            return
        choice.ids += ids[skip:] if skip else ids
        if logprobs is not None and self.spec.sampling.logprobs is not None:
            choice.logprobs += logprobs[skip:]
        if finish:
            choice.finish = finish
            self.unfinished -= 1
        self._ready[index] = choice
        if not self._queued:
            self._wake()

    def take_started(self, cached_tokens: int) -> None:
        """The request ran for the first time; after a replay that is no news."""
        if not any(choice.ids for choice in self._choices):
            self._news.append(RequestStarted(cached_tokens))
            self._wake()

    def take_prompt_logprobs(self, first_position: int, positions: list[Position]) -> None:
        """A piece of the prompt's log probabilities; positions that came before are dropped."""
        skip = self.seen_prompt + 1 - first_position
        if skip < len(positions):
            fresh = positions[max(0, skip) :]
            first_position += max(0, skip)
            self.seen_prompt = first_position + len(fresh) - 1
            self._news.append(PromptLogprobs(first_position, tuple(fresh)))
            self._wake()

    def take_vector(self, vector: PooledVector) -> None:
        """What the request asked for instead of tokens: it is over."""
        self.unfinished = 0
        self._news.append(vector)
        self._wake()

    def fail(self, error: TriptychError) -> None:
        """Ends the request: its reader gets what is pending, then the error."""
        if self.live:
            self._error = error
            self._wake()

    def abort(
        self, choice: int | None = None, reason: FinishReason = FinishReason.ABORT, kept_tokens: int | None = None
    ) -> None:
        """Ends the request, or one choice of it. No-op for what has ended."""
        if not self.live or (choice is not None and self._choices[choice].finish):
            return
        for index in range(len(self._choices)) if choice is None else (choice,):
            entry = self._choices[index]
            if not entry.finish:
                entry.finish = reason
                self.unfinished -= 1
                self._ready[index] = entry
        self._abort(self, reason, choice if self.unfinished else None, kept_tokens)
        self._wake()

    def _wake(self) -> None:
        if self._take is not None:
            if not self._queued:
                self._queued = True
                self._turns.add(self._feed)
        elif self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> Sequence[EngineEvent]:
        """All events that wait to be read; waits for one. Raises the request's failure; empty after its end."""
        while not self._ready and not self._news:
            if self._error is not None:
                raise self._error
            if not self.unfinished:
                return ()
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._events()

    async def feed(self, take: Take) -> None:
        """What `receive` would give, handed to `take` until it wants no more: no task has to wake up for it."""
        self._take, self._fed = take, self._loop.create_future()
        self._wake()
        try:
            await self._fed
        finally:
            self._take = self._fed = None

    def _feed(self) -> None:
        self._queued = False
        take, fed = self._take, self._fed
        if take is None or fed is None or fed.done():
            return
        try:
            if (events := self._events()) and not take(events):
                fed.set_result(None)
            elif self._error is not None:
                fed.set_exception(self._error)
            elif not self.unfinished:
                take(())
                fed.set_result(None)
        except TriptychError as error:
            fed.set_exception(error)
        except BaseException as error:
            fed.set_exception(error)
            raise

    def _events(self) -> Sequence[EngineEvent]:
        events: list[EngineEvent] = []
        if self._news:
            events += self._news
            self._news.clear()
        for index, choice in self._ready.items():
            events.append(choice.deliver(index))
        self._ready.clear()
        return events
