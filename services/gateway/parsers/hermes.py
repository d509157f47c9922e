"""Calls as Hermes and Qwen write them: a JSON object between two tags, once per call."""

from __future__ import annotations

import re

from services.gateway.parsers.calls import Calls
from services.gateway.parsers.reader import SPACE, Kind, Reader, Steps
from services.gateway.parsers.shape import CallShape, ToolFormat

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
_SURPLUS = re.compile(r"[ \t\r\n}]*")


def _read(reader: Reader, calls: Calls) -> Steps[None]:
    while (yield from reader.until(OPEN, Kind.CONTENT, keep_space=False)):
        while (yield from calls.object()):
            if not calls.parallel:
                return
            if not (yield from _ends_in_another(reader)):
                break
        reader.tell_held(Kind.CONTENT)


def _ends_in_another(reader: Reader) -> Steps[bool]:
    """Reads what ends a call: its tag, with braces too many before it, or the next call's tag, which is then held."""
    yield from reader.run(SPACE, held=False)
    yield from reader.run(_SURPLUS, held=True)
    tag = yield from reader.literal(CLOSE, OPEN)
    if tag is None and (yield from reader.more()):
        reader.back()
    elif tag != OPEN:  # the end of the text may cut the tag off
        reader.tell_held(None)
        yield from reader.run(SPACE, held=False)
    return tag == OPEN


HERMES = ToolFormat(
    "hermes",
    CallShape(f'{OPEN}\n{{"name": "', '", "arguments": ', f"}}\n{CLOSE}", between="\n"),
    (OPEN, CLOSE),
    _read,
)
