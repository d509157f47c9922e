"""One choice's way from tokens to deltas: detokenize, stop, cut. Knows no client and no engine.

    ChoiceTokens ──push──▶ detokenizer ──▶ stop scanner ──▶ ready spans ──take──▶ Delta

However the tokens are dealt out to pushes and takes, the deltas joined are the same: ids and
logprobs ride with the text that they completed, and all are cut at the same token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from services.common.errors import internal
from services.gateway.detokenize import new_detokenizer
from services.gateway.request import ChoiceTokens, Delta, Finish, FinishReason, Position, TextOptions
from services.gateway.stops import Span, StopMatcher, StopScanner
from services.gateway.vocabulary import Vocabulary


class ChoicePipeline:
    """One choice. `finish` is set once it has ended; later tokens are dropped."""

    __slots__ = (
        "_choice",
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
        self._include_stop = options.include_stop
        self._scanner = (
            StopScanner(matcher, min_tokens=min_tokens, include_stop=options.include_stop) if matcher else None
        )
        self._needs_tokens = needs_tokens
        self._echo = echo
        self._received = 0
        self._emitted = 0
        self._told = False  # the finish is in a delta
        self._unreleased: deque[int] = deque()
        self._ready: list[Span] = []
        self._positions: deque[Position] = deque()

    @property
    def kept_tokens(self) -> int:
        """Tokens up to the cut, or so far."""
        return self._received

    def push(self, tokens: ChoiceTokens) -> None:
        """Takes new tokens. Those that came before are dropped; a gap is an error."""
        if self.finish is not None:
            return
        known = self._received - tokens.first_index
        if known < 0:
            raise internal(f"tokens {self._received} to {tokens.first_index} of choice {tokens.choice} are missing")
        ids = tokens.token_ids[known:]
        if tokens.logprobs:
            self._positions.extend(tokens.logprobs[known:])
        silent = ids[-1:] if self._is_silent(tokens.finish) else ()
        for token_id in ids[: len(ids) - len(silent)]:
            self._received += 1
            self._unreleased.append(token_id)
            for text in self._detokenizer.push(token_id):
                if self._accept(Span(self._unreleased.popleft(), text)):
                    return
        if tokens.finish is not FinishReason.NONE:
            self._end(tokens.finish, ids[-1:], silent)

    def take(self) -> Delta | None:
        """What can be told by now, if a client would notice it."""
        if self._told:
            return None
        spans = self._ready
        text = spans[0].text if len(spans) == 1 else "".join([span.text for span in spans])
        if self.finish is None and not text:
            held = self._unreleased or (self._scanner is not None and self._scanner.holding)
            if not (self._needs_tokens and spans and not held):
                return None
        ids = tuple([span.token_id for span in spans if span.token_id is not None])
        delta = Delta(
            self._choice,
            self._emitted,
            self._echo + text,
            ids,
            tuple([self._positions.popleft() for _ in ids]) if self._positions else (),
            self.finish,
            _texts(spans),
        )
        self._ready = []
        self._echo = ""
        self._told = self.finish is not None
        self._emitted += len(ids)
        return delta

    def _is_silent(self, finish: FinishReason) -> bool:
        """Whether the last id ends the text without being part of it."""
        return finish is FinishReason.EOS or (finish is FinishReason.STOP_ID and not self._include_stop)

    def _accept(self, span: Span) -> bool:
        """Takes the next span; tells whether a stop string ended the text there."""
        if self._scanner is None:
            self._ready.append(span)
            return False
        match = self._scanner.push(span)
        if match is None:
            self._ready.extend(self._scanner.released())
            return False
        self._ready.extend(self._scanner.cut(match))
        self._received = self._emitted + sum(span.token_id is not None for span in self._ready)
        self.finish = Finish(FinishReason.STOP_STRING, stop_string=match.stop)
        return True

    def _end(self, reason: FinishReason, last: Sequence[int], silent: Sequence[int]) -> None:
        texts, tail = self._detokenizer.finish()
        spans = [Span(self._unreleased.popleft(), text) for text in texts]
        if tail:
            spans.append(Span(None, tail))
        if any(self._accept(span) for span in spans):
            return
        if self._scanner is not None:
            self._ready.extend(self._scanner.drain())
        self._ready.extend(Span(token_id, "") for token_id in silent)
        self._received += len(silent)
        stop_token_id = last[0] if reason is FinishReason.STOP_ID and last else None
        self.finish = Finish(reason, stop_token_id=stop_token_id)


def _texts(spans: Sequence[Span]) -> tuple[str, ...]:
    """The text of each token; text without a token of its own goes to the token before it."""
    texts: list[str] = []
    for span in spans:
        if span.token_id is not None:
            texts.append(span.text)
        elif texts:
            texts[-1] += span.text
    return tuple(texts)
