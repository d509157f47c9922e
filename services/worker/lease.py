"""Which engine incarnation a worker serves: one at a time, the newest to ask.

nobody ── Load or ExecuteOpen of A ──▶ A ── of B ──▶ B     (A is fenced: it is refused from now on)
A ── its stream ends, or no frame for lease_ms ──▶ nobody  (A may come back)
"""

from __future__ import annotations

from services.common.errors import FailedPrecondition, Fenced


class Lease:
    """Who holds the worker. Incarnations are random numbers; newer means: came later."""

    def __init__(self) -> None:
        self.holder: int | None = None
        self._fenced: set[int] = set()

    def take(self, incarnation: int) -> bool:
        """Gives the worker to `incarnation`; True if it was another's. Raises Fenced for an older one."""
        self._refuse_fenced(incarnation)
        changed = self.holder != incarnation
        if self.holder is not None and changed:
            self._fenced.add(self.holder)
        self.holder = incarnation
        return changed

    def check(self, incarnation: int) -> None:
        """Raises unless `incarnation` holds the worker."""
        self._refuse_fenced(incarnation)
        if self.holder != incarnation:
            raise FailedPrecondition(
                f"incarnation {incarnation} does not hold this worker: call Load first", field="engine_incarnation"
            )

    def release(self, incarnation: int) -> None:
        """Nobody holds the worker any more, if `incarnation` did."""
        if self.holder == incarnation:
            self.holder = None

    def _refuse_fenced(self, incarnation: int) -> None:
        if incarnation in self._fenced:
            raise Fenced(f"incarnation {incarnation} is fenced: a newer engine took this worker")
