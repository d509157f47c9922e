"""Calls as Mistral's models write them after a marker: first as one JSON array, later by name; both are read.

[TOOL_CALLS][{"name": "f", "arguments": {}}, …]
[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{}         with or without the id, and by some models without [ARGS]
"""

from __future__ import annotations

import re

from services.gateway.parsers.calls import Calls
from services.gateway.parsers.reader import SPACE, Kind, Reader, Steps
from services.gateway.parsers.shape import CallShape, ToolFormat

TAG = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"
_NAME = re.compile(r"[A-Za-z0-9_.\-]*")


def _read(reader: Reader, calls: Calls) -> Steps[None]:
    while (yield from reader.until(TAG, Kind.CONTENT, keep_space=False)):
        yield from reader.run(SPACE, held=True)
        if (yield from reader.next_is("[")):
            yield from _array(reader, calls)
        else:
            yield from _named(reader, calls)
        if calls.count and not calls.parallel:
            return
        reader.tell_held(Kind.CONTENT)


def _array(reader: Reader, calls: Calls) -> Steps[None]:
    reader.hold(reader.at + 1)
    while (yield from calls.object()) and calls.parallel:
        yield from reader.run(SPACE, held=False)
        if (yield from reader.next_is("]")):
            reader.drop(reader.at + 1)
            yield from reader.run(SPACE, held=False)
            return
        if not (yield from reader.next_is(",")):
            return
        reader.hold(reader.at + 1)


def _named(reader: Reader, calls: Calls) -> Steps[None]:
    name = yield from reader.run(_NAME, held=True)
    yield from reader.run(SPACE, held=True)
    if not name:
        return
    if not (yield from reader.next_is("{")):
        mark = yield from reader.literal(ARGS, CALL_ID)
        if mark == CALL_ID:
            yield from reader.run(_NAME, held=True)
            mark = yield from reader.literal(ARGS)
        if mark is None:
            return
    yield from calls.named(name)
    if calls.parallel:
        yield from reader.run(SPACE, held=False)


MISTRAL = ToolFormat(
    "mistral",
    CallShape('{"name": "', '", "arguments": ', "}", opening=f"{TAG}[", between=", ", closing="]"),
    (TAG, CALL_ID, ARGS),
    _read,
)
MISTRAL_NAMED = ToolFormat("mistral_named", CallShape(TAG, ARGS), (TAG, CALL_ID, ARGS), _read)
