"""A whole request: events of the engine in, deltas of all its choices out. Knows no protocol.

EngineStream ──receive──▶ events ──▶ a pipeline per choice ──▶ deltas
     ◀──abort── a choice that a stop string ended, or all that still run when the client is gone
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Protocol

from services.common.errors import InvalidArgument, TriptychError, Unavailable, internal
from services.gateway.constraints.parts import spelled
from services.gateway.pipeline import ChoicePipeline
from services.gateway.request import (
    ChoiceTokens,
    Delta,
    EngineEvent,
    FinishReason,
    GenerateSpec,
    PooledVector,
    Position,
    PromptLogprobs,
    RequestStarted,
    ResponseOptions,
    Usage,
)
from services.gateway.stops import StopMatcher
from services.gateway.vocabulary import Vocabulary


class EngineStream(Protocol):
    """One submitted request, as the router shows it."""

    async def receive(self) -> Sequence[EngineEvent]:
        """All events that have come, at least one: it waits for that. Raises the request's failure, once."""
        ...

    async def feed(self, take: Callable[[Sequence[EngineEvent]], bool]) -> None:
        """The same events, handed to `take` as they come, until it wants no more."""
        ...

    def abort(self, choice: int | None, reason: FinishReason, kept_tokens: int | None) -> None:
        """Ends a choice, or with None all that run. Never waits; what still comes for it is dropped."""
        ...


class Generation:
    """One request that runs. `read` its deltas, or await `whole`; `close` it however that ends."""

    def __init__(
        self,
        spec: GenerateSpec,
        vocabulary: Vocabulary,
        stream: EngineStream,
        *,
        shown: ResponseOptions | None = None,
        echo: str = "",
        on_tokens: Callable[[int], None] = lambda count: None,
        on_finish: Callable[[FinishReason], None] = lambda reason: None,
    ) -> None:
        shown = shown or ResponseOptions()
        self.usage = Usage(len(spec.prompt_ids))
        self.prompt_logprobs: list[Position] = []
        self._stream = stream
        self._on_tokens = on_tokens
        self._on_finish = on_finish
        self._interval = shown.stream_interval
        self._constraint = spec.sampling.constraint
        self._forbids = spec.forbids
        self._parts = {f"media[{index}]": item.where for index, item in enumerate(spec.media)}
        matcher = StopMatcher(spec.text.stop) if spec.text.stop else None
        self._pipelines = [
            ChoicePipeline(
                choice,
                vocabulary,
                spec.text,
                matcher=matcher,
                min_tokens=spec.sampling.min_tokens,
                needs_tokens=shown.needs_tokens,
                echo=echo,
                begins=None if self._constraint is None else self._constraint.begins,
            )
            for choice in range(spec.sampling.n)
        ]
        self._begun: set[int] = set()  # choices that have given a delta
        self._running = set(range(spec.sampling.n))  # choices that the engine has not finished and we not aborted

    @property
    def over(self) -> bool:
        """Whether all choices have ended."""
        return not self._running

    async def read(self) -> list[Delta]:
        """What is new, one delta per choice: it waits until there is something. Nothing after the end.

        What queued up while the reader was busy is merged.
        """
        while self._running:
            if deltas := self._take(self._apply(await self._receive())):
                return deltas
        return []

    async def feed(self, take: Callable[[list[Delta]], bool]) -> None:
        """What `read` would give, handed to `take` as it comes, until `take` wants no more or all have ended."""

        def on_events(events: Sequence[EngineEvent]) -> bool:
            deltas = self._take(self._apply(events))
            return (not deltas or take(deltas)) and bool(self._running)

        try:
            if self._running:
                await self._stream.feed(on_events)
        except TriptychError as error:
            raise self._spelled(error) from error

    async def whole(self) -> list[Delta]:
        """One delta per choice, when all have ended."""
        while self._running:
            self._apply(await self._receive())
        return self._take(range(len(self._pipelines)))

    async def vector(self) -> array[float]:
        """The vector of a request that asked for one. Raises Unavailable where it was ended before."""
        while self._running:
            events = await self._receive()
            self._apply(events)
            for event in events:
                if isinstance(event, PooledVector):
                    self._running.clear()
                    return event.values
        raise Unavailable("the request was ended before its vector was there", retry_after_ms=1000)

    def close(self) -> None:
        """Ends what still runs. Does nothing after a request that ended by itself."""
        if not self._running:
            return
        if len(self._running) == len(self._pipelines):
            self._stream.abort(None, FinishReason.ABORT, None)
        else:
            for choice in sorted(self._running):
                self._stream.abort(choice, FinishReason.ABORT, self._pipelines[choice].kept_tokens)
        self._running.clear()

    async def _receive(self) -> Sequence[EngineEvent]:
        try:
            return await self._stream.receive()
        except TriptychError as error:
            raise self._spelled(error) from error

    def _spelled(self, error: TriptychError) -> TriptychError:
        """The engine's error, with the field at fault as the client spells it."""
        if error.field == "sampling" and self._forbids is not None:
            return InvalidArgument(f"{self._forbids}: {error.message}", field=self._forbids, reason=error.reason)
        part = self._parts.get(error.field or "")
        if part:
            words = f"{part}{error.message.removeprefix(error.field or '')}"
            return InvalidArgument(words, field=part, reason=error.reason)
        return spelled(error, self._constraint)

    def _apply(self, events: Sequence[EngineEvent]) -> Sequence[int]:
        """Takes events in; gives the choices that they concern, in order of their first event."""
        if not events:
            raise internal("the engine's events ended before the request")
        touched: list[int] = []
        count = 0
        for event in events:
            if isinstance(event, ChoiceTokens):
                count += len(event.token_ids)
                choice = event.choice
                if choice in self._running:
                    pipeline = self._pipelines[choice]
                    pipeline.push(event)
                    if pipeline.finish is not None:
                        self._ended(event, pipeline)
                    if choice not in touched:
                        touched.append(choice)
            elif isinstance(event, RequestStarted):
                self.usage.cached_tokens = event.cached_tokens
            elif isinstance(event, PromptLogprobs):
                missing = len(self.prompt_logprobs) - event.first_position
                self.prompt_logprobs.extend(event.positions[max(missing, 0) :])
        if count:
            self._on_tokens(count)
        return touched

    def _ended(self, event: ChoiceTokens, pipeline: ChoicePipeline) -> None:
        """A choice has ended, by the engine's word or by its text, of which the engine does not know."""
        self._running.discard(event.choice)
        if not event.finish:
            self._stream.abort(event.choice, FinishReason.STOP_STRING, pipeline.kept_tokens)

    def _is_due(self, choice: int) -> bool:
        """Whether a delta may come now: the first and the last at once, the others with enough tokens."""
        pipeline = self._pipelines[choice]
        return choice not in self._begun or pipeline.finish is not None or pipeline.ready_tokens >= self._interval

    def _take(self, choices: Sequence[int]) -> list[Delta]:
        """A delta of each of these choices that is due and has something to tell."""
        deltas, usage = [], self.usage
        for choice in choices:
            if self._interval > 1 and not self._is_due(choice):
                continue
            delta = self._pipelines[choice].take()
            if delta is not None:
                self._begun.add(choice)
                usage.completion_tokens += len(delta.token_ids)
                usage.reasoning_tokens += delta.reasoning_tokens
                if delta.finish is not None:
                    self._on_finish(delta.finish.reason)
                deltas.append(delta)
        return deltas
