"""What an operator asks of a running engine: pause, sleep, drain, and back.

              schedules   KV of requests   cached prefixes   device memory
pause         no          kept or freed    kept              kept
sleep         no          freed            forgotten         freed
drain         yes         kept             kept              kept

Requests stay in all three. A pause and a sleep are apart: ending one does not end the other.
"""

from __future__ import annotations

import asyncio

from services.common.logs import Log
from services.engine.loop import EngineLoop
from services.engine.workers import WorkerGroup

_PAUSE, _SLEEP = "pause", "sleep"
_log = Log("engine.control")


class Control:
    """One per engine. Everything may be asked again, and at any time."""

    def __init__(self, loop: EngineLoop, workers: WorkerGroup) -> None:
        self._loop = loop
        self._workers = workers
        self._changing = asyncio.Lock()  # one sleep or wake-up at a time
        self._drain_timer: asyncio.TimerHandle | None = None

    async def pause(self, preempt: bool) -> None:
        """Returns once no step is in flight; with `preempt` no request holds KV then."""
        self._loop.hold(_PAUSE, "the engine is paused")
        if await self._loop.settled() and preempt:
            self._loop.preempt_all()

    def unpause(self) -> None:
        """Schedules again, unless the engine sleeps."""
        self._loop.unhold(_PAUSE)

    async def sleep(self, level: int) -> int:
        """Frees device memory: level 1 the KV cache, level 2 the weights too. The bytes freed by this call.

        Where the workers refuse, or are lost, the engine goes on as it was. What has begun is finished,
        even if the caller hangs up.
        """
        return await asyncio.shield(asyncio.ensure_future(self._sleep(level)))

    async def _sleep(self, level: int) -> int:
        async with self._changing:
            if level <= self._workers.asleep:
                return 0
            self._loop.hold(_SLEEP, "the engine sleeps")
            try:
                await self._loop.settled()
                freed = await self._workers.sleep(level)
            finally:
                if not self._workers.asleep:
                    self._loop.unhold(_SLEEP)
            self._loop.forget_worker()
            _log.info("asleep", level=level, freed_bytes=freed)
            return freed

    async def wake_up(self) -> None:
        """Undoes `sleep`; the cached prefixes are gone. What has begun is finished, even if the caller hangs up."""
        await asyncio.shield(asyncio.ensure_future(self._wake_up()))

    async def _wake_up(self) -> None:
        async with self._changing:
            if self._workers.asleep:
                await self._workers.wake_up()
                self._loop.unhold(_SLEEP)
                _log.info("awake")

    def drain(self, grace_s: float | None) -> int:
        """Refuses new requests, and ends those still live after `grace_s`; the latest call holds. Who is live now."""
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None
        self._loop.drain(grace_s)
        live = self._loop.sessions.live
        if grace_s is not None:
            self._drain_timer = asyncio.get_running_loop().call_later(grace_s, self._end_all)
        _log.info("draining", live=live, grace_s=grace_s)
        return live

    def _end_all(self) -> None:
        _log.info("time to drain is over", live=self._loop.sessions.live)
        self._loop.abort_all()
