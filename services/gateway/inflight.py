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


class TokenGap(Exception):
    """Tokens are missing between what was received and what came now."""


class _Choice:
    __slots__ = ("delivered", "finish", "ids", "logprobs")

    def __init__(self) -> None:
        self.ids: array[int] = array("i")
        self.delivered = 0
        self.finish = _NONE
        self.logprobs: list[Position] = []  # of the pending tokens


class EngineRequest:
    """A submitted request. `receive` gives its events until the last choice has ended."""

    __slots__ = (
        "_abort",
        "_choices",
        "_error",
        "_loop",
        "_news",
        "_ready",
        "_waiter",
        "handle",
        "seen_prompt",
        "spec",
        "submitted_at",
        "token",
        "unfinished",
    )  # fmt: skip

    def __init__(self, spec: GenerateSpec, handle: int, now: float, abort: AbortSender) -> None:
        self.spec = spec
        self.handle = handle
        self.token = secrets.token_bytes(16)
        self.submitted_at = now
        self.unfinished = spec.sampling.n
        self.seen_prompt = -1  # last prompt position whose log probabilities came
        self._abort = abort
        self._choices = [_Choice() for _ in range(spec.sampling.n)]
        self._ready: dict[int, _Choice] = {}
        self._news: list[RequestStarted | PromptLogprobs | PooledVector] = []
        self._error: TriptychError | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None

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
        if self._waiter is not None and not self._waiter.done():
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
        events: list[EngineEvent] = [
            *self._news,
            *[self._event(index, choice) for index, choice in self._ready.items()],
        ]
        self._news.clear()
        self._ready.clear()
        return events

    def _event(self, index: int, choice: _Choice) -> ChoiceTokens:
        first = choice.delivered
        ids = tuple(choice.ids[first:])
        choice.delivered = first + len(ids)
        if not choice.logprobs:
            return ChoiceTokens(index, first, ids, choice.finish)
        logprobs = tuple(choice.logprobs)
        choice.logprobs.clear()
        return ChoiceTokens(index, first, ids, choice.finish, logprobs)
