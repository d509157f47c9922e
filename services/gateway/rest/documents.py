"""What the documents of the text APIs have in common: the frame around choices, and what they repeat of a prompt.

A chunk of plain text, the common case, is a few byte strings around one escaped text; everything
that is the same for a whole stream is encoded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from services.common.errors import TriptychError
from services.gateway.request import Delta, Position, ResponseOptions, Usage
from services.gateway.rest import shapes
from services.gateway.rest.reply import DONE, error_body, event
from services.gateway.vocabulary import Vocabulary

Json = dict[str, Any]


class Documents(Protocol):
    """A streamed answer as bytes, from the deltas of its runs."""

    def first(self) -> bytes:
        """What comes before the first delta."""
        ...

    def chunk(self, number: int, delta: Delta) -> bytes:
        """What a delta of run `number` adds."""
        ...

    def last(self) -> bytes:
        """What comes after the last delta."""
        ...

    def failed(self, error: TriptychError) -> bytes:
        """What comes instead of all that would have followed."""
        ...


@dataclass(slots=True, frozen=True)
class Head:
    """What all chunks of an answer have in common."""

    id: str
    created_s: int
    model: str

    def json(self, kind: str) -> Json:
        """The first fields of a document."""
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}


@dataclass(slots=True, frozen=True)
class Shown:
    """What a client wants to see of an answer, and what it is made with.

    `parsed` says whether reasoning and calls are taken out of the text, so that nothing may be left of it.
    """

    options: ResponseOptions
    vocabulary: Vocabulary
    skip_special: bool
    counts: Callable[[], Usage]
    parsed: bool = False

    @property
    def plain(self) -> bool:
        """Whether a chunk shows text and nothing beside it."""
        return not self.options.needs_tokens and not self.options.continuous_usage


@dataclass(slots=True, frozen=True)
class Prompt:
    """A prompt as answers may repeat it."""

    ids: Sequence[int]
    logprobs: Sequence[Position]

    def about(self, shown: Shown) -> Json:
        """The fields that were asked for."""
        about: Json = {}
        if shown.options.return_token_ids:
            about["prompt_token_ids"] = self.ids
        if self.logprobs:
            about["prompt_logprobs"] = shapes.prompt_logprobs(shown.vocabulary, self.logprobs)
        return about


class Chunks:
    """The frame around a stream's choices."""

    def __init__(self, head: Head, kind: str, shown: Shown) -> None:
        self._counts = shown.counts
        self._always = shown.options.continuous_usage
        self._wanted = shown.options.include_usage
        self._open = b"data: " + orjson.dumps(head.json(kind))[:-1] + b',"choices":['
        self._close = b'],"usage":null}\n\n' if self._wanted else b"]}\n\n"

    def around(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """What stands around the one thing that differs between chunks, where they show no usage."""
        return self._open + before, after + self._close

    def wrap(self, choice: bytes) -> bytes:
        """A chunk with one choice."""
        return self._open + choice + (self._usage() if self._always else self._close)

    def last(self) -> bytes:
        """The chunk with the usage and no choice, where it was asked for, and the end."""
        return self._open + self._usage() + DONE if self._wanted else DONE

    def failed(self, error: TriptychError) -> bytes:
        """An event with the error, and no end: what has come is not the answer."""
        return event(error_body(error))

    def _usage(self) -> bytes:
        return b'],"usage":' + orjson.dumps(shapes.usage(self._counts())) + b"}\n\n"
