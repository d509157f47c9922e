"""The run: the engine's loop with a clock that goes from event to event instead of by itself.

take in what arrived ─▶ apply what came back ─▶ expire ─▶ schedule as many steps as may be in flight
      ▲                                                                  │
      └────────── the next arrival or the next outcome, whichever is first ◀─┘
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from services.cli.simulate.arrivals import Arrival, Specs, arrivals
from services.cli.simulate.observer import Live, Observer, Row, Step
from services.cli.simulate.worker import VirtualWorker, work_of
from services.cli.simulate.workload import Workload
from services.common.errors import TriptychError
from services.engine.core import EngineCore
from services.engine.events import Event, Failed, Started, Tokens
from services.engine.plan import StepPlan

_NS = 1_000_000_000


class Stuck(Exception):
    """Requests wait, nothing runs, and nothing will change that."""


class Simulation:
    """One run of a workload. With `static`, so many requests are served to the end before the next are looked at."""

    def __init__(self, workload: Workload, observers: Sequence[Observer], static: int | None = None) -> None:
        self.core = EngineCore(workload.core_config())
        self.now_ns = 0
        self._workload = workload
        self._observers = observers
        self._static = static
        self._worker = VirtualWorker(workload.cost)
        self._specs = Specs()
        self._live: dict[int, Live] = {}
        self._held: deque[Live] = deque()  # arrived, and kept from the engine by `static`
        self._on_row: list[Live | None] = [None] * self.core.config.max_num_seqs
        self._prompt_lens = [0] * self.core.config.max_num_seqs
        self._step = 0  # the one whose outcome is being applied

    def run(self) -> None:
        """To the end of the last request. Raises Stuck where there is none."""
        coming = arrivals(self._workload)
        following = next(coming, None)
        while True:
            while following is not None and following.at_ns <= self.now_ns:
                self._arrive(following)
                following = next(coming, None)
            while (outcome := self._worker.take(self.now_ns)) is not None:
                self._step = outcome.step_id
                self._hear(self.core.apply(outcome))
            self._hear(self.core.expire(self.now_ns / _NS))
            self._let_in()
            while self._schedule():
                pass
            arrival_ns = following.at_ns if following is not None else None
            times = [time for time in (self._worker.next_ns, arrival_ns) if time is not None]
            if times:
                self.now_ns = min(times)
            elif self._live:
                self.now_ns = self._next_deadline()
            else:
                return

    def _arrive(self, arrival: Arrival) -> None:
        live = Live(arrival)
        for observer in self._observers:
            observer.arrived(live)
        if self._static is None:
            self._submit(live)
        else:
            self._held.append(live)

    def _let_in(self) -> None:
        """The next static batch, when the one before it has ended."""
        if self._static is not None and not self._live:
            while self._held and len(self._live) < self._static:
                self._submit(self._held.popleft())

    def _submit(self, live: Live) -> None:
        arrival = live.arrival
        deadline_ns = arrival.deadline_ns
        if deadline_ns is not None and deadline_ns <= self.now_ns:
            self._end(live, "expired", "the deadline passed while the request waited")
            return
        try:
            self.core.submit(self._specs.make(arrival, self.now_ns), self.now_ns / _NS)
        except TriptychError as error:
            self._end(live, "refused", error.message)
        else:
            self._live[arrival.number] = live

    def _schedule(self) -> bool:
        """Plans one step and has it run; False when none can be."""
        plan = self.core.schedule(self.now_ns / _NS)
        if plan is None:
            return False
        preempted = [self._live[int(each.request_id)] for each in self.core.take_preemptions()]
        for live in preempted:
            live.preemptions += 1
        self._execute(plan, preempted)
        return True

    def _execute(self, plan: StepPlan, preempted: list[Live]) -> None:
        for new in plan.new_rows:
            live = self._live[int(new.request_id)]
            self._on_row[new.row] = live
            self._prompt_lens[new.row] = new.prompt_len
            if live.first_step is None:
                live.first_step = plan.step_id
                live.wait_ns = self.now_ns - live.arrival.at_ns
        work = work_of(plan, self._prompt_lens)
        running = self._worker.execute(plan, work, self.now_ns)
        load = self.core.load()
        on_row = self._on_row
        step = Step(
            number=plan.step_id,
            rows=[
                Row(who, row, tokens, decodes)
                for row, tokens, decodes in zip(plan.rows, plan.num_tokens, work.decodes, strict=True)
                if (who := on_row[row]) is not None
            ],
            work=work,
            tokens=plan.total_tokens,
            running=load.running,
            waiting=load.waiting + len(self._held),
            free_blocks=load.free_blocks,
            preempted=preempted,
            planned_ns=self.now_ns,
            start_ns=running.start_ns,
            end_ns=running.end_ns,
        )
        for observer in self._observers:
            observer.step(step)

    def _hear(self, events: Sequence[Event]) -> None:
        for event in events:
            live = self._live.get(event.owner.handle)
            if live is None:
                continue
            if isinstance(event, Tokens):
                if live.first_token_ns is None:
                    live.first_token_ns, live.first_token_step = self.now_ns, self._step
                live.outputs += len(event.token_ids)
                if event.finish:
                    live.last_step = self._step
                    self._end(live, "length", "")
            elif isinstance(event, Started):
                live.cached_tokens = event.cached_tokens
            elif isinstance(event, Failed):
                self._end(live, "expired", event.failure.message)

    def _end(self, live: Live, finish: str, reason: str) -> None:
        live.finish, live.reason, live.end_ns = finish, reason, self.now_ns
        self._live.pop(live.arrival.number, None)
        for observer in self._observers:
            observer.ended(live)

    def _next_deadline(self) -> int:
        """Where only a deadline can end the waiting. Raises Stuck when there is none."""
        deadlines = [live.arrival.deadline_ns for live in self._live.values()]
        first = min((time for time in deadlines if time is not None and time > self.now_ns), default=None)
        if first is not None:
            return first
        number, live = next(iter(self._live.items()))
        told = self.core.explain(number.to_bytes(16, "big"))
        raise Stuck(f"{live.name} waits for ever: {told.reason if told else 'the engine does not know it'}")
