"""Grammar masks on their way from the stream to the step that waits for them.

    a step with rows that wait ──▶ expect ──▶ wait, on the step thread, after the forward pass
    its masks ───────────────────▶ give ───────┘
    the stream ends ─────────────▶ close: nobody waits any more

Masks come in the order of the steps, so that the masks of a step, or a step that begins anew, end every
older wait. All calls but `wait` belong to one thread.
"""

from __future__ import annotations

from concurrent.futures import CancelledError, Future
from typing import Generic, TypeVar

from services.common.errors import InvalidArgument

FrameT = TypeVar("FrameT")


class MasksLost(Exception):
    """The stream ended before the masks of a step had come."""


class MaskInbox(Generic[FrameT]):
    """The frames of masks of one stream, each by its step."""

    def __init__(self) -> None:
        self._waiting: dict[int, Future[FrameT]] = {}
        self._closed = False

    def expect(self, step_id: int) -> Future[FrameT]:
        """A step has come whose masks will follow."""
        future: Future[FrameT] = Future()
        if self._closed:
            future.cancel()
        else:
            self._waiting[step_id] = future
        return future

    def give(self, step_id: int, frame: FrameT) -> None:
        """The masks of a step have come. Raises InvalidArgument where no step waits for them."""
        if step_id not in self._waiting:
            raise InvalidArgument(f"masks.step_id {step_id} names no step that waits for masks", field="masks.step_id")
        self.expire(step_id)
        self._waiting.pop(step_id).set_result(frame)

    def expire(self, before: int) -> None:
        """The masks of steps before this one will not come any more: a step that waits for some fails."""
        for step_id in [step_id for step_id in self._waiting if step_id < before]:
            message = f"the masks of step {step_id} did not come before what follows them"
            self._waiting.pop(step_id).set_exception(InvalidArgument(message, field="masks.step_id"))

    def close(self) -> None:
        """No masks come any more."""
        self._closed = True
        for future in self._waiting.values():
            future.cancel()
        self._waiting.clear()


def wait(future: Future[FrameT]) -> FrameT:
    """The masks, once they are there. Raises MasksLost once they cannot come."""
    try:
        return future.result()
    except CancelledError:
        raise MasksLost from None
