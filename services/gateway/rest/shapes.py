"""Pieces of OpenAI's answers as plain JSON values. Every number in them is finite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from services.gateway.detokenize import ShownBytes, new_detokenizer
from services.gateway.request import Delta, Finish, FinishReason, Position, ResponseOptions, TokenLogprob, Usage
from services.gateway.vocabulary import Vocabulary
from services.gateway.wire import finite

Json = dict[str, Any]
_FINISH: Final = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_ID: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
    FinishReason.TOOL_CALLS: "tool_calls",
}


def finish_reason(finish: Finish | None) -> str | None:
    """OpenAI's word for why a choice ended."""
    return None if finish is None else _FINISH[finish.reason]


def stop_reason(finish: Finish | None) -> str | int | None:
    """The stop string or stop id that ended a choice."""
    if finish is None:
        return None
    return finish.stop_string if finish.stop_string is not None else finish.stop_token_id


def usage(counts: Usage) -> Json:
    """Token counts."""
    return {
        "prompt_tokens": counts.prompt_tokens,
        "completion_tokens": counts.completion_tokens,
        "total_tokens": counts.prompt_tokens + counts.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": counts.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": counts.reasoning_tokens},
    }


def token_text(vocabulary: Vocabulary, token_id: int) -> str:
    r"""The text of a token; its bytes spelled \xf0\x9f where they are no whole text."""
    data = vocabulary.token_bytes(token_id)
    text = _decoded(data)
    return "".join(f"\\x{byte:02x}" for byte in data) if text is None else text


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _as_id(token_id: int) -> str:
    return f"token_id:{token_id}"


class ChatLogprobs:
    """The `logprobs` of chat choices over their deltas. `skip_special`: special tokens have no text, so no bytes.

    The bytes of the tokens joined are the text. `as_ids` spells tokens "token_id:17", which tells those
    apart that look the same.
    """

    def __init__(self, vocabulary: Vocabulary, top: int, skip_special: bool, as_ids: bool = False) -> None:
        self._vocabulary = vocabulary
        self._top = top
        self._silent = vocabulary.special_ids if skip_special else frozenset()
        self._shown = ShownBytes(vocabulary, skip_special_tokens=skip_special)
        self._as_ids = as_ids

    @classmethod
    def for_options(cls, options: ResponseOptions, vocabulary: Vocabulary, skip_special: bool) -> ChatLogprobs | None:
        """What a client asked for; None if it did not."""
        top = options.top_logprobs
        return None if top is None else cls(vocabulary, top, skip_special, options.tokens_as_ids)

    def of(self, delta: Delta) -> Json:
        """One entry per token; together they have the bytes of all that it wrote, reasoning and calls too."""
        return {"content": self._entries(delta.logprobs, self._shown.of(delta)), "refusal": None}

    def of_text(self, ids: Sequence[int], positions: Sequence[Position], texts: Sequence[str]) -> list[Json]:
        """The entries of the tokens that a text is made of, out of those around it."""
        return [entry for entry in self._entries(positions, self._shown.of_text(ids, texts)) if entry["bytes"]]

    def _entries(self, positions: Sequence[Position], shares: Sequence[bytes]) -> list[Json]:
        pairs = zip(positions, shares, strict=False)  # no positions where nobody asked
        return [self._entry(position, data) for position, data in pairs if position]

    def _entry(self, position: Position, data: bytes) -> Json:
        top = [self._token(item, self._bytes(item.token_id)) for item in position[1 : 1 + self._top]]
        return {**self._token(position[0], data), "top_logprobs": top}

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._silent else self._vocabulary.token_bytes(token_id)

    def _token(self, candidate: TokenLogprob, data: bytes) -> Json:
        token_id = candidate.token_id
        return {
            "token": _as_id(token_id) if self._as_ids else token_text(self._vocabulary, token_id),
            "logprob": finite(candidate.logprob),
            "bytes": list(data),
        }


class CompletionLogprobs:
    """The `logprobs` of one completion choice over its deltas; offsets count all text, the echo too."""

    def __init__(self, vocabulary: Vocabulary, top: int, as_ids: bool = False) -> None:
        self._vocabulary = vocabulary
        self._top = top
        self._as_ids = as_ids
        self._offset = 0

    @classmethod
    def for_options(cls, options: ResponseOptions, vocabulary: Vocabulary) -> CompletionLogprobs | None:
        """What a client asked for; None if it did not."""
        top = options.top_logprobs
        return None if top is None else cls(vocabulary, top, options.tokens_as_ids)

    def of(self, delta: Delta, echoed: Sequence[int] = (), echoed_positions: Sequence[Position] = ()) -> Json:
        """The entries of a delta; of the prompt's tokens before it where it echoes them."""
        entries = _Columns()
        end = self._offset + len(delta.text)
        own = end - sum(len(text) for text in delta.texts)  # where the text of its tokens begins, after the echo
        if echoed:
            texts = self._echoed(echoed, delta.text[: own - self._offset])
            for token_id, text, position in zip(echoed, texts, echoed_positions, strict=False):
                self._add(entries, token_id, text, position)
        self._offset = own
        for token_id, text, position in zip(delta.token_ids, delta.texts, delta.logprobs, strict=False):
            self._add(entries, token_id, text, position)
        self._offset = end
        return entries.json(self._top)

    def _echoed(self, ids: Sequence[int], echo: str) -> Iterator[str]:
        """What each token of a prompt has of its echo, in which special ones may be left out."""
        detokenizer = new_detokenizer(self._vocabulary, skip_special_tokens=False)
        texts = [text for token_id in ids for text in detokenizer.push(token_id)]
        at = 0
        for token_id, text in zip(ids, [*texts, *detokenizer.finish()], strict=True):
            shown = echo.startswith(text, at) or token_id not in self._vocabulary.special_ids
            part = text[: len(echo) - at] if shown else ""
            at += len(part)
            yield part

    def _add(self, entries: _Columns, token_id: int, text: str, position: Position) -> None:
        entries.tokens.append(self._name(token_id))
        entries.offsets.append(self._offset)
        self._offset += len(text)
        if not position:  # the first token of a prompt follows nothing
            entries.logprobs.append(None)
            entries.top.append(None)
            return
        entries.logprobs.append(finite(position[0].logprob))
        candidates = [*position[1 : 1 + self._top], position[0]]
        entries.top.append({self._name(item.token_id): finite(item.logprob) for item in candidates})

    def _name(self, token_id: int) -> str:
        if self._as_ids:
            return _as_id(token_id)
        text = token_text(self._vocabulary, token_id)
        return f"bytes:{text}" if text.startswith("\\x") else text


class _Columns:
    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.logprobs: list[float | None] = []
        self.top: list[dict[str, float] | None] = []
        self.offsets: list[int] = []

    def json(self, top: int) -> Json:
        return {
            "tokens": self.tokens,
            "token_logprobs": self.logprobs,
            "top_logprobs": self.top if top else [],
            "text_offset": self.offsets,
        }


def prompt_logprobs(vocabulary: Vocabulary, positions: Sequence[Position]) -> list[Json | None]:
    """Per prompt token the candidates by id; null for the first, which follows nothing."""
    return [
        {
            str(candidate.token_id): {
                "logprob": finite(candidate.logprob),
                "rank": candidate.rank,
                "decoded_token": token_text(vocabulary, candidate.token_id),
            }
            for candidate in position
        }
        or None
        for position in positions
    ]
