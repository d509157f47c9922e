"""Whole answers and stream chunks of the two text APIs, as bytes.

A chunk of plain text, the common case, is a few byte strings around one escaped text; everything
that is the same for a whole stream is encoded once.

    chat stream         role chunk per choice, text …, finish chunk per choice, usage chunk if asked
    completion stream   text … (the last one of a choice has its finish_reason), usage chunk if asked
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from services.gateway.request import Delta, Position, ResponseOptions, Usage
from services.gateway.rest import shapes
from services.gateway.vocabulary import Vocabulary

Json = dict[str, Any]
_GOES_ON: Final = {"logprobs": None, "finish_reason": None}


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
    """What a client wants to see of an answer, and what it is made with."""

    options: ResponseOptions
    vocabulary: Vocabulary
    skip_special: bool
    counts: Callable[[], Usage]


@dataclass(slots=True, frozen=True)
class Prompt:
    """A prompt as answers may repeat it."""

    ids: Sequence[int]
    logprobs: Sequence[Position]


class _Chunks:
    """The frame around a stream's choices."""

    def __init__(self, head: Head, kind: str, shown: Shown) -> None:
        self._counts = shown.counts
        self._always = shown.options.continuous_usage
        self._wanted = shown.options.include_usage
        self._open = b"data: " + orjson.dumps(head.json(kind))[:-1] + b',"choices":['
        self._close = b'],"usage":null}\n\n' if self._wanted else b"]}\n\n"

    def wrap(self, choice: bytes) -> bytes:
        """A chunk with one choice."""
        return self._open + choice + (self._usage() if self._always else self._close)

    def last(self) -> bytes:
        """The chunk with the usage and no choice, where it was asked for."""
        return self._open + self._usage() if self._wanted else b""

    def _usage(self) -> bytes:
        return b'],"usage":' + orjson.dumps(shapes.usage(self._counts())) + b"}\n\n"


class Chat:
    """Documents of /v1/chat/completions."""

    def __init__(self, head: Head, shown: Shown, choices: int) -> None:
        options = shown.options
        self._head = head
        self._shown = shown
        top = options.top_logprobs
        self._logprobs = None if top is None else shapes.ChatLogprobs(shown.vocabulary, top, shown.skip_special)
        self._chunks = _Chunks(head, "chat.completion.chunk", shown)
        self._plain = top is None and not options.return_token_ids
        self._opens = [b'{"index":%d,"delta":{"content":' % index for index in range(choices)]

    def first(self, prompt: Prompt) -> bytes:
        """A chunk per choice that names the role, after one with what was asked about the prompt."""
        chunks = []
        if about := _about(prompt, self._shown):
            document = {**self._head.json("chat.completion.chunk"), "choices": [], **about}
            chunks.append(b"data: " + orjson.dumps(document) + b"\n\n")
        for index in range(len(self._opens)):
            choice = {"index": index, "delta": {"role": "assistant", "content": ""}, **_GOES_ON}
            chunks.append(self._chunks.wrap(orjson.dumps(choice)))
        return b"".join(chunks)

    def chunk(self, delta: Delta) -> bytes:
        """The chunks of a delta: its text, and after the last text the reason why it is the last."""
        if self._plain and delta.finish is None:
            text = orjson.dumps(delta.text)
            return self._chunks.wrap(self._opens[delta.choice] + text + b'},"logprobs":null,"finish_reason":null}')
        extras = self._extras(delta)
        if delta.finish is None:
            return self._text(delta, extras)
        reason = {"finish_reason": shapes.finish_reason(delta.finish), "stop_reason": shapes.stop_reason(delta.finish)}
        if delta.text:
            return self._text(delta, extras) + self._end(delta, {"logprobs": None, **reason})
        return self._end(delta, {**extras, **reason})

    def _text(self, delta: Delta, extras: Json) -> bytes:
        choice = {"index": delta.choice, "delta": {"content": delta.text}, **extras, "finish_reason": None}
        return self._chunks.wrap(orjson.dumps(choice))

    def _end(self, delta: Delta, fields: Json) -> bytes:
        return self._chunks.wrap(orjson.dumps({"index": delta.choice, "delta": {}, **fields}))

    def last(self) -> bytes:
        """The chunk with the usage, where it was asked for."""
        return self._chunks.last()

    def whole(self, deltas: Sequence[Delta], prompt: Prompt) -> bytes:
        """The answer without streaming."""
        choices = [
            {
                "index": delta.choice,
                "message": {"role": "assistant", "content": delta.text, "refusal": None},
                **self._extras(delta),
                "finish_reason": shapes.finish_reason(delta.finish),
                "stop_reason": shapes.stop_reason(delta.finish),
            }
            for delta in deltas
        ]
        document = {
            **self._head.json("chat.completion"),
            "choices": choices,
            "usage": shapes.usage(self._shown.counts()),
            **_about(prompt, self._shown),
        }
        return orjson.dumps(document)

    def _extras(self, delta: Delta) -> Json:
        extras: Json = {"logprobs": None if self._logprobs is None else self._logprobs.of(delta.logprobs)}
        if self._shown.options.return_token_ids:
            extras["token_ids"] = delta.token_ids
        return extras


class Completion:
    """Documents of /v1/completions, for all prompts of a body: choices are numbered through."""

    def __init__(self, head: Head, shown: Shown, prompts: int, n: int) -> None:
        top = shown.options.top_logprobs
        self._head = head
        self._shown = shown
        self._n = n
        self._logprobs = (
            None if top is None else [shapes.CompletionLogprobs(shown.vocabulary, top) for _ in range(prompts * n)]
        )
        self._chunks = _Chunks(head, "text_completion", shown)
        self._plain = top is None and not shown.options.return_token_ids
        self._begun: set[int] = set()

    def chunk(self, number: int, delta: Delta, prompt: Prompt) -> bytes:
        """The chunk of a delta that belongs to prompt `number`."""
        index = number * self._n + delta.choice
        if self._plain and delta.finish is None and index in self._begun:
            text = orjson.dumps(delta.text)
            tail = b',"logprobs":null,"finish_reason":null,"stop_reason":null}'
            return self._chunks.wrap(b'{"index":%d,"text":' % index + text + tail)
        return self._chunks.wrap(orjson.dumps(self._choice(number, delta, prompt)))

    def last(self) -> bytes:
        """The chunk with the usage, where it was asked for."""
        return self._chunks.last()

    def whole(self, answers: Sequence[tuple[Sequence[Delta], Prompt]]) -> bytes:
        """The answer without streaming."""
        choices = [
            self._choice(number, delta, prompt) for number, (deltas, prompt) in enumerate(answers) for delta in deltas
        ]
        document = {
            **self._head.json("text_completion"),
            "choices": choices,
            "usage": shapes.usage(self._shown.counts()),
        }
        return orjson.dumps(document)

    def _choice(self, number: int, delta: Delta, prompt: Prompt) -> Json:
        index = number * self._n + delta.choice
        first = index not in self._begun
        self._begun.add(index)
        choice: Json = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs_of(index, delta, prompt if first else None),
            "finish_reason": shapes.finish_reason(delta.finish),
            "stop_reason": shapes.stop_reason(delta.finish),
        }
        if self._shown.options.return_token_ids:
            choice["token_ids"] = delta.token_ids
        return {**choice, **_about(prompt, self._shown)} if first else choice

    def _logprobs_of(self, index: int, delta: Delta, prompt: Prompt | None) -> Json | None:
        if self._logprobs is None:
            return None
        if prompt is not None and self._shown.options.echo:
            return self._logprobs[index].of(delta, prompt.ids, prompt.logprobs)
        return self._logprobs[index].of(delta)


def _about(prompt: Prompt, shown: Shown) -> Json:
    about: Json = {}
    if shown.options.return_token_ids:
        about["prompt_token_ids"] = prompt.ids
    if prompt.logprobs:
        about["prompt_logprobs"] = shapes.prompt_logprobs(shown.vocabulary, prompt.logprobs)
    return about
