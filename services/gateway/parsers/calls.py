"""A call of a tool, read from the JSON object that stands for it. Knows no format's marks.

    {"name": "f", "arguments": {"a": [1, "}"]}}
              └ the call is told     └ told as it comes, as it is written

Arguments that come before the name wait for it, those written as a JSON string are decoded. Models
write JSON that is not quite right: what a strict reader would refuse is passed on as it is, as long
as it is clear where the call ends.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection

from services.gateway.parsers.reader import SPACE, Reader, Steps
from services.gateway.request import ToolCallDelta

_IN_STRING = re.compile(r'[^"\\]*')
_BETWEEN_STRINGS = re.compile(r'[^"{}\[\]<]*')
_SCALAR = re.compile(r'[^\s,:"{}\[\]<]*')
_HEX = re.compile(r"[0-9A-Fa-f]")
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", *_ARGUMENTS)
_BROKEN = "\N{REPLACEMENT CHARACTER}"

Sink = Callable[[str], object]


class Calls:
    """The calls of one answer, as far as they are known.

    names     the tools that were offered
    parallel  whether the answer goes on after a call
    open      whether the last call has begun and its arguments are not complete
    """

    __slots__ = ("_reader", "count", "names", "open", "parallel")

    def __init__(self, reader: Reader, names: Collection[str], *, parallel: bool) -> None:
        self.count = 0
        self.open = False
        self.names = names
        self.parallel = parallel
        self._reader = reader

    def object(self, only: Collection[str] | None = None) -> Steps[bool]:
        """Reads a call from white space and an object; False if it is none, and then all of it is held.

        With `only` it is one if it has one of these names, and nothing before the name that calls don't have.
        """
        yield from self._reader.run(SPACE, held=True)
        if not (yield from self._reader.next_is("{")):
            return False
        return (yield from _Object(self._reader, self, only).read())

    def named(self, name: str) -> Steps[None]:
        """Reads a call whose name is known from the object of its arguments."""
        call = _Object(self._reader, self, None)
        call.name(name)
        yield from self._reader.run(SPACE, held=False)
        if not (yield from self._reader.more()):
            return
        if not (yield from self._reader.next_is("{")) or (yield from call.container(call.argue)):
            call.close()


class _Object:
    """One call. Until its name is known, all that is read is held."""

    __slots__ = ("_argued", "_calls", "_complete", "_early", "_index", "_only", "_reader", "_wrote")

    def __init__(self, reader: Reader, calls: Calls, only: Collection[str] | None) -> None:
        self._reader = reader
        self._calls = calls
        self._only = only
        self._index: int | None = None
        self._argued = False  # arguments have begun
        self._early: list[str] = []  # arguments before the name
        self._wrote = False  # arguments that are not empty
        self._complete = False  # and they are all there

    # What is told

    def name(self, name: str) -> None:
        """The name is known: this is a call."""
        self._index = self._calls.count
        self._calls.count += 1
        self._calls.open = not self._complete
        self._reader.tell_held(None)
        call_id = f"call_{secrets.token_hex(12)}"
        self._reader.tell_call(ToolCallDelta(self._index, "".join(self._early), call_id, name))

    def argue(self, text: str) -> None:
        """More of the arguments."""
        if not text or self._reader.hidden:
            return
        self._wrote = True
        if self._index is None:
            self._early.append(text)
        else:
            self._reader.tell_call(ToolCallDelta(self._index, text))

    def argued(self) -> None:
        """The arguments are complete, if there are any."""
        self._complete = self._wrote
        if self._index is not None:
            self._calls.open = not self._complete

    def close(self) -> None:
        """The call is complete; without arguments it has an empty object."""
        if self._index is None:
            return
        self._calls.open = False
        if not self._wrote:
            self._reader.tell_call(ToolCallDelta(self._index, "{}"))

    # What is read

    def read(self) -> Steps[bool]:
        """Reads from the opening brace on. True if it was a call, be it complete or not."""
        reader = self._reader
        self._pass(reader.at + 1)
        while (yield from self._more()):
            if reader.char == "}":
                self._pass(reader.at + 1)
                self.close()
                break
            if reader.char == ",":
                self._pass(reader.at + 1)
            elif reader.hidden or reader.char != '"' or not (yield from self._member()):
                break
        return self._index is not None

    def _more(self) -> Steps[bool]:
        yield from self._reader.run(SPACE, held=self._index is None)
        return (yield from self._reader.more())

    def _pass(self, end: int) -> None:
        if self._index is None:
            self._reader.hold(end)
        else:
            self._reader.drop(end)

    def _member(self) -> Steps[bool]:
        """Reads a key and its value; False if there is nothing more to be read."""
        parts: list[str] = []
        if not (yield from self._string(parts.append)) or not (yield from self._more()) or self._reader.char != ":":
            return False
        self._pass(self._reader.at + 1)
        key = "".join(parts)
        if not (yield from self._more()) or (self._index is None and self._only is not None and key not in _KEYS):
            return False
        if key == "name" and self._index is None:
            return (yield from self._name())
        if key in _ARGUMENTS and not self._argued:
            self._argued = True
            if not (yield from self._value(self.argue)):
                return False
            self.argued()
            return True
        return (yield from self._value(lambda _: None))

    def _name(self) -> Steps[bool]:
        parts: list[str] = []
        if self._reader.char != '"' or not (yield from self._string(parts.append)):
            return False
        name = "".join(parts)
        if not name or (self._only is not None and name not in self._only):
            return False
        self.name(name)
        return True

    def _value(self, sink: Sink) -> Steps[bool]:
        char = self._reader.char
        if char == '"':
            return (yield from self._string(sink))
        if char in "{[":
            return (yield from self.container(sink))
        nothing = char == "n"  # null
        while (yield from self._reader.more()):
            end = _end(_SCALAR, self._reader.chunk, self._reader.at)
            if end == self._reader.at:
                return True
            text = self._reader.chunk[self._reader.at : end]
            self._pass(end)
            if not nothing:
                sink(text)
        return False

    def container(self, sink: Sink) -> Steps[bool]:
        """Reads an object or an array as it is written; False where it breaks off.

        A bracket that closes another kind closes all that were opened since that one.
        """
        reader = self._reader
        nesting = _Nesting()
        while reader.at < len(reader.chunk) or (yield from reader.more()):
            if reader.hidden and not nesting.in_string:
                return False
            start = reader.at
            end = len(reader.chunk) if reader.hidden else nesting.scan(reader.chunk, start)
            text = reader.chunk[start:end]
            self._pass(end)
            sink(text)
            if nesting.done:
                return True
            if nesting.broken:
                return False
        return False

    def _string(self, sink: Sink) -> Steps[bool]:
        """Reads and decodes a string; False if it does not end."""
        reader = self._reader
        self._pass(reader.at + 1)
        high = ""  # the first half of a character that is written as two
        while (yield from reader.more()):
            end = len(reader.chunk) if reader.hidden else _end(_IN_STRING, reader.chunk, reader.at)
            if end > reader.at:
                text = reader.chunk[reader.at : end]
                self._pass(end)
                sink(_joined(high, text))
                high = ""
            elif reader.char == '"':
                self._pass(end + 1)
                sink(_joined(high, ""))
                return True
            else:
                text = high + (yield from self._escape())
                high = text[-1] if "\ud800" <= text[-1:] <= "\udbff" else ""
                sink(_joined(text[: len(text) - len(high)], ""))
        return False

    def _escape(self) -> Steps[str]:
        """Reads a backslash and what it stands for; what is no escape stands for itself. Nothing if it is cut off."""
        reader = self._reader
        written = "\\"
        reader.hold(reader.at + 1)
        while (yield from reader.more()):
            if len(written) > 1 and not _HEX.match(reader.char):
                text = written
                break
            written += reader.char
            reader.hold(reader.at + 1)
            if len(written) == 6 or written[1] != "u":
                text = _unescaped(written)
                break
        else:
            text = ""
        if self._index is not None:
            reader.tell_held(None)
        return text


class _Nesting:
    """Where a scan is in nested brackets and strings."""

    __slots__ = ("_after_backslash", "_closers", "_open", "broken", "done", "in_string")

    def __init__(self) -> None:
        self.in_string = False
        self.done = False
        self.broken = False
        self._after_backslash = False
        self._closers: list[str] = []
        self._open = {"}": 0, "]": 0}  # how often each of them is in the list

    def scan(self, text: str, at: int) -> int:
        """Goes on through the text; gives where it stops."""
        while at < len(text) and not self.done:
            if self._after_backslash:
                self._after_backslash = False
                at += 1
                continue
            at = _end(_IN_STRING if self.in_string else _BETWEEN_STRINGS, text, at)
            if at == len(text):
                break
            char = text[at]
            if char == '"':
                self.in_string = not self.in_string
            elif self.in_string:
                self._after_backslash = True
            elif char in "{[":
                closer = "}" if char == "{" else "]"
                self._closers.append(closer)
                self._open[closer] += 1
            elif not self._close(char):
                self.broken = True
                break
            at += 1
        return at

    def _close(self, char: str) -> bool:
        if not self._open.get(char):
            return False
        last = ""
        while last != char:
            last = self._closers.pop()
            self._open[last] -= 1
        self.done = not self._closers
        return True


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()


def _joined(half: str, text: str) -> str:
    """Text after what may be half of a character: two halves make one, a half alone is broken."""
    return (half + text).encode("utf-16", "surrogatepass").decode("utf-16", "replace") if half else text


def _unescaped(written: str) -> str:
    try:
        text: str = json.loads(f'"{written}"')
    except ValueError:
        return written
    return text
