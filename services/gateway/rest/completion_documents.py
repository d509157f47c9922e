"""Documents of /v1/completions, as bytes.

stream   text … (the last chunk of a choice has its finish_reason), usage chunk if asked
"""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from services.common.errors import TriptychError
from services.gateway.request import Delta
from services.gateway.rest import shapes
from services.gateway.rest.documents import Chunks, Head, Json, Prompt, Shown

_GOES_ON = b',"logprobs":null,"finish_reason":null,"stop_reason":null}'


class Completion:
    """The documents of one answer, for all prompts of a body: choices are numbered through."""

    def __init__(self, head: Head, shown: Shown, prompts: Sequence[Prompt], n: int) -> None:
        self._head = head
        self._shown = shown
        self._prompts = prompts
        self._n = n
        self._plain = shown.plain
        choices = range(len(prompts) * n)
        self._logprobs = [shapes.CompletionLogprobs.for_options(shown.options, shown.vocabulary) for _ in choices]
        self._chunks = chunks = Chunks(head, "text_completion", shown)
        self._texts = [chunks.around(b'{"index":%d,"text":' % index, _GOES_ON) for index in choices]
        self._begun: set[int] = set()

    def first(self) -> bytes:
        """Nothing: the first chunk of a choice has what was asked about its prompt."""
        return b""

    def chunk(self, number: int, delta: Delta) -> bytes:
        """The chunk of a delta that belongs to prompt `number`."""
        index = number * self._n + delta.choice
        if self._plain and delta.finish is None and index in self._begun:
            before, after = self._texts[index]
            return before + orjson.dumps(delta.text) + after
        return self._chunks.wrap(orjson.dumps(self._choice(number, delta)))

    def last(self) -> bytes:
        """The chunk with the usage, where it was asked for, and the end."""
        return self._chunks.last()

    def failed(self, error: TriptychError) -> bytes:
        """The error, and no end."""
        return self._chunks.failed(error)

    def whole(self, answers: Sequence[Sequence[Delta]]) -> bytes:
        """The answer without streaming, from the deltas of each prompt."""
        choices = [self._choice(number, delta) for number, deltas in enumerate(answers) for delta in deltas]
        document = {
            **self._head.json("text_completion"),
            "choices": choices,
            "usage": shapes.usage(self._shown.counts()),
        }
        return orjson.dumps(document)

    def _choice(self, number: int, delta: Delta) -> Json:
        index = number * self._n + delta.choice
        prompt = self._prompts[number]
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
        return {**choice, **prompt.about(self._shown)} if first else choice

    def _logprobs_of(self, index: int, delta: Delta, prompt: Prompt | None) -> Json | None:
        logprobs = self._logprobs[index]
        if logprobs is None:
            return None
        if prompt is not None and self._shown.options.echo:
            return logprobs.of(delta, prompt.ids, prompt.logprobs)
        return logprobs.of(delta)
