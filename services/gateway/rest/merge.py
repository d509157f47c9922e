"""Several streams of deltas as one, each delta with the number of its stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from services.common.errors import TriptychError
from services.gateway.request import Delta

Numbered = AsyncGenerator[tuple[int, Delta], None]


async def merge(streams: Sequence[AsyncGenerator[Delta, None]]) -> Numbered:
    """Deltas in the order they come. The first failure, or closing, ends all streams."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for delta in only:
                yield 0, delta
        return
    queue: asyncio.Queue[tuple[int, Delta | TriptychError | None]] = asyncio.Queue(maxsize=len(streams))

    async def pump(number: int, stream: AsyncGenerator[Delta, None]) -> None:
        end: TriptychError | None = None
        try:
            async with aclosing(stream):
                async for delta in stream:
                    await queue.put((number, delta))
        except TriptychError as error:
            end = error
        await queue.put((number, end))

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    open_streams = len(streams)
    try:
        while open_streams:
            number, item = await queue.get()
            if isinstance(item, TriptychError):
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
