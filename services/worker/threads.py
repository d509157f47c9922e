"""The one thread that runs steps, and the one that waits for what they give.

    step thread     run 1 │ run 2     │ run 3
    output thread         │ finish 1  │ finish 2

A function that gives Later is finished on the output thread while the next one runs. What comes behind one that is not
finished yet is told there too, so that answers come in the order of the questions; where nothing is left for later,
that thread does not exist and nothing passes through it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")
_U = TypeVar("_U")


@dataclass(slots=True, frozen=True)
class Later(Generic[_T]):
    """What a function gives whose result has to be waited for."""

    finish: Callable[[], _T]

    def then(self, further: Callable[[_T], _U]) -> Later[_U]:
        """The same, and what is made of it."""
        return Later(lambda: further(self.finish()))


def outcome(function: Callable[[], _T]) -> _T | Exception:
    """What it gives, or what it raises."""
    try:
        return function()
    except Exception as error:
        return error


class _Thread:
    """A daemon thread that runs functions in order; a stuck one does not keep the process from ending."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, function: Callable[[], None]) -> None:
        """`function` must not raise."""
        self._queue.put(function)

    def close(self) -> None:
        """Ends it once it has run what it was given."""
        self._queue.put(None)

    def _run(self) -> None:
        while (function := self._queue.get()) is not None:
            function()


class StepThread:
    """Runs functions in order."""

    def __init__(self) -> None:
        self._steps = _Thread("step")
        self._outputs: _Thread | None = None  # once something is left for later
        self._left = 0  # for later, so far; counted on the step thread
        self._finished = 0  # of those; counted on the output thread

    def run(self, function: Callable[[], _T]) -> asyncio.Future[_T]:
        """Runs `function` behind all that was asked before; the future belongs to the running loop.

        One that is cancelled before its turn is not run.
        """
        future: asyncio.Future[_T] = asyncio.get_running_loop().create_future()

        def settle(result: _T | Exception | None) -> None:
            if future.done():
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)  # type: ignore[arg-type]  # None where it was cancelled

        self.post(lambda: None if future.cancelled() else function(), settle)
        return future

    def post(self, function: Callable[[], _T | Later[_T]], done: Callable[[_T | Exception], None]) -> None:
        """The same without a future: `done` is called in the running loop with the result, or with what was raised."""
        self._steps.put(partial(self._step, asyncio.get_running_loop(), function, done))

    def close(self) -> None:
        """Ends the threads once they have run what they were given."""
        self._steps.put(self._close_outputs)
        self._steps.close()

    def _step(
        self,
        loop: asyncio.AbstractEventLoop,
        function: Callable[[], _T | Later[_T]],
        done: Callable[[_T | Exception], None],
    ) -> None:
        result = outcome(function)
        if not isinstance(result, Later) and self._left == self._finished:
            _tell(loop, done, result)
            return
        if self._outputs is None:
            self._outputs = _Thread("output")
        self._left += 1
        self._outputs.put(partial(self._finish, loop, result, done))

    def _finish(
        self,
        loop: asyncio.AbstractEventLoop,
        result: Later[_T] | _T | Exception,
        done: Callable[[_T | Exception], None],
    ) -> None:
        _tell(loop, done, outcome(result.finish) if isinstance(result, Later) else result)
        self._finished += 1

    def _close_outputs(self) -> None:
        if self._outputs is not None:
            self._outputs.close()


def _tell(loop: asyncio.AbstractEventLoop, done: Callable[[Any], None], result: Any) -> None:
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(done, result)
