"""Deltas to the items of a response, each change told as events.

    item added ── part added ── delta … ── text done ── part done ── item done     reasoning, message
    item added ── arguments delta … ── arguments done ── item done                 function_call

One item is open at a time. The items of a whole answer are those of its only delta: the same code.
A delta does not say whether its text or its calls came first, so it is taken for text, then calls; text
that a stream brings after a call is a further message there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, TypeVar

import orjson

from services.gateway.request import Delta, FinishReason
from services.gateway.rest.shapes import ChatLogprobs

Json = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]


class Events:
    """Makes the events of one response, numbered through."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, kind: str, fields: Json) -> bytes:
        """One server-sent event with its name."""
        data = orjson.dumps({"type": kind, "sequence_number": self._next, **fields})
        self._next += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


class Item(ABC):
    """An item that grows. `place` numbers it in the response."""

    prefix: ClassVar[str]

    def __init__(self, events: Events, name: str, place: int) -> None:
        self.id = f"{self.prefix}_{name}_{place}"
        self._events = events
        self._place = place
        self._pieces: list[str] = []

    @abstractmethod
    def json(self, status: Status) -> Json:
        """The item as a document; empty while it is in progress."""

    @abstractmethod
    def add(self, piece: str) -> bytes:
        """More of its text, and the event that tells it."""

    def begin(self) -> bytes:
        """The events with which it appears."""
        item = self.json("in_progress")
        return self._events("response.output_item.added", {"output_index": self._place, "item": item})

    def end(self, status: Status) -> bytes:
        """The events with which it is complete, or as complete as it gets."""
        item = self.json(status)
        return self._events("response.output_item.done", {"output_index": self._place, "item": item})

    def _tell(self, kind: str, fields: Json) -> bytes:
        return self._events(f"response.{kind}", {"item_id": self.id, "output_index": self._place, **fields})


class _Text(Item):
    """An item with one part, which is text. `kind` is what events call it."""

    kind: ClassVar[str]

    @abstractmethod
    def part(self, text: str) -> Json:
        """The part with this text."""

    def content(self, status: Status) -> list[Json]:
        """The part, once it is complete."""
        return [] if status == "in_progress" else [self.part("".join(self._pieces))]

    def begin(self) -> bytes:
        """The item, then its part."""
        return super().begin() + self._tell("content_part.added", {"content_index": 0, "part": self.part("")})

    def end(self, status: Status) -> bytes:
        """The text, the part, the item."""
        part = self.part("".join(self._pieces))
        done: Json = {"content_index": 0, **{key: part[key] for key in ("text", "logprobs") if key in part}}
        told = self._tell(f"{self.kind}.done", done) + self._tell(
            "content_part.done", {"content_index": 0, "part": part}
        )
        return told + super().end(status)


class Reasoning(_Text):
    """What the model thought before it answered."""

    prefix = "rs"
    kind = "reasoning_text"

    def part(self, text: str) -> Json:
        """Reasoning as it is; there are no summaries."""
        return {"type": "reasoning_text", "text": text}

    def json(self, status: Status) -> Json:
        """The item."""
        return {"id": self.id, "type": "reasoning", "summary": [], "content": self.content(status), "status": status}

    def add(self, piece: str) -> bytes:
        """More reasoning."""
        self._pieces.append(piece)
        return self._tell("reasoning_text.delta", {"content_index": 0, "delta": piece})


class Message(_Text):
    """What the model said."""

    prefix = "msg"
    kind = "output_text"

    def __init__(self, events: Events, name: str, place: int) -> None:
        super().__init__(events, name, place)
        self._logprobs: list[Json] = []

    def part(self, text: str) -> Json:
        """The text with the log probabilities that were asked for."""
        logprobs = self._logprobs if text else []
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def json(self, status: Status) -> Json:
        """The item."""
        content = self.content(status)
        return {"id": self.id, "type": "message", "role": "assistant", "content": content, "status": status}

    def add(self, piece: str, logprobs: Sequence[Json] = ()) -> bytes:
        """More text, with the entries of its tokens."""
        self._pieces.append(piece)
        self._logprobs.extend(logprobs)
        return self._tell("output_text.delta", {"content_index": 0, "delta": piece, "logprobs": logprobs})


class Call(Item):
    """A call of a function."""

    prefix = "fc"

    def __init__(self, events: Events, name: str, place: int, *, call_id: str, function: str) -> None:
        super().__init__(events, name, place)
        self._call_id = call_id
        self._function = function

    def json(self, status: Status) -> Json:
        """The item."""
        return {
            "id": self.id,
            "type": "function_call",
            "call_id": self._call_id,
            "name": self._function,
            "arguments": "".join(self._pieces),
            "status": status,
        }

    def add(self, piece: str) -> bytes:
        """More of the arguments."""
        self._pieces.append(piece)
        return self._tell("function_call_arguments.delta", {"delta": piece})

    def end(self, status: Status) -> bytes:
        """The arguments, the item."""
        done = {"name": self._function, "arguments": "".join(self._pieces)}
        return self._tell("function_call_arguments.done", done) + super().end(status)


_Kind = TypeVar("_Kind", Reasoning, Message)


class Output:
    """The items of one response. `name` tells them from those of others."""

    def __init__(self, name: str, events: Events, logprobs: ChatLogprobs | None) -> None:
        self.done: list[Json] = []
        self._name = name
        self._events = events
        self._logprobs = logprobs
        self._open: Item | None = None
        self._told: list[bytes] = []

    def push(self, delta: Delta) -> bytes:
        """Takes a delta in; the events that tell it."""
        self._told = []
        if delta.reasoning:
            self._told.append(self._text(Reasoning).add(delta.reasoning))
        begun = [piece for piece in delta.tool_calls if piece.id is None]  # it was open before all else that is new
        for piece in begun:
            self._argue(piece.arguments)
        if delta.text:
            self._told.append(self._text(Message).add(delta.text, self._entries(delta)))
        for piece in delta.tool_calls[len(begun) :]:
            self._begin(self._call(piece.id or "", piece.name or ""))
            self._argue(piece.arguments)
        if delta.finish is not None:
            if self._open is None and not self.done:
                self._text(Message)  # an answer without a word is one all the same
            self._end("incomplete" if delta.finish.reason is FinishReason.LENGTH else "completed")
        return b"".join(self._told)

    def close(self) -> bytes:
        """Ends what is open, as far as it came."""
        self._told = []
        self._end("incomplete")
        return b"".join(self._told)

    def _text(self, kind: type[_Kind]) -> _Kind:
        """The open item if it is of that kind, otherwise a new one."""
        if isinstance(self._open, kind):
            return self._open
        item = kind(self._events, self._name, self._place)
        self._begin(item)
        return item

    def _argue(self, arguments: str) -> None:
        if arguments and self._open is not None:
            self._told.append(self._open.add(arguments))

    def _call(self, call_id: str, function: str) -> Call:
        return Call(self._events, self._name, self._place, call_id=call_id, function=function)

    @property
    def _place(self) -> int:
        return len(self.done) + (self._open is not None)

    def _begin(self, item: Item) -> None:
        self._end("completed")
        self._open = item
        self._told.append(item.begin())

    def _end(self, status: Status) -> None:
        if self._open is not None:
            self._told.append(self._open.end(status))
            self.done.append(self._open.json(status))
            self._open = None

    def _entries(self, delta: Delta) -> list[Json]:
        """Of the tokens that the text is made of: those with text, and before each the pieces of its characters."""
        if self._logprobs is None:
            return []
        entries: list[Json] = []
        pieces: list[Json] = []
        for text, token_id, position in zip(delta.texts, delta.token_ids, delta.logprobs, strict=True):
            if not position:
                continue
            if text:
                entries += [*pieces, self._logprobs.entry(position)]
            if text or self._logprobs.is_whole(token_id):
                pieces = []
            else:
                pieces.append(self._logprobs.entry(position))
        return entries
