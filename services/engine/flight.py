"""The steps on their way to the workers and back: numbered, in order, the outcome of each awaited.

blank ─▶ filled ─▶ launch ─▶ [ oldest … newest ] ─▶ land
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from services.engine.plan import StepPlan


class Flight:
    """Plans whose outcome has not come."""

    def __init__(self, kv_groups: int) -> None:
        self._kv_groups = kv_groups
        self._steps: deque[StepPlan] = deque()
        self._next_step = 1
        self._resync = False

    def __len__(self) -> int:
        return len(self._steps)

    def __iter__(self) -> Iterator[StepPlan]:
        return iter(self._steps)

    @property
    def oldest(self) -> StepPlan | None:
        """The one whose outcome comes next."""
        return self._steps[0] if self._steps else None

    def blank(self) -> StepPlan:
        """A plan to be filled. Its number is taken only if it is launched."""
        return StepPlan(self._next_step, self._resync, self._kv_groups)

    def launch(self, plan: StepPlan) -> StepPlan:
        """The plan goes out."""
        self._next_step += 1
        self._resync = False
        self._steps.append(plan)
        return plan

    def land(self, step_id: int) -> StepPlan | None:
        """The oldest step, if the outcome that came is its own; outcomes of unknown steps change nothing."""
        return self._steps.popleft() if self._steps and self._steps[0].step_id == step_id else None

    def resync(self) -> None:
        """The workers wait for a step that says that it follows on a failed one."""
        self._resync = True

    def lose(self) -> StepPlan | None:
        """Nothing that is out will come back. What was the oldest of it."""
        oldest = self.oldest
        self._steps.clear()
        self._resync = True
        return oldest
