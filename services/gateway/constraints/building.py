"""Constraints off the event loop: read, combined, and tried out on the library before the engine sees them."""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from services.gateway.asked import Asked
from services.gateway.constraints.combining import combine
from services.gateway.constraints.parts import LONGEST, Calls, Surroundings, Wanted, refuse
from services.gateway.constraints.reading import asked_in, read
from services.gateway.constraints.trial import complaint
from services.gateway.fields import Caller
from services.gateway.request import Constraint

LIMIT_S = 10.0
"""How long a request waits for its constraint."""

_OBJECT = re.compile(r"[ \t\r\n]*(?:\{|\Z)")
_JSON = re.compile(r"[ \t\r\n\[]*(?:[{\]\"tfn0-9-]|\Z)")


class Constraints:
    """Makes the constraints of requests. One per process; `close` lets its threads end."""

    def __init__(self, *, threads: int = 2, limit_s: float = LIMIT_S) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="constraints")
        self._limit_s = limit_s

    def close(self) -> None:
        """Lets the threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def build(
        self, asked: Asked, caller: Caller, *, calls: Calls | None = None, around: Surroundings | None = None
    ) -> Constraint | None:
        """What the output must follow; None where it is free. Raises InvalidArgument that names the place."""
        said = asked_in(asked)
        if not said and not (calls and calls.hold):
            return None
        work = asyncio.get_running_loop().run_in_executor(
            self._pool, build, asked, caller, calls, around or Surroundings()
        )
        try:
            return await asyncio.wait_for(work, self._limit_s)
        except TimeoutError:
            place = caller.spell(said[0] if said else "tools")
            raise refuse(place, f"took longer than {self._limit_s:g} s to check") from None


def build(asked: Asked, caller: Caller, calls: Calls | None, around: Surroundings) -> Constraint | None:
    """The same where it may take its time."""
    wanted = read(asked, caller)
    constraint = combine(wanted, calls, around)
    if constraint is not None:
        place = _place(wanted, calls)
        error = complaint(constraint) if len(constraint.text) <= LONGEST else "the grammar that holds it is too long"
        if error is not None:
            raise refuse(place, error)
        constraint = replace(constraint, place=place, begins=None if wanted is None else _begins(wanted))
    return constraint


def _begins(wanted: Wanted) -> re.Pattern[str] | None:
    """What the beginning of an answer matches, however short it is; None where that is not known."""
    if wanted.kind == "json_object":
        return _OBJECT
    if wanted.kind != "json_schema":
        return None
    schema = json.loads(wanted.text)
    root = schema["$defs"][schema["$ref"].removeprefix("#/$defs/")] if "$ref" in schema else schema
    return _OBJECT if root.get("type") == "object" else _JSON


def _place(wanted: Wanted | None, calls: Calls | None) -> str:
    """Where a client said what the grammar is of."""
    if wanted is not None and not (calls is not None and calls.choice.forced):
        return wanted.field
    return calls.field if calls is not None else "tools"
