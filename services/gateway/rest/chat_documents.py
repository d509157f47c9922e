"""Documents of /v1/chat/completions, as bytes.

    stream   role chunk per choice, then per choice: reasoning_content …, content …, tool_calls …,
             finish chunk with an empty delta; last the usage chunk if asked

What a client puts together from the deltas is the message that it gets without streaming.
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from services.common.errors import TriptychError
from services.gateway.request import Delta, ToolCallDelta
from services.gateway.rest import shapes
from services.gateway.rest.documents import Chunks, Head, Json, Prompt, Shown

_GOES_ON = b'},"logprobs":null,"finish_reason":null}'


class Chat:
    """The documents of one answer with `choices` choices."""

    def __init__(self, head: Head, shown: Shown, prompt: Prompt, choices: int) -> None:
        self._head = head
        self._shown = shown
        self._prompt = prompt
        self._plain = shown.plain
        self._empty = None if shown.parsed else ""  # the content of a message without any
        self._logprobs = shapes.ChatLogprobs.for_options(shown.options, shown.vocabulary, shown.skip_special)
        self._chunks = chunks = Chunks(head, "chat.completion.chunk", shown)
        opens = [b'{"index":%d,"delta":{' % index for index in range(choices)]
        self._texts = [chunks.around(open_ + b'"content":', _GOES_ON) for open_ in opens]
        self._thoughts = [chunks.around(open_ + b'"reasoning_content":', _GOES_ON) for open_ in opens]

    def first(self) -> bytes:
        """A chunk per choice that names the role, after one with what was asked about the prompt."""
        chunks = []
        if about := self._prompt.about(self._shown):
            document = {**self._head.json("chat.completion.chunk"), "choices": [], **about}
            chunks.append(b"data: " + orjson.dumps(document) + b"\n\n")
        for index in range(len(self._texts)):
            delta = {"role": "assistant", "content": self._empty}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            chunks.append(self._chunks.wrap(orjson.dumps(choice)))
        return b"".join(chunks)

    def chunk(self, number: int, delta: Delta) -> bytes:
        """The chunks of a delta: what it adds, and after the last of it the reason why it is the last."""
        del number
        if self._plain and delta.finish is None and not delta.tool_calls:
            if not delta.reasoning:
                before, after = self._texts[delta.choice]
                return before + orjson.dumps(delta.text) + after
            if not delta.text:
                before, after = self._thoughts[delta.choice]
                return before + orjson.dumps(delta.reasoning) + after
        added, beside = _added(delta), self._beside(delta)
        if delta.finish is None:
            return self._choice(delta, added or {"content": ""}, {**beside, "finish_reason": None})
        end = {"finish_reason": shapes.finish_reason(delta.finish), "stop_reason": shapes.stop_reason(delta.finish)}
        if not added:
            return self._choice(delta, {}, {**beside, **end})
        more = self._choice(delta, added, {**beside, "finish_reason": None})
        return more + self._choice(delta, {}, {"logprobs": None, **end})

    def last(self) -> bytes:
        """The chunk with the usage, where it was asked for, and the end."""
        return self._chunks.last()

    def failed(self, error: TriptychError) -> bytes:
        """The error, and no end."""
        return self._chunks.failed(error)

    def whole(self, deltas: Sequence[Delta]) -> bytes:
        """The answer without streaming."""
        choices = [
            {
                "index": delta.choice,
                "message": self._message(delta),
                **self._beside(delta),
                "finish_reason": shapes.finish_reason(delta.finish),
                "stop_reason": shapes.stop_reason(delta.finish),
            }
            for delta in deltas
        ]
        document = {
            **self._head.json("chat.completion"),
            "choices": choices,
            "usage": shapes.usage(self._shown.counts()),
            **self._prompt.about(self._shown),
        }
        return orjson.dumps(document)

    def _choice(self, delta: Delta, added: Json, fields: Json) -> bytes:
        return self._chunks.wrap(orjson.dumps({"index": delta.choice, "delta": added, **fields}))

    def _message(self, delta: Delta) -> Json:
        message: Json = {"role": "assistant", "content": delta.text or self._empty, "refusal": None}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            message["tool_calls"] = [_call(call) for call in delta.tool_calls]
        return message

    def _beside(self, delta: Delta) -> Json:
        beside: Json = {"logprobs": None if self._logprobs is None else self._logprobs.of(delta)}
        if self._shown.options.return_token_ids:
            beside["token_ids"] = delta.token_ids
        return beside


def _added(delta: Delta) -> Json:
    added: Json = {}
    if delta.reasoning:
        added["reasoning_content"] = delta.reasoning
    if delta.text:
        added["content"] = delta.text
    if delta.tool_calls:
        added["tool_calls"] = [{"index": call.index, **_call(call)} for call in delta.tool_calls]
    return added


def _call(call: ToolCallDelta) -> Json:
    """A whole call, or a piece of one: only its first piece has an id and a name."""
    if call.id is None:
        return {"function": {"arguments": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
