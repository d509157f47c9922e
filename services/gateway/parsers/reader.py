"""The text of an answer on its way to a grammar that reads it piece by piece.

A grammar is a generator: it reads on until the text that has come is used up, and yields for more.
So it is written as if the text were whole, hardly anything is read twice, and where the text was
cut shows nowhere. What it can't yet decide about is *held*, piece by piece, until it is told.

    text   Let me see.\\n<tool_call>{"name": "f", …
           └─ told ──┘└───── held ─────┘             settled: all before the first piece held
"""

from __future__ import annotations

import enum
import re
from collections import deque
from collections.abc import Generator
from typing import NamedTuple, TypeVar

from services.gateway.request import ToolCallDelta

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A part of a grammar: it yields whenever it needs more text, and gives a T in the end."""

SPACE = re.compile(r"[ \t\r\n]*")


class Kind(enum.Enum):
    """What a piece of text is."""

    CONTENT = 0
    REASONING = 1


class Event(NamedTuple):
    """Something to tell, known once the text up to `end` (in characters) is: a piece of text or of a call."""

    end: int
    what: Kind | ToolCallDelta
    text: str = ""


class _Piece(NamedTuple):
    start: int
    text: str
    hidden: bool


class Reader:
    """The text that came last, and where the grammar is in it. Nothing of a hidden text is ever told."""

    __slots__ = ("_again", "_base", "_ended", "_held", "at", "chunk", "events", "hidden")

    def __init__(self) -> None:
        self.chunk = ""
        self.hidden = False
        self.at = 0
        self.events: deque[Event] = deque()
        self._base = 0  # characters before the chunk
        self._ended = False
        self._held: list[_Piece] = []
        self._again: deque[_Piece] = deque()  # to be read once more, after the chunk

    # The side that the text comes from

    def feed(self, text: str, *, hidden: bool) -> None:
        """The next text; what came before must have been read."""
        self._base += len(self.chunk)
        self.chunk, self.at, self.hidden = text, 0, hidden

    def end(self) -> None:
        """No more text comes."""
        self._ended = True

    @property
    def fed(self) -> int:
        """Characters that have come."""
        return self._base + len(self.chunk)

    @property
    def surplus(self) -> bool:
        """Whether the grammar has left something unread."""
        return self.at < len(self.chunk) or bool(self._again)

    @property
    def settled(self) -> int:
        """Characters whose meaning is decided."""
        return self._held[0].start if self._held else self._base + self.at

    # The side of the grammar

    def more(self) -> Steps[bool]:
        """Waits for a character; tells whether there is one, or the text has ended."""
        while self.at == len(self.chunk):
            if self._again:
                self._base, self.chunk, self.hidden = self._again.popleft()
                self.at = 0
            elif self._ended:
                return False
            else:
                yield
        return True

    @property
    def char(self) -> str:
        """The next character."""
        return self.chunk[self.at]

    def drop(self, end: int) -> None:
        """Passes over the chunk up to `end`."""
        self.at = end

    def hold(self, end: int) -> None:
        """Holds the chunk up to `end`."""
        if end > self.at:
            self._held.append(_Piece(self._base + self.at, self.chunk[self.at : end], self.hidden))
            self.at = end

    def tell(self, kind: Kind | None, end: int) -> None:
        """Tells the chunk up to `end`; with None nobody is told."""
        if kind is not None and end > self.at and not self.hidden:
            self.events.append(Event(self._base + end, kind, self.chunk[self.at : end]))
        self.at = end

    def tell_held(self, kind: Kind | None) -> None:
        """Tells what is held; with None nobody is told."""
        if not self._held:
            return
        if kind is not None:
            self.events.extend(Event(start + len(text), kind, text) for start, text, hidden in self._held if not hidden)
        self._held.clear()

    def tell_call(self, call: ToolCallDelta) -> None:
        """Tells a piece of a call that the text up to here makes known."""
        self.events.append(Event(self._base + self.at, call))

    def back(self) -> None:
        """What is held will be read once more."""
        if self.at < len(self.chunk):
            self._held.append(_Piece(self._base + self.at, self.chunk[self.at :], self.hidden))
        self._again.extendleft(reversed(self._held))
        self._held.clear()
        if self._again:
            self._base, self.chunk, self.hidden = self._again.popleft()
            self.at = 0

    # Small grammars

    def run(self, characters: re.Pattern[str], *, held: bool) -> Steps[str]:
        """Passes over characters of some kind, and gives them. The pattern matches as many as there are."""
        passed = []
        while (yield from self.more()):
            match = characters.match(self.chunk, self.at)
            if match is None or not match[0]:
                break
            passed.append(match[0])
            if held:
                self.hold(match.end())
            else:
                self.at = match.end()
        return "".join(passed)

    def next_is(self, char: str) -> Steps[bool]:
        """Whether a character comes next; one of a hidden text never does."""
        return (yield from self.more()) and not self.hidden and self.char == char

    def literal(self, *choices: str) -> Steps[str | None]:
        """Holds one of the choices, of which none begins another; otherwise what they have in common with the text."""
        count = 0
        while (yield from self.more()):
            char = self.char
            choices = tuple([choice for choice in choices if choice[count] == char])
            if not choices:
                return None
            self.hold(self.at + 1)
            count += 1
            if len(choices[0]) == count:
                return choices[0]
        return None

    def until(self, mark: str, kind: Kind | None, *, keep_space: bool = True) -> Steps[bool]:
        """Tells the text up to a mark, which is then held; False if it never comes.

        Without `keep_space` the white space before the mark is held with it. A mark's first
        character comes in it but once, so that after a false start the search goes on behind it.
        """
        while self.at < len(self.chunk) or (yield from self.more()):  # no generator for every piece of text
            found = self.chunk.find(mark[0], self.at)
            end = len(self.chunk) if found < 0 else found
            solid = end if keep_space else self._solid_end(end)
            if solid > self.at:
                self.tell_held(kind)
                self.tell(kind, solid)
            self.hold(end)
            if found >= 0:
                if (yield from self.literal(mark)) is not None:
                    return True
                self.tell_held(kind)
        self.tell_held(kind)
        return False

    def rest(self, kind: Kind | None) -> Steps[None]:
        """Tells all that comes."""
        while self.at < len(self.chunk) or (yield from self.more()):
            self.tell(kind, len(self.chunk))

    def _solid_end(self, end: int) -> int:
        """Where the white space before `end` begins, as far as the chunk goes."""
        while end > self.at and self.chunk[end - 1] in " \t\r\n":
            end -= 1
        return end
