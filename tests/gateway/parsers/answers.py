"""Answers in one piece, whatever pieces they came in, and vocabularies that cut a text into any tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.gateway.parsers.answer import AnswerParser
from services.gateway.parsers.reader import Kind
from services.gateway.pipeline import ChoicePipeline
from services.gateway.request import (
    ChoiceTokens,
    Delta,
    Finish,
    FinishReason,
    ReasoningOptions,
    TextOptions,
    TokenLogprob,
    ToolCallDelta,
    ToolOptions,
)
from services.gateway.stops import StopMatcher
from services.gateway.vocabulary import Joining, Vocabulary

THINK = ReasoningOptions("<think>", "</think>", inside=False)
THINKING = ReasoningOptions("<think>", "</think>", inside=True)
NAMES = ("f", "get_weather")


class Answer(NamedTuple):
    """What a client has in the end. Calls are names and arguments."""

    content: str = ""
    calls: tuple[tuple[str, str], ...] = ()
    reasoning: str = ""


def join_calls(pieces: Iterable[ToolCallDelta]) -> tuple[tuple[str, str], ...]:
    """Names and arguments of calls, as a client joins them; checks that each begins once, in order."""
    calls: list[list[str]] = []
    ids = set()
    for piece in pieces:
        if piece.id is not None:
            assert piece.index == len(calls), "calls are numbered in order"
            assert piece.name
            assert len(piece.id) == len("call_") + 24
            ids.add(piece.id)
            calls.append([piece.name, ""])
        assert (piece.id is None) == (piece.name is None)
        assert piece.index == len(calls) - 1, "a call is over when the next begins"
        calls[piece.index][1] += piece.arguments
    assert len(ids) == len(calls)
    return tuple((name, arguments) for name, arguments in calls)


def tools(form: str, *, parallel: bool = True, forced: bool = False) -> ToolOptions:
    """Options of a request that offered NAMES."""
    return ToolOptions(form, NAMES, parallel, forced)


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    """The text cut at some places."""
    return [text[start:end] for start, end in itertools.pairwise([0, *sorted(cuts), len(text)])]


def parse(
    pieces: Iterable[str],
    form: str | None = None,
    reasoning: ReasoningOptions | None = None,
    *,
    parallel: bool = True,
    whole: bool = True,
) -> Answer:
    """What a parser makes of a text that comes in pieces, and that may go on if it is not `whole`."""
    parser = AnswerParser(reasoning, tools(form, parallel=parallel) if form else None)
    for piece in pieces:
        before = parser.fed
        parser.push(piece)
        assert before <= parser.fed
        assert parser.settled <= parser.fed
    if whole:
        parser.finish()
        assert parser.settled == parser.fed
    ends = [event.end for event in parser.events]
    assert ends == sorted(ends)
    return Answer(
        "".join(event.text for event in parser.events if event.what is Kind.CONTENT),
        join_calls(event.what for event in parser.events if isinstance(event.what, ToolCallDelta)),
        "".join(event.text for event in parser.events if event.what is Kind.REASONING),
    )


def parse_any_cut(text: str, form: str | None = None, reasoning: ReasoningOptions | None = None) -> Answer:
    """What a parser makes of a text: the same whole, in two pieces, and in pieces of 1 to 7 characters."""
    whole = parse([text], form, reasoning)
    for at in range(1, len(text)):
        assert parse([text[:at], text[at:]], form, reasoning) == whole, f"cut at {at}"
    for size in range(1, 8):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert parse(pieces, form, reasoning) == whole, f"pieces of {size}"
    return whole


# Tokens

_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_SPELLED = [chr(byte if byte in _PRINTABLE else 256 + _OTHERS.index(byte)) for byte in range(256)]
EOS = 0


@dataclass
class Tokens:
    """A text as tokens: id 0 ends texts, then each piece has an id of its own."""

    vocabulary: Vocabulary
    ids: tuple[int, ...]
    special: tuple[int, ...]


def tokens_of(text: str, cuts: Sequence[int] = (), marks: Sequence[str] = ()) -> Tokens:
    """A text cut at some of its bytes; `marks` within it are special tokens."""
    pieces = ["<|eos|>"]
    added = {"<|eos|>": EOS}
    ids = []
    start = 0
    while start < len(text):
        found = min(((at, mark) for mark in marks if (at := text.find(mark, start)) >= 0), default=(len(text), ""))
        data = text[start : found[0]].encode()
        inner = [cut for cut in sorted(set(cuts)) if 0 < cut < len(data)]
        for a, b in itertools.pairwise([0, *inner, len(data)] if data else []):
            ids.append(len(pieces))
            pieces.append("".join(_SPELLED[byte] for byte in data[a:b]))
        if found[1]:
            if found[1] not in added:
                added[found[1]] = len(pieces)
                pieces.append(found[1])
            ids.append(added[found[1]])
        start = found[0] + len(found[1])
        cuts = [cut - len(data) for cut in cuts]
    special = tuple(added.values())
    return Tokens(Vocabulary(pieces, special, Joining(by_bytes=True), added=added), tuple(ids), special)


class Told(NamedTuple):
    """All that the deltas of a choice say, joined."""

    answer: Answer
    ids: tuple[int, ...]
    logprobs: tuple[object, ...]
    texts: tuple[str, ...]
    reasoning_tokens: int
    finish: Finish | None
    call_cut: bool


def stream(
    tokens: Tokens,
    options: TextOptions,
    finish: FinishReason = FinishReason.LENGTH,
    *,
    cuts: Sequence[int] = (),
    takes: Sequence[bool] = (),
    min_tokens: int = 0,
    needs_tokens: bool = False,
) -> tuple[list[Delta], ChoicePipeline]:
    """The deltas of a choice whose tokens come in pieces cut at `cuts`, and taken where `takes` says so."""
    matcher = StopMatcher(options.stop) if options.stop else None
    pipeline = ChoicePipeline(
        0, tokens.vocabulary, options, matcher=matcher, min_tokens=min_tokens, needs_tokens=needs_tokens
    )
    ids = (*tokens.ids, EOS) if finish is FinishReason.EOS else tokens.ids
    bounds = [0, *sorted(cuts), len(ids)]
    deltas = []
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        last = i == len(bounds) - 2
        positions = tuple((TokenLogprob(ids[at], -float(at), 1),) for at in range(start, end))
        pipeline.push(ChoiceTokens(0, start, ids[start:end], finish if last else FinishReason.NONE, positions))
        if last or i >= len(takes) or takes[i]:
            delta = pipeline.take()
            deltas += [] if delta is None else [delta]
    return deltas, pipeline


def join(deltas: Sequence[Delta]) -> Told:
    """What a client has after all deltas."""
    at = 0
    for delta in deltas:
        assert delta.first_index == at
        at += len(delta.token_ids)
        assert len(delta.logprobs) == len(delta.texts) == len(delta.token_ids)
        assert (delta.finish is None) == (delta is not deltas[-1])
        assert delta.finish is not None or not delta.call_cut
        indices = [call.index for call in delta.tool_calls]
        assert len(set(indices)) == len(indices), "at most one piece per call in a delta"
    return Told(
        Answer(
            "".join(delta.text for delta in deltas),
            join_calls(call for delta in deltas for call in delta.tool_calls),
            "".join(delta.reasoning for delta in deltas),
        ),
        sum((delta.token_ids for delta in deltas), ()),
        sum((delta.logprobs for delta in deltas), ()),
        sum((delta.texts for delta in deltas), ()),
        sum(delta.reasoning_tokens for delta in deltas),
        deltas[-1].finish if deltas else None,
        bool(deltas) and deltas[-1].call_cut,
    )
