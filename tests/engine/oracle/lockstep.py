"""The engine and the oracle side by side: each call goes to both, and then they must stand alike."""

from __future__ import annotations

from typing import Any

from services.common.errors import TriptychError
from services.engine.plan import SAMPLES, StepPlan
from services.engine.policies import make_policy
from services.engine.request import RequestSpec
from tests.engine.fake_worker import entries
from tests.engine.harness import Harness
from tests.engine.oracle.oracle import Oracle, Step
from tests.engine.oracle.workload import Action, Workload

MAX_TURNS = 3000

Facts = dict[str, Any]
"""What is compared, by what it is called in a message."""


class Differ(AssertionError):
    """They decided differently."""


class Lockstep:
    """Runs one workload on both."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        policy = make_policy(workload.policy, workload.ageing_s)
        self.harness = Harness(workload.config, policy)
        self.oracle = Oracle(workload.config, workload.policy, workload.ageing_s)
        self.calls = 0

    def run(self) -> None:
        """All actions, then turns until nothing is left."""
        for action in self.workload.actions:
            self.act(action)
        for _ in range(MAX_TURNS):
            if not self.turn():
                break
        self._compare("the end", self._heard(), self._told())
        self.harness.check_idle()

    def act(self, action: Action) -> None:
        if action.kind == "submit":
            assert action.spec is not None
            self.submit(action.spec)
        elif action.kind == "abort":
            self.harness.abort(action.handle, action.choice)
            self.oracle.abort(action.handle, action.choice)
            self._compare_states(f"abort {action.handle}.{action.choice}")
        elif action.kind == "expire":
            self.harness.hear(self.harness.core.expire(self.harness.now))
            self.oracle.expire(self.harness.now)
            self._compare_states("expire")
        elif action.kind == "tick":
            self.harness.now += action.seconds
        elif action.kind == "plan":
            self.plan()
        elif action.kind == "apply":
            self.apply()
        else:
            self.turn()

    def submit(self, spec: RequestSpec) -> None:
        try:
            self.harness.submit(spec)
            accepted = True
        except TriptychError:
            accepted = False
        told = self.oracle.submit(spec, self.harness.now)
        self._compare(f"submit {spec.owner.handle}", {"accepted": accepted}, {"accepted": told})
        self._compare_states(f"submit {spec.owner.handle}")

    def plan(self) -> bool:
        plan = self.harness.plan()
        step = self.oracle.schedule()
        taken = [
            ((int(each.request_id[1:]), each.choice), (int(each.by_request_id[1:]), each.by_choice), each.reason)
            for each in self.harness.core.take_preemptions()
        ]
        decided = {"preempted (who, by whom, why)": self.oracle.preemptions}
        self._compare("plan", {"preempted (who, by whom, why)": taken}, decided)
        self.oracle.preemptions = []
        self._compare("plan", self._planned(plan), self._decided(step))
        self._compare_states("plan")
        return plan is not None

    def apply(self) -> None:
        if self.oracle.in_flight:
            self.harness.apply()
            self.oracle.apply()
            self._compare_states("apply")

    def turn(self) -> bool:
        """Fills the pipe, then applies one outcome. False when there is nothing to do."""
        self.harness.now += 1.0
        while self.plan():
            pass
        in_flight = bool(self.oracle.in_flight)
        self.apply()
        return in_flight

    def _planned(self, plan: StepPlan | None) -> Facts:
        if plan is None:
            return {"computes (who, from, to, samples)": None, "encodes": None, "drops": None}
        parts = [
            ((request.owner.handle, request.choice), start, start + count, bool(flags & SAMPLES))
            for (request, *_), start, count, flags in zip(
                entries(plan), plan.num_computed, plan.num_tokens, plan.flags, strict=True
            )
        ]
        encoded = [item.hash[0] for item in plan.encode]
        dropped = [key[0] for key in plan.dropped_media]
        return {"computes (who, from, to, samples)": parts, "encodes": encoded, "drops": dropped}

    def _decided(self, step: Step | None) -> Facts:
        if step is None:
            return {"computes (who, from, to, samples)": None, "encodes": None, "drops": None}
        parts = [(part.choice.name, part.start, part.end, part.samples) for part in step.parts]
        encoded = [key[0] for key in self.oracle.encoder.encoded]
        dropped = [key[0] for key in self.oracle.encoder.dropped]
        self.oracle.encoder.dropped = []
        return {"computes (who, from, to, samples)": parts, "encodes": encoded, "drops": dropped}

    def _heard(self) -> Facts:
        """What the gateway knows at the end."""
        heard = self.harness.heard
        return {
            "work is left": self.harness.core.has_work,
            "outputs": {name: each.tokens for name, each in heard.items()},
            "ended": {name: each.ended for name, each in heard.items()},
            "found tokens": {handle: started.cached_tokens for handle, started in self.harness.started.items()},
        }

    def _told(self) -> Facts:
        choices = [choice for asked in self.oracle.requests for choice in asked.choices]
        ran = [choice.asked for choice in choices if choice.name[0] in self.harness.started]
        return {
            "work is left": False,
            "outputs": {choice.name: choice.tokens[choice.prompt_len :] for choice in choices},
            "ended": {choice.name: bool(choice.ended) for choice in choices},
            "found tokens": {asked.spec.owner.handle: asked.found_tokens for asked in ran},
        }

    def _compare_states(self, call: str) -> None:
        core, oracle = self.harness.core, self.oracle
        running = core.scheduler.running
        engine = {
            "running": [(request.owner.handle, request.choice) for request in running],
            "computed": [request.num_computed for request in running],
            "known": [request.known for request in running],
            "blocks": [list(request.tables[0].blocks) for request in running],
            "free blocks": list(core.kv.pool.free_blocks()),
            "blocks that can be found": [b for b, name in enumerate(core.kv.pool.names) if name is not None],
            "waiting": core.load().waiting,
            "available": core.kv.available,
        }
        on_rows = oracle.running()
        second = {
            "running": [choice.name for choice in on_rows],
            "computed": [choice.computed for choice in on_rows],
            "known": [choice.known for choice in on_rows],
            "blocks": [choice.blocks for choice in on_rows],
            "free blocks": oracle.pool.free,
            "blocks that can be found": sorted(oracle.pool.names),
            "waiting": len(oracle.waiting()),
            "available": oracle.pool.available(on_rows),
        }
        self._compare(call, engine, second)

    def _compare(self, call: str, engine: Facts, oracle: Facts) -> None:
        self.calls += 1
        if engine == oracle:
            return
        lines = [f"call {self.calls}, {call}: the engine and the oracle differ"]
        for what in engine:
            if engine[what] != oracle[what]:
                lines += [f"  {what}", f"    engine {engine[what]}", f"    oracle {oracle[what]}"]
        raise Differ("\n".join(lines))
