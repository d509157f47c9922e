"""Calls as Llama 3.1 and later write them: bare JSON objects, with semicolons between them, perhaps after a tag.

An object without a tag is a call only where the text begins with it, and if it names an offered tool.
"""

from __future__ import annotations

from services.gateway.parsers.calls import Calls
from services.gateway.parsers.reader import SPACE, Kind, Reader, Steps
from services.gateway.parsers.shape import CallShape, ToolFormat

TAG = "<|python_tag|>"


def _read(reader: Reader, calls: Calls) -> Steps[None]:
    yield from reader.run(SPACE, held=True)
    begins = yield from reader.next_is("{")
    while begins or (yield from reader.until(TAG, Kind.CONTENT, keep_space=False)):
        only = calls.names if begins else None
        while (yield from calls.object(only)):
            if not calls.parallel:
                return
            if not (yield from _another(reader)):
                break
        reader.tell_held(Kind.CONTENT)
        begins = False


def _another(reader: Reader) -> Steps[bool]:
    """Whether one more object follows a call. What is between them is held."""
    yield from reader.run(SPACE, held=False)
    if (yield from reader.next_is(";")):
        reader.hold(reader.at + 1)
        yield from reader.run(SPACE, held=True)
    return (yield from reader.next_is("{"))


LLAMA3 = ToolFormat("llama3", CallShape('{"name": "', '", "parameters": ', "}", between="; "), (TAG,), _read)
