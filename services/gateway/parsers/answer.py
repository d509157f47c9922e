"""One answer, read as it comes: reasoning, then text and calls of tools.

push(text) … ──▶ reader ──▶ reasoning ──▶ a format of calls, or the rest ──▶ events, settled
"""

from __future__ import annotations

import re
from collections import deque

from services.gateway.parsers.calls import Calls
from services.gateway.parsers.formats import tool_format
from services.gateway.parsers.reader import Event, Kind, Reader, Steps
from services.gateway.parsers.reasoning import read_reasoning
from services.gateway.request import ReasoningOptions, ToolOptions


class AnswerParser:
    """The text of one choice.

    ended      whether the answer ends though more text may come; that is not read
    answer_at  characters before the answer: reasoning with its tags; None while they go on

    A constraint may leave no answer but calls and text that `begins` matches, be it only the beginning of one.
    """

    __slots__ = ("_begins", "_calls", "_forced", "_reader", "_steps", "answer_at", "ended", "events")

    def __init__(
        self,
        reasoning: ReasoningOptions | None,
        tools: ToolOptions | None,
        begins: re.Pattern[str] | None = None,
    ) -> None:
        self.ended = False
        self._reader = Reader()
        self._calls = Calls(self._reader, tools.names if tools else (), parallel=tools is None or tools.parallel)
        self._begins = begins
        self._forced = tools is not None and tools.forced
        self.answer_at = 0 if reasoning is None else None
        self._steps = self._read(reasoning, tools)
        self.events: deque[Event] = self._reader.events

    @property
    def surplus(self) -> bool:
        """Whether some of the text that has come was not read."""
        return self._reader.surplus

    @property
    def called(self) -> bool:
        """Whether there was a call."""
        return self._calls.count > 0

    @property
    def open(self) -> bool:
        """Whether the last call is not complete."""
        return self._calls.open

    @property
    def fed(self) -> int:
        """Characters that have come."""
        return self._reader.fed

    @property
    def settled(self) -> int:
        """Characters that nothing which still comes will change: their events are there."""
        return self._reader.fed if self.ended else self._reader.settled

    def push(self, text: str, *, hidden: bool = False) -> None:
        """The next text; a hidden one is read and never told."""
        if self.ended or not text:
            return
        self._reader.feed(text, hidden=hidden)
        self.ended = not self._proceed()

    def finish(self) -> None:
        """No more text comes: what was undecided is text, or where that can't come the beginning of something else."""
        if self.ended:
            return
        self._reader.end()
        known = len(self.events)
        first = self.answer_at is None or self.answer_at == self._reader.settled
        self._proceed()
        last = [self.events.pop() for _ in range(len(self.events) - known)][::-1]
        if not self._may_be_text("".join(text for _, what, text in last if what is Kind.CONTENT), first=first):
            last = [event for event in last if event.what is not Kind.CONTENT]
        self.events.extend(last)

    def _may_be_text(self, text: str, *, first: bool) -> bool:
        """Whether the end of the answer, which is all of it if it is the `first`, can be text."""
        if self._forced:
            return False
        return self._begins is None or not (self.called or (first and not self._begins.match(text)))

    def _proceed(self) -> bool:
        """Whether the grammar wants more."""
        for _ in self._steps:
            return True
        return False

    def _read(self, reasoning: ReasoningOptions | None, tools: ToolOptions | None) -> Steps[None]:
        reader = self._reader
        if reasoning is not None:
            yield from read_reasoning(reader, reasoning)
            self.answer_at = reader.settled
        if tools is not None:
            yield from tool_format(tools.format).read(reader, self._calls)
        else:
            yield from reader.rest(Kind.CONTENT)
