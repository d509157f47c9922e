"""One choice's way from tokens to deltas: detokenize, stop, cut. Knows no client and no engine.

    ChoiceTokens ──push──▶ detokenizer ──▶ stop scanner ──▶ ready spans ──take──▶ Delta
                                                      └─▶ answer parser ─▶┘ where reasoning or tools are read

However the tokens are dealt out to pushes and takes, the deltas joined are the same: ids and
logprobs ride with the text that they completed, and all are cut at the same token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from services.common.errors import internal
from services.gateway.detokenize import new_detokenizer
from services.gateway.parsers.answer import AnswerParser
from services.gateway.parsers.reader import Kind
from services.gateway.request import (
    ChoiceTokens,
    Delta,
    Finish,
    FinishReason,
    Piece,
    Position,
    TextOptions,
    ToolCallDelta,
)
from services.gateway.stops import Span, StopMatcher, StopScanner
from services.gateway.vocabulary import Vocabulary


class ChoicePipeline:
    """One choice. `finish` is set once it has ended; later tokens are dropped."""

    __slots__ = (
        "_answer",
        "_choice",
        "_detokenize",
        "_detokenizer",
        "_echo",
        "_emitted",
        "_include_stop",
        "_needs_tokens",
        "_positions",
        "_ready",
        "_received",
        "_scanner",
        "_told",
        "_unreleased",
        "finish",
    )

    def __init__(
        self,
        choice: int,
        vocabulary: Vocabulary,
        options: TextOptions,
        *,
        matcher: StopMatcher | None = None,
        min_tokens: int = 0,
        needs_tokens: bool = False,
        echo: str = "",
    ) -> None:
        self.finish: Finish | None = None
        self._choice = choice
        self._detokenizer = new_detokenizer(vocabulary, skip_special_tokens=options.skip_special_tokens)
        self._detokenize = self._detokenizer.push
        self._include_stop = options.include_stop
        self._scanner = (
            StopScanner(matcher, min_tokens=min_tokens, include_stop=options.include_stop) if matcher else None
        )
        self._answer = _Answer(vocabulary, options) if options.reasoning or options.tools else None
        self._needs_tokens = needs_tokens
        self._echo = echo
        self._received = 0
        self._emitted = 0
        self._told = False  # the finish is in a delta
        self._unreleased: deque[int] = deque()
        self._ready: list[tuple[int, str]] = []  # spans
        self._positions: deque[Position] = deque()

    @property
    def kept_tokens(self) -> int:
        """Tokens up to the cut, or so far."""
        return self._received

    @property
    def ready_tokens(self) -> int:
        """Tokens that a delta would have now."""
        return len(self._ready)

    def push(self, tokens: ChoiceTokens) -> None:
        """Takes new tokens. Those that came before are dropped; a gap is an error."""
        if self.finish is not None:
            return
        known = self._received - tokens.first_index
        if known < 0:
            raise internal(f"tokens {self._received} to {tokens.first_index} of choice {tokens.choice} are missing")
        ids = tokens.token_ids[known:] if known else tokens.token_ids
        if tokens.logprobs:
            self._positions.extend(tokens.logprobs[known:])
        silent = ids[-1:] if tokens.finish and self._is_silent(tokens.finish) else ()
        unread = self._scanner is None and self._answer is None
        for token_id in ids[:-1] if silent else ids:
            self._received += 1
            self._unreleased.append(token_id)
            texts = self._detokenize(token_id)
            if unread:
                for text in texts:
                    self._ready.append((self._unreleased.popleft(), text))
                continue
            for left, text in enumerate(texts, 1 - len(texts)):
                if self._accept(Span(self._unreleased.popleft(), text), more=left < 0 and not text):
                    return
        if tokens.finish:
            self._end(tokens.finish, ids[-1:], silent)

    def take(self) -> Delta | None:
        """What can be told by now, if a client would notice it."""
        if self._told:
            return None
        spans, answer = self._ready, self._answer
        text = spans[0][1] if len(spans) == 1 else "".join([text for _, text in spans])
        if self.finish is None and not text and not (answer is not None and answer.news):
            held = (
                self._unreleased
                or (self._scanner is not None and self._scanner.holding)
                or (answer is not None and answer.holding)
            )
            if not (self._needs_tokens and spans and not held):
                return None
        delta = self._delta(text)
        if answer is not None:
            answer.tell(delta)
        return delta

    def _delta(self, text: str) -> Delta:
        ids, texts = zip(*self._ready, strict=True) if self._ready else ((), ())
        delta = Delta(
            self._choice,
            self._emitted,
            self._echo + text,
            ids,
            tuple([self._positions.popleft() for _ in ids]) if self._positions else (),
            self.finish,
            texts,
        )
        self._ready = []
        self._echo = ""
        self._told = self.finish is not None
        self._emitted += len(ids)
        return delta

    def _is_silent(self, finish: FinishReason) -> bool:
        """Whether the last id ends the text without being part of it."""
        return finish is FinishReason.EOS or (finish is FinishReason.STOP_ID and not self._include_stop)

    def _accept(self, span: Span, *, more: bool = False) -> bool:
        """Takes the next span; tells whether the text ended there: by a stop string, or after the last call.

        With `more` it is a piece of a character that is there already: what becomes of both is decided at once.
        """
        if self._scanner is None:
            if self._answer is None:
                self._ready.append(span)
                return False
            return self._release((span,))
        match = self._scanner.push(span)
        if match is None:
            return not more and self._release(self._scanner.released())
        if not self._release(self._scanner.cut(match)):
            self._finish(Finish(FinishReason.STOP_STRING, stop_string=match.stop))
        self._received = self._emitted + len(self._ready)
        return True

    def _release(self, spans: Iterable[Span]) -> bool:
        """Takes spans that no stop string will cut; tells whether the answer ended there."""
        if self._answer is None:
            self._ready.extend(spans)
            return False
        for span in spans:
            self._answer.push(span)
            if self._answer.ended:
                self._finish(Finish(FinishReason.TOOL_CALLS))
                self._received = self._emitted + len(self._ready)
                return True
        self._ready.extend(self._answer.released())
        return False

    def _finish(self, finish: Finish) -> None:
        """The text has ended: the parser decides about the last of it."""
        if self._answer is not None:
            self._answer.finish()
            self._ready.extend(self._answer.released())
            if self._answer.called and (
                finish.reason is FinishReason.EOS or (finish.reason in _STOPS and not self._answer.open)
            ):
                finish = replace(finish, reason=FinishReason.TOOL_CALLS)
        self.finish = finish

    def _end(self, reason: FinishReason, last: Sequence[int], silent: Sequence[int]) -> None:
        for text in self._detokenizer.finish():
            if self._accept(Span(self._unreleased.popleft(), text)):
                return
        if self._scanner is not None and self._release(self._scanner.drain()):
            return
        stop_token_id = last[0] if reason is FinishReason.STOP_ID and last else None
        self._finish(Finish(reason, stop_token_id=stop_token_id))
        self._ready.extend(Span(token_id, "") for token_id in silent)
        self._received += len(silent)


_STOPS = (FinishReason.STOP_ID, FinishReason.STOP_STRING)
"""Ends that the client chose, perhaps in the middle of a call; where the model ends, it holds the call to be whole."""


class _Answer:
    """The spans of one choice on their way through its parser: a token goes on when its text is settled."""

    __slots__ = ("_marks", "_parser", "_pieces", "_reasoned", "_released", "_waiting", "_written")

    def __init__(self, vocabulary: Vocabulary, options: TextOptions) -> None:
        self._parser = AnswerParser(options.reasoning, options.tools)
        self._marks: Mapping[int, str] = {
            token_id: vocabulary.added_text(token_id)
            for token_id in options.kept_ids
            if options.skip_special_tokens and token_id in vocabulary.special_ids
        }
        self._waiting: deque[tuple[int, Span]] = deque()  # where a token's text ends in the parser's, and the token
        self._released = 0  # characters of the tokens that have gone on
        # Of these tokens, since it was last told:
        self._reasoned = 0
        self._written: list[str] = []
        self._pieces: list[Piece] = []

    @property
    def holding(self) -> bool:
        """Whether some token waits."""
        return bool(self._waiting)

    @property
    def ended(self) -> bool:
        """Whether the answer is over, whatever would follow."""
        return self._parser.ended

    @property
    def called(self) -> bool:
        """Whether a tool was called."""
        return self._parser.called

    @property
    def open(self) -> bool:
        """Whether the arguments of the last call are not complete."""
        return self._parser.open

    def push(self, span: Span) -> None:
        """Takes a span. A special token that its text leaves out is read as a mark all the same."""
        self._parser.push(span.text)
        if span.token_id in self._marks:
            self._parser.push(self._marks[span.token_id], hidden=True)
        self._waiting.append((self._parser.fed, span))

    def finish(self) -> None:
        """No more spans come."""
        self._parser.finish()

    def released(self) -> Iterator[Span]:
        """Takes out the tokens whose text is settled, each with what it has of the answer's own text."""
        settled, answer_at = self._parser.settled, self._parser.answer_at
        if not settled and answer_at is None:
            return  # it is not known yet whether the answer begins with reasoning
        while self._waiting and self._waiting[0][0] <= settled:
            self._reasoned += answer_at is None or self._released < answer_at
            self._released, (token_id, text) = self._waiting.popleft()
            self._written.append(text)
            yield Span(token_id, self._sort())

    def _sort(self) -> str:
        """Takes what is known by the last token that went on; gives the part that is the answer's text."""
        events, token, text = self._parser.events, len(self._written) - 1, ""
        while events and events[0].end <= self._released:
            _, what, part = events.popleft()
            if what is Kind.CONTENT:
                text += part
                self._pieces.append(Piece(token, part))
            elif what is Kind.REASONING:
                self._pieces.append(Piece(token, "", part))
            else:
                self._pieces.append(Piece(token, "", "", what))
        return text

    @property
    def news(self) -> bool:
        """Whether there is something to tell beside text."""
        return bool(self._pieces)

    def tell(self, delta: Delta) -> None:
        """Puts into a delta what there is to tell beside text."""
        pieces = self._pieces
        delta.pieces = pieces
        delta.reasoning = "".join([piece.reasoning for piece in pieces])
        delta.reasoning_tokens = self._reasoned
        calls = [piece.call for piece in pieces if piece.call is not None]
        delta.tool_calls = _joined_calls(calls) if calls else ()
        delta.call_cut = delta.finish is not None and self._parser.open
        delta.written = tuple(self._written)
        self._pieces, self._written, self._reasoned = [], [], 0


def _joined_calls(pieces: Sequence[ToolCallDelta]) -> tuple[ToolCallDelta, ...]:
    """One piece per call."""
    joined: dict[int, list[ToolCallDelta]] = {}
    for piece in pieces:
        joined.setdefault(piece.index, []).append(piece)
    return tuple(
        ToolCallDelta(index, "".join([piece.arguments for piece in same]), same[0].id, same[0].name)
        for index, same in joined.items()
    )
