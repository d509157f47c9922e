"""Deltas of several requests as one sequence, each with the number of its request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from services.common.errors import TriptychError
from services.gateway.request import Delta

Numbered = list[tuple[int, Delta]]


class Source(Protocol):
    """A request that runs."""

    async def read(self) -> list[Delta]:
        """What is new; nothing after the end."""
        ...

    def close(self) -> None:
        """Ends it, if it has not ended."""
        ...


class Merge:
    """Read it until nothing comes, or until a request fails; `close` it however that ends."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._open = len(sources)
        self._queue: asyncio.Queue[tuple[int, list[Delta] | TriptychError]] = asyncio.Queue(maxsize=len(sources))
        self._pumps: list[asyncio.Task[None]] = []

    async def read(self) -> Numbered:
        """What is new of any request: it waits until there is something."""
        if len(self._sources) == 1:
            return [(0, delta) for delta in await self._sources[0].read()]
        if not self._pumps:
            self._pumps = [asyncio.create_task(self._pump(number)) for number in range(len(self._sources))]
        news: Numbered = []
        while self._open and not news:
            self._take(await self._queue.get(), news)
            while not self._queue.empty():
                self._take(self._queue.get_nowait(), news)
        return news

    def _take(self, entry: tuple[int, list[Delta] | TriptychError], news: Numbered) -> None:
        number, deltas = entry
        if isinstance(deltas, TriptychError):
            raise deltas
        self._open -= not deltas
        news += [(number, delta) for delta in deltas]

    async def _pump(self, number: int) -> None:
        deltas: list[Delta] | None = None
        try:
            while deltas != []:
                deltas = await self._sources[number].read()
                await self._queue.put((number, deltas))
        except TriptychError as error:
            await self._queue.put((number, error))

    async def close(self) -> None:
        """Ends all requests."""
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for source in self._sources:
            source.close()
