"""The engine's loop: take in, schedule, execute, apply, emit. One asyncio task; the core inline.

Requests are taken in as they come, between two turns of the loop. The loop sleeps until somebody
wakes it: a request, an outcome, a lost worker. It is the one place where a bug of the core is
caught: requests fail, and the process goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from services.common import tracing
from services.common.errors import DeadlineExceeded, TriptychError, Unavailable, internal
from services.common.logs import Log
from services.engine.config import EngineSettings
from services.engine.core import CoreConfig, EngineCore
from services.engine.events import FINISH_ABORT, FINISH_NONE, Event, Failed, StepFailure
from services.engine.metrics import EngineMetrics, finished_reason
from services.engine.plan import StepOutcome
from services.engine.records import Record, record_of
from services.engine.report import Explanation, Load
from services.engine.request import RequestSpec
from services.engine.sessions import Session, Sessions
from services.engine.standing import Standing
from services.engine.workers import WorkerGroup, WorkerLost

_RETRY_MS = 1000
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 2.0
_log = Log("engine")


def core_config(settings: EngineSettings, standing: Standing) -> CoreConfig:
    """What limits a core that drives this worker group."""
    return CoreConfig(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=standing.max_model_len,
        block_size=standing.block_size,
        num_blocks=standing.num_blocks,
        vocab_size=standing.model.vocab_size,
        enable_prefix_caching=settings.enable_prefix_caching,
        output_reserve_blocks=settings.output_reserve_blocks,
        max_waiting_requests=settings.max_waiting_requests,
        max_waiting_tokens=settings.max_waiting_tokens,
        steps_in_flight=settings.steps_in_flight,
    )


class EngineLoop:
    """Drives the core and a worker group that stands, and notes for the sessions what came of it."""

    def __init__(
        self,
        settings: EngineSettings,
        workers: WorkerGroup,
        standing: Standing,
        core: EngineCore,
        metrics: EngineMetrics,
    ) -> None:
        self.settings = settings
        self.standing = standing
        self.sessions = Sessions()
        self.step_id = 0
        self.paused = False
        self.draining = False
        self.load: Load = core.load()
        self._workers = workers
        self._core = core
        self._metrics = metrics
        self._wake = workers.changed
        self._watchers: set[asyncio.Event] = set()
        self._progress_at = time.monotonic()
        self._progressed = False  # in this life of the worker group

    async def run(self) -> None:
        """Serves for ever: one turn is one life of the worker group."""
        pause_s = _FIRST_PAUSE_S
        while True:
            self._progressed = False
            try:
                await self._serve()
            except WorkerLost:
                self._guarded("worker_lost", self._forget_rows)
            except Exception as error:
                self._start_anew(error)
            await self._workers.drop()
            pause_s = _FIRST_PAUSE_S if self._progressed else min(pause_s * 2, _LONGEST_PAUSE_S)
            await asyncio.sleep(pause_s)  # a group that is lost before its first result must not spin
            self.standing = await self._workers.stand(self.standing)
            self._progress_at = time.monotonic()

    async def _serve(self) -> None:
        while True:
            self._wake.clear()
            for outcome in self._workers.take():
                self._apply_and_emit(outcome)
            self._emit(self._core.expire(time.monotonic()))
            while not self.paused and (plan := self._core.schedule(time.monotonic())) is not None:
                await self._workers.execute(plan)
                self._metrics.step(plan.total_tokens)
            self._show_load()
            await self._wake.wait()

    def _apply_and_emit(self, outcome: StepOutcome) -> None:
        self._progress_at, self._progressed = time.monotonic(), True
        self.step_id = outcome.step_id
        self._emit(self._core.apply(outcome))

    def _forget_rows(self) -> list[Event]:
        self._core.worker_lost()
        return []

    def _start_anew(self, error: Exception) -> None:
        """The core failed through a bug: every request fails, and an empty core takes its place."""
        failure = internal("the engine failed")
        _log.error("core failed, an empty one takes its place", exc_info=error, error_id=failure.error_id)
        told = StepFailure(failure.code_number, failure.message, failure.error_id)
        self._core = EngineCore(self._core.config)
        self._metrics.new_core()
        self._emit([Failed(record.spec.owner, None, told) for record in self.sessions.unfinished()])
        self._show_load()

    def submit(self, session: Session, spec: RequestSpec) -> None:
        """Takes a request in. Raises a TriptychError where it is refused; nothing of it is left then."""
        now = time.monotonic()
        if self.draining:
            raise Unavailable("the engine is draining", reason="DRAINING", retry_after_ms=_RETRY_MS)
        session.check_free(spec.owner.handle)
        if spec.deadline_s is not None and spec.deadline_s <= 0:
            raise DeadlineExceeded("the deadline passed before the request arrived", field="deadline_ms")
        if not self._core.has_work:
            self._progress_at = now
        try:
            events = self._core.submit(spec, now)
        except TriptychError:
            raise
        except Exception as error:
            failure = internal("the engine failed to take the request in")
            _log.error("submit failed", exc_info=error, error_id=failure.error_id, request_id=spec.request_id)
            raise failure from error
        session.accept(record_of(spec, now))
        if spec.deadline_s is not None:
            asyncio.get_running_loop().call_later(spec.deadline_s, self._expire)
        self._emit(events)
        self._show_load()
        self._wake.set()

    def abort(self, record: Record, choice: int | None, reason: int, kept_tokens: int | None) -> None:
        """Ends a request or one choice of it at once, whatever is in flight for it."""
        owner = record.spec.owner
        for each in record.choices:
            if each.finish == FINISH_NONE and choice in {None, each.index}:
                each.kept = kept_tokens
        self._guarded("abort", lambda: self._core.abort(owner, choice, reason))

    def give_up(self, session: Session) -> None:
        """Ends every request of a gateway that is gone."""
        ended = [record for record in session.records.values() if not record.finished]
        self._guarded("abort_gateway", lambda: self._forget_gateway(session.gateway))
        for record in ended:
            for choice in record.choices:
                if choice.finish == FINISH_NONE:
                    choice.finish = FINISH_ABORT
                    self._metrics.finished(FINISH_ABORT)
            self._log_finished(record)
        self.sessions.close(session)
        _log.info("gateway given up", gateway=session.name, incarnation=session.gateway, requests=len(ended))

    def _forget_gateway(self, gateway: int) -> list[Event]:
        self._core.abort_gateway(gateway)
        return []

    def explain(self, token: bytes) -> Explanation | None:
        """Where a request is and why."""
        return self._core.explain(token)

    def reset_prefix_cache(self, preempt: bool) -> int:
        """Forgets cached prefixes; how many blocks left the index."""
        return self._core.reset_prefix_cache(preempt)

    def pause(self, paused: bool) -> None:
        """Stops or resumes scheduling; steps in flight are still applied."""
        self.paused = paused
        self._wake.set()

    def drain(self) -> None:
        """Refuses new requests from now on; live ones go on."""
        self.draining = True
        self.sessions.look()
        for session in self.sessions:
            session.drain()

    @property
    def context_len(self) -> int:
        """Longest prompt plus output that a request can have."""
        return self._core.context_len

    @property
    def silence_s(self) -> float:
        """Time since the last outcome while there is work to do; 0 when idle."""
        return time.monotonic() - self._progress_at if self._core.has_work and not self.paused else 0.0

    def watch(self) -> asyncio.Event:
        """An event that is set whenever the load may have changed, until `unwatch`."""
        event = asyncio.Event()
        self._watchers.add(event)
        return event

    def unwatch(self, event: asyncio.Event) -> None:
        """Ends a watch."""
        self._watchers.discard(event)

    def _expire(self) -> None:
        self._guarded("expire", lambda: self._core.expire(time.monotonic()))

    def _guarded(self, name: str, call: Callable[[], list[Event]]) -> None:
        """A call of the core from outside the loop's turns; a bug in it is logged and costs nothing else."""
        try:
            self._emit(call())
            self._show_load()
        except Exception as error:
            _log.error("core failed", exc_info=error, call=name)
        self._wake.set()

    def _show_load(self) -> None:
        self.load = self._core.load()
        self._metrics.load(self.load)
        self._metrics.counters(self._core.counters)
        for watcher in self._watchers:
            watcher.set()

    def _emit(self, events: Iterable[Event]) -> None:
        """Notes events for their gateways; the streams take them from there."""
        now, find = time.monotonic(), self.sessions.find
        for event in events:
            found = find(event.owner)
            if found is None:
                continue
            session, record = found
            ended = session.tell(event, record, now)
            for choice in ended:
                self._metrics.finished(choice.finish)
            if ended and record.finished:
                self._log_finished(record)

    def _log_finished(self, record: Record) -> None:
        spec, started = record.spec, record.started
        self._metrics.times(started.queue_s if started else None, record.prefill_s, record.decode_s)
        _log.info(
            "request finished",
            request_id=spec.request_id,
            trace_id=tracing.trace_id(spec.traceparent),
            prompt_tokens=len(spec.prompt),
            cached_tokens=started.cached_tokens if started else 0,
            output_tokens=record.output_tokens,
            queue_ms=round(started.queue_s * 1e3, 1) if started else None,
            prefill_ms=None if record.prefill_s is None else round(record.prefill_s * 1e3, 1),
            decode_ms=None if record.decode_s is None else round(record.decode_s * 1e3, 1),
            finish=[finished_reason(choice.finish) for choice in record.choices],
        )
