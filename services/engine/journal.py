"""What the log says of requests: one line at the end of each, one for each that is preempted. A storm of
preemptions is cut to what somebody can read, and the number of lines left out is told.
"""

from __future__ import annotations

from collections.abc import Iterable

from services.common import tracing
from services.common.logs import Log
from services.engine.events import Failed
from services.engine.metrics import finished_reason
from services.engine.records import Record
from services.engine.report import Preemption

PREEMPTION_LINES = 10
"""Lines about preemptions in one window."""
WINDOW_S = 1.0
_log = Log("engine")


class Journal:
    """The lines. It keeps nothing but how many preemptions it has told of lately."""

    def __init__(self) -> None:
        self._window_ends = 0.0
        self._told = 0
        self.left_out = 0

    def preempted(self, preemptions: Iterable[Preemption], now: float) -> bool:
        """One line each; True where the first is left out, so that `tell_left_out` is to follow in a window's time."""
        if now >= self._window_ends:
            self._window_ends, self._told = now + WINDOW_S, 0
        began = not self.left_out
        for each in preemptions:
            if self._told >= PREEMPTION_LINES:
                self.left_out += 1
                continue
            self._told += 1
            _log.info(
                "preempted",
                request_id=each.request_id,
                choice=each.choice,
                by=each.by_request_id,
                by_choice=each.by_choice,
                reason=each.reason,
            )
        return began and self.left_out > 0

    def tell_left_out(self) -> None:
        """How many lines were left out since this was last told."""
        _log.warning("preemptions left out of the log", count=self.left_out)
        self.left_out = 0

    def failed(self, event: Failed, record: Record) -> None:
        """A request failed through us: the id that its client was given, for whoever looks for it here."""
        failure = event.failure
        if failure.error_id is not None:
            _log.error(
                "request failed",
                request_id=record.spec.request_id,
                trace_id=tracing.trace_id(record.spec.traceparent),
                choice=event.choice,
                error_id=failure.error_id,
                message=failure.message,
            )

    def finished(self, record: Record) -> None:
        """A request has ended."""
        spec, started = record.spec, record.started
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
