"""Deltas to the items of a response, each change told as events.

    item added ── part added ── delta … ── text done ── part done ── item done     reasoning, message
    item added ── arguments delta … ── arguments done ── item done                 function_call

One item is open at a time, and they stand in the order in which the model wrote them: text after a call is a
message of its own. The items of a whole answer are those of its only delta: the same code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import groupby
from typing import Any, ClassVar, Final, Literal, TypeVar

import orjson

from services.gateway.request import Delta, FinishReason, Piece, Position, ToolCallDelta
from services.gateway.rest.shapes import ChatLogprobs

Json = dict[str, Any]
Status = Literal["in_progress", "completed", "incomplete"]
_CUT: Final = (FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR)
"""Ends that leave a text incomplete. Whether a call is complete shows in itself."""


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
        self._rest: list[tuple[int, Position]] = []  # tokens that have come and told nothing: pieces of a character

    def push(self, delta: Delta) -> bytes:
        """Takes a delta in; the events that tell it."""
        self._told = []
        pieces = delta.pieces or [Piece(token, text) for token, text in enumerate(delta.texts) if text]
        told = 0  # tokens
        for sort, same in groupby(pieces, _sort):
            some = list(same)
            entries = self._entries(delta, min(told, some[0].token), some)
            told = some[-1].token + 1
            if sort is Message:
                self._told.append(self._text(Message).add("".join([piece.text for piece in some]), entries))
            elif sort is Reasoning:
                self._told.append(self._text(Reasoning).add("".join([piece.reasoning for piece in some])))
            else:
                self._called([piece.call for piece in some if piece.call is not None])
        self._rest += zip(delta.token_ids[told:], delta.logprobs[told:], strict=False)
        if delta.finish is not None:
            if self._open is None and not self.done:
                self._text(Message)  # an answer without a word is one all the same
            cut = delta.call_cut if isinstance(self._open, Call) else delta.finish.reason in _CUT
            self._end("incomplete" if cut else "completed")
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

    def _called(self, pieces: Sequence[ToolCallDelta]) -> None:
        """A new call, or more of the open one."""
        first = pieces[0]
        if first.id is not None:
            call_id, function = first.id, first.name or ""
            self._begin(Call(self._events, self._name, self._place, call_id=call_id, function=function))
        arguments = "".join([piece.arguments for piece in pieces])
        if arguments and self._open is not None:
            self._told.append(self._open.add(arguments))

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

    def _entries(self, delta: Delta, start: int, pieces: Sequence[Piece]) -> list[Json]:
        """Of the tokens that a text is made of. They come after what was told before, from `start` on in the delta."""
        rest, self._rest = self._rest, []
        if self._logprobs is None or not delta.logprobs or not pieces[0].text:
            return []
        end = pieces[-1].token + 1
        ids, positions = zip(
            *rest, *zip(delta.token_ids[start:end], delta.logprobs[start:end], strict=True), strict=True
        )
        texts = [""] * len(ids)
        for piece in pieces:
            texts[piece.token - start + len(rest)] += piece.text
        return self._logprobs.of_text(ids, positions, texts)


def _sort(piece: Piece) -> type[Item] | int:
    """What kind of item a piece belongs to, or the number of its call."""
    if piece.call is not None:
        return piece.call.index
    return Message if piece.text else Reasoning
