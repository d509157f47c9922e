"""What gRPC and REST share: a checked request is run, counted and logged, or refused. No protocol.

spec ──start──▶ Running ──deltas / whole──▶ client        Front: which requests run, drain, readiness
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Iterator, Sequence

from services.common import tracing
from services.common.errors import ResourceExhausted, TriptychError, Unavailable
from services.common.logs import Log
from services.gateway.generation import Generation
from services.gateway.inflight import EngineRequest
from services.gateway.metrics import GatewayMetrics, RequestTimer
from services.gateway.models import Model, Models
from services.gateway.request import ChoiceTokens, Delta, EngineEvent, FinishReason, GenerateSpec, Position, Usage
from services.gateway.router import Router

_log = Log("requests")


class _Timed:
    """The engine's side of a request, with a clock that sees tokens come."""

    __slots__ = ("_request", "_timer", "abort")

    def __init__(self, request: EngineRequest, timer: RequestTimer) -> None:
        self._request = request
        self._timer = timer
        self.abort = request.abort

    async def receive(self) -> Sequence[EngineEvent]:
        events = await self._request.receive()
        count = sum(len(event.token_ids) for event in events if isinstance(event, ChoiceTokens))
        if count:
            self._timer.tokens(count)
        return events


class Running:
    """One request that runs. Iterate `deltas` or await `whole`; then it is over, however that ends."""

    def __init__(
        self, front: Front, model: Model, spec: GenerateSpec, *, arrived: float, needs_tokens: bool, echo: str
    ) -> None:
        self.model = model
        self.spec = spec
        self.created_s = int(time.time())
        self._front = front
        request = front.router.submit(spec)
        self.token = request.token
        self._timer = front.metrics.watch(spec, model.info.engine, arrived)
        timed = _Timed(request, self._timer)
        self._generation = Generation(spec, model.text.vocabulary, timed, needs_tokens=needs_tokens, echo=echo)
        self._over = False
        front.began()

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return self._generation.usage

    @property
    def prompt_logprobs(self) -> list[Position]:
        """Of the prompt, if asked for; complete before the first delta."""
        return self._generation.prompt_logprobs

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """Deltas as they come."""
        with self._ending():
            async for delta in self._generation:
                self._note(delta)
                yield delta

    async def whole(self) -> list[Delta]:
        """One delta per choice, when all have ended."""
        with self._ending():
            deltas = await self._generation.whole()
            for delta in deltas:
                self._note(delta)
            return deltas

    def _note(self, delta: Delta) -> None:
        if delta.finish is not None:
            self._timer.finish(delta.finish.reason)

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Around the reading of all deltas: however it ends, the request is over, and why is known."""
        error: TriptychError | None = None
        try:
            yield
        except TriptychError as failed:
            error = failed
            raise
        finally:
            self._end(error)

    def close(self) -> None:
        """Ends the request if it still runs."""
        self._end(None)

    def _end(self, error: TriptychError | None) -> None:
        if self._over:
            return
        self._over = True
        self._generation.close()
        fields = self._timer.end(FinishReason.ABORT if error is None else FinishReason.ERROR)
        _log.info(
            "request finished",
            request_id=self.spec.request_id,
            trace_id=tracing.trace_id(self.spec.traceparent),
            model=self.spec.model,
            n=self.spec.sampling.n,
            cached_tokens=self.usage.cached_tokens,
            error=None if error is None else error.message,
            **fields,
        )
        self._front.ended()


class Front:
    """The door for requests: closed while nothing can run, or when the process is asked to end."""

    def __init__(self, models: Models, router: Router, metrics: GatewayMetrics, limit: int) -> None:
        self.models = models
        self.router = router
        self.metrics = metrics
        self.draining = False
        self._limit = limit
        self._arriving = 0
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def obstacle(self) -> str | None:
        """What keeps requests from running, or None."""
        return "this gateway is draining" if self.draining else self.router.obstacle()

    @contextlib.contextmanager
    def arrival(self) -> Iterator[None]:
        """Around the work before a request is submitted; refuses it where there are too many."""
        self._refuse_if_closed()
        if self._arriving + self._running >= self._limit:
            raise ResourceExhausted(
                f"{self._limit} requests are being served, no more are taken", reason="QUEUE_FULL", retry_after_ms=1000
            )
        self._arriving += 1
        try:
            yield
        finally:
            self._arriving -= 1

    def _refuse_if_closed(self) -> None:
        if self.draining:
            raise Unavailable("this gateway is draining", reason="DRAINING", retry_after_ms=1000)

    def start(
        self, model: Model, spec: GenerateSpec, *, arrived: float, needs_tokens: bool = False, echo: str = ""
    ) -> Running:
        """Submits a request that arrived at `arrived` (time.monotonic)."""
        self._refuse_if_closed()
        return Running(self, model, spec, arrived=arrived, needs_tokens=needs_tokens, echo=echo)

    def began(self) -> None:
        """A request runs."""
        self._running += 1
        self._idle.clear()

    def ended(self) -> None:
        """A request is over."""
        self._running -= 1
        if not self._running:
            self._idle.set()

    async def drain(self, limit_s: float) -> int:
        """Refuses new requests and waits until the others are over; answers how many were not in time."""
        self.draining = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), limit_s)
        return self._running
