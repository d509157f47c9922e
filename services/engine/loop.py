"""The engine's loop: take in, schedule, execute, apply, emit. One asyncio task; the core inline.

    outcome ──▶ apply ──▶ schedule ──▶ execute ──▶ emit ──▶ sleep

The worker gets its next step before any gateway is told of the last one. Requests are taken in as
they come, between two turns of the loop. The loop sleeps until somebody wakes it: a request, an
outcome, a lost worker. It is the one place where a bug of the core is caught: requests fail, and
the process goes on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from services.common.errors import DeadlineExceeded, TriptychError, Unavailable, internal
from services.common.logs import Log
from services.engine.cache_watch import CacheWatch
from services.engine.config import EngineSettings
from services.engine.core import CoreConfig, EngineCore
from services.engine.events import FINISH_ABORT, FINISH_NONE, Event, Failed, StepFailure
from services.engine.journal import WINDOW_S, Journal
from services.engine.metrics import EngineMetrics
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
    here = settings.on(standing.device)
    return CoreConfig(
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=standing.max_model_len,
        block_size=standing.block_size,
        num_blocks=standing.num_blocks,
        vocab_size=standing.model.vocab_size,
        kv_windows=standing.kv_windows,
        enable_prefix_caching=settings.enable_prefix_caching,
        output_reserve_blocks=settings.output_reserve_blocks,
        policy=settings.policy,
        ageing_s=settings.ageing_s,
        max_prefill_tokens=settings.max_prefill_tokens,
        max_preemptions=settings.max_preemptions,
        num_speculative_tokens=here.max_speculative_tokens if settings.speculative == "ngram" else 0,
        max_speculative_tokens=here.max_speculative_tokens,
        speculative_batch=here.speculative_batch,
        speculative_limit=None if standing.device == "cpu" else here.speculative_batch,
        ngram_min=here.ngram_min,
        ngram_max=settings.ngram_max,
        encoder_budget=settings.encoder_budget,
        encoder_cache_size=settings.encoder_cache_size,
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
        make_core: Callable[[], EngineCore],
        metrics: EngineMetrics,
    ) -> None:
        self.settings = settings
        self.standing = standing
        self.sessions = Sessions()
        self.step_id = 0
        self.draining = False
        self._drain_ends: float | None = None
        self._make_core = make_core
        self._core = make_core()
        self.load: Load = self._core.load()
        self.cache = CacheWatch(self._core.kv)
        self._workers = workers
        self._metrics = metrics
        self._journal = Journal()
        self._holds: dict[str, str] = {}  # by name: why nothing is scheduled, for a person
        self._settled = asyncio.Event()
        self._applied_step = 0
        self._unsaid: list[Event] = []  # of steps up to that one, not yet emitted
        self._wake = workers.changed
        self._watchers: set[asyncio.Event] = set()
        self._deadline_timer: asyncio.TimerHandle | None = None  # asyncio's clock is time.monotonic
        self._progress_at = time.monotonic()
        self._progressed = False  # in this life of the worker group

    async def run(self) -> None:
        """Serves for ever: one turn is one life of the worker group."""
        pause_s = _FIRST_PAUSE_S
        while True:
            self._progressed = False
            try:
                await self._serve()
            except WorkerLost as lost:
                died = lost.died
                self._guarded("worker_lost", lambda: self._core.worker_lost(blame=died))  # noqa: B023
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
            try:
                for outcome in self._workers.take():
                    self._apply(outcome)
                self._unsaid += self._core.expire(time.monotonic())
                self._unsaid += self._core.take_grammars()
                await self._send()
            finally:
                self._emit(())
            self._show_load()
            await self._wake.wait()

    def _apply(self, outcome: StepOutcome) -> None:
        self._progress_at, self._progressed = time.monotonic(), True
        self._applied_step = outcome.step_id
        self._unsaid += self._core.apply(outcome)

    async def _send(self) -> None:
        """Fills the pipe to the worker."""
        await self._send_masks()
        while self._workers.stands and not self.held:
            plan = self._core.schedule(time.monotonic()) or self._core.let_go()
            if plan is None:
                return
            await self._workers.execute(plan)
            await self._send_masks()
            if plan.rows:
                self._metrics.step(plan.total_tokens)

    async def _send_masks(self) -> None:
        """The oldest step out may wait for its masks; they can be made as soon as nothing is before it."""
        masks = self._core.fill_masks() if self._workers.stands else None
        if masks is not None:
            await self._workers.send_masks(masks)

    def _start_anew(self, error: Exception) -> None:
        """The core failed through a bug: every request fails, and an empty core takes its place."""
        failure = internal("the engine failed")
        _log.error("core failed, an empty one takes its place", exc_info=error, error_id=failure.error_id)
        told = StepFailure(failure.code_number, failure.message, failure.error_id)
        self._core = self._make_core()
        self.cache.follow(self._core.kv)
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
        self._watch_deadlines()
        if spec.constraint is not None:
            asyncio.get_running_loop().call_later(self.settings.grammar_timeout_s, self._wake.set)
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
        self._guarded("abort_gateway", lambda: self._core.abort_gateway(session.gateway))
        for record in ended:
            for choice in record.choices:
                if choice.finish == FINISH_NONE:
                    choice.finish = FINISH_ABORT
                    self._metrics.finished(FINISH_ABORT)
            self._finish(record)
        self.sessions.close(session)
        _log.info("gateway given up", gateway=session.name, incarnation=session.gateway, requests=len(ended))

    def explain(self, token: bytes) -> Explanation | None:
        """Where a request is and why."""
        found = self._core.explain(token)
        reason = next(reversed(self._holds.values()), self._workers.missing)
        return replace(found, reason=reason) if found is not None and reason else found

    def reset_prefix_cache(self, preempt: bool) -> int:
        """Forgets cached prefixes; how many blocks left the index."""
        blocks = self._core.reset_prefix_cache(preempt)
        self._show_load()
        return blocks

    @property
    def held(self) -> bool:
        """Nothing is scheduled; steps in flight are still applied."""
        return bool(self._holds)

    def hold(self, name: str, reason: str) -> None:
        """Schedules nothing until `unhold` of the same name. `reason` is one sentence for a person."""
        self._holds[name] = reason

    def unhold(self, name: str) -> None:
        """Ends a hold, if there is one of that name."""
        if self._holds.pop(name, None) is not None and not self.held:
            self._progress_at = time.monotonic()
            self._settled.set()
            self._wake.set()

    async def settled(self) -> bool:
        """Waits until no step is in flight. False where the hold ended before."""
        while self.held and self._core.steps_in_flight:
            self._settled.clear()
            await self._settled.wait()
        return self.held

    def preempt_all(self) -> None:
        """No request holds KV any more. To be called while nothing is scheduled."""
        self._guarded("preempt_all", self._core.preempt_all)

    def forget_worker(self) -> None:
        """The worker has emptied its rows and its KV."""
        self._guarded("forget_worker", lambda: self._core.worker_lost(blame=False))

    def drain(self, grace_s: float | None) -> None:
        """Refuses new requests from now on; live ones go on, and their gateways are told for how long."""
        self.draining = True
        self._drain_ends = None if grace_s is None else time.monotonic() + grace_s
        self.sessions.look()
        for session in self.sessions:
            session.drain(grace_s)
        self._show_load()

    @property
    def grace_s(self) -> float | None:
        """Time until `drain` has live requests ended; None where it does not."""
        return None if self._drain_ends is None else max(0.0, self._drain_ends - time.monotonic())

    def abort_all(self) -> None:
        """Ends every live request."""
        for record in self.sessions.unfinished():
            self.abort(record, None, FINISH_ABORT, None)

    @property
    def context_len(self) -> int:
        """Longest prompt plus output that a request can have."""
        return self._core.context_len

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._core.has_work

    @property
    def silence_s(self) -> float:
        """Time since the last outcome while there is work to do; 0 when idle."""
        return time.monotonic() - self._progress_at if self._core.has_work and not self.held else 0.0

    def watch(self) -> asyncio.Event:
        """An event that is set whenever the load may have changed, until `unwatch`."""
        event = asyncio.Event()
        self._watchers.add(event)
        return event

    def unwatch(self, event: asyncio.Event) -> None:
        """Ends a watch."""
        self._watchers.discard(event)

    def _watch_deadlines(self) -> None:
        """One timer for the next deadline, however many there are."""
        at, timer = self._core.next_deadline, self._deadline_timer
        if at is None or (timer is not None and timer.when() <= at):
            return
        if timer is not None:
            timer.cancel()
        self._deadline_timer = asyncio.get_running_loop().call_at(at, self._expire)

    def _expire(self) -> None:
        self._deadline_timer = None
        self._guarded("expire", lambda: self._core.expire(time.monotonic()))
        self._watch_deadlines()

    def _guarded(self, name: str, call: Callable[[], list[Event] | None]) -> None:
        """A call of the core from outside the loop's turns; a bug in it is logged and costs nothing else."""
        try:
            self._emit(call() or ())
            self._show_load()
        except Exception as error:
            _log.error("core failed", exc_info=error, call=name)
        self._wake.set()

    def _show_load(self) -> None:
        self.load = self._core.load()
        self._metrics.load(self.load)
        self._metrics.counters(self._core.counters)
        preemptions = self._core.take_preemptions()
        if preemptions:
            self._metrics.preempted(preemptions)
            if self._journal.preempted(preemptions, time.monotonic()):
                asyncio.get_running_loop().call_later(WINDOW_S, self._journal.tell_left_out)
        if not self._core.steps_in_flight:
            self._settled.set()
        for watcher in self._watchers:
            watcher.set()
        self.cache.poll()

    def _emit(self, events: Iterable[Event]) -> None:
        """Notes events for their gateways, behind those that are still unsaid; the streams take them from there."""
        self._unsaid += events
        unsaid, self._unsaid = self._unsaid, []
        self.step_id = self._applied_step
        now, find = time.monotonic(), self.sessions.find
        for event in unsaid:
            found = find(event.owner)
            if found is None:
                continue
            session, record = found
            ended = session.tell(event, record, now)
            for choice in ended:
                self._metrics.finished(choice.finish)
            if ended and isinstance(event, Failed):
                self._journal.failed(event, record)
            if ended and record.finished:
                self._finish(record)

    def _finish(self, record: Record) -> None:
        started = record.started
        self._metrics.times(started.queue_s if started else None, record.prefill_s, record.decode_s)
        self._journal.finished(record)
