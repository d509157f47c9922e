"""What gRPC and REST share: a checked request is run, counted and logged, or refused. No protocol.

spec ──start──▶ Running ──deltas / whole──▶ client        Front: which requests run, drain, readiness
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from services.common import tracing
from services.common.errors import ResourceExhausted, TriptychError, Unavailable
from services.common.logs import Log
from services.gateway.generation import Generation
from services.gateway.metrics import GatewayMetrics
from services.gateway.models import Model, Models
from services.gateway.request import Delta, FinishReason, Position, Usage
from services.gateway.router import Router
from services.gateway.text import Job

_log = Log("requests")
T = TypeVar("T")


class Running:
    """One request that runs. `read` its deltas until there are none, or await `whole`; `close` it however that ends."""

    def __init__(self, front: Front, model: Model, job: Job, *, arrived: float) -> None:
        spec = job.spec
        self.model = model
        self.spec = spec
        self.created_s = int(time.time())
        self._front = front
        request = front.router.submit(spec)
        self.token = request.token
        self._timer = front.metrics.watch(spec, model.info.engine, arrived)
        self._generation = Generation(
            spec,
            model.text.vocabulary,
            request,
            shown=job.response,
            echo=job.echo,
            on_tokens=self._timer.tokens,
            on_finish=self._timer.finish,
        )
        self._media = job.media
        self._over = False
        front.began()

    @property
    def over(self) -> bool:
        """Whether all choices have ended."""
        return self._generation.over

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return self._generation.usage

    @property
    def prompt_logprobs(self) -> list[Position]:
        """Of the prompt, if asked for; complete before the first delta."""
        return self._generation.prompt_logprobs

    async def read(self) -> list[Delta]:
        """What is new: it waits until there is something. Nothing after the end."""
        deltas = await self._ending(self._generation.read())
        self._look()
        return deltas

    async def feed(self, take: Callable[[list[Delta]], bool]) -> None:
        """What `read` would give, handed to `take` as it comes, until it wants no more, or all have ended."""
        await self._ending(self._generation.feed(take))
        self._look()

    async def whole(self) -> list[Delta]:
        """One delta per choice, when all have ended."""
        deltas = await self._ending(self._generation.whole())
        self._look()
        return deltas

    async def vector(self) -> array[float]:
        """The vector of a request that asked for one; then it is over."""
        vector = await self._ending(self._generation.vector())
        self._timer.finish(FinishReason.EOS)
        self._end(None)
        return vector

    async def _ending(self, reading: Coroutine[Any, Any, T]) -> T:
        """The request is over if reading fails, or the reader is cancelled."""
        try:
            return await reading
        except BaseException as error:
            self._end(error if isinstance(error, TriptychError) else None)
            raise

    def _look(self) -> None:
        """The request is over once all its choices are."""
        if self._generation.over:
            self._end(None)

    def close(self) -> None:
        """Ends the request if it still runs."""
        self._end(None)

    def _end(self, error: TriptychError | None) -> None:
        if self._over:
            return
        self._over = True
        self._generation.close()
        self._media.release()
        fields = self._timer.end(FinishReason.ABORT if error is None else FinishReason.ERROR)
        _log.info(
            "request finished",
            request_id=self.spec.request_id,
            trace_id=tracing.trace_id(self.spec.traceparent),
            model=self.spec.model,
            n=self.spec.sampling.n,
            labels=dict(self.spec.labels) or None,
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

    def start(self, model: Model, job: Job, *, arrived: float) -> Running:
        """Submits a request that arrived at `arrived` (time.monotonic). What it holds is released if it can't run."""
        try:
            self._refuse_if_closed()
            return Running(self, model, job, arrived=arrived)
        except BaseException:
            job.media.release()
            raise

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """Around a call of many requests: a drain that comes meanwhile waits for all of them."""
        self._refuse_if_closed()
        self.began()
        try:
            yield
        finally:
            self.ended()

    def go_on(self, model: Model, job: Job, *, arrived: float) -> Running:
        """Submits one of the requests of such a call."""
        return Running(self, model, job, arrived=arrived)

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
