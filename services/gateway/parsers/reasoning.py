"""Reasoning at the beginning of an answer, between two tags. Knows nothing of what follows it."""

from __future__ import annotations

from services.gateway.parsers.reader import SPACE, Kind, Reader, Steps
from services.gateway.request import ReasoningOptions


def read_reasoning(reader: Reader, options: ReasoningOptions) -> Steps[None]:
    """Tells reasoning and passes over its tags, the white space before the first and after the last of them.

    The first closing tag ends it, whatever it says before. Without a closing tag all is reasoning. An answer
    that does not begin with it has none, and is left to be read.
    """
    yield from reader.run(SPACE, held=True)
    if (yield from reader.literal(options.open)) is not None:
        reader.tell_held(None)
    else:
        reader.back()
        if not options.inside:
            return
    if (yield from reader.until(options.close, Kind.REASONING if options.shown else None)):
        reader.tell_held(None)
        yield from reader.run(SPACE, held=False)
