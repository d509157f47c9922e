"""Stop strings over a stream of (token, text): hold back what may become a match, cut at a match.

Knows nothing of ids' meaning or of requests. The output ends with the first token that completes a
match; of the matches complete by then the one that begins first in the text wins.

    tokens    "The quick br" | "own" | " fox" | " jumps"        stop "own fox"
    released  "The quick br"                                    at once
    held                       "own"                            may become a match
    cut                               ^ the text ends before "own", the tokens after " fox"
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Span(NamedTuple):
    """A token and the text that it completed."""

    token_id: int
    text: str


@dataclass(slots=True, frozen=True)
class StopMatch:
    """A stop string that ended the text."""

    stop: str
    start: int  # in characters of the whole text
    end: int


@dataclass(slots=True)
class _Node:
    """A prefix of some stop string."""

    depth: int
    next: dict[str, _Node]
    fallback: _Node | None = None
    match: str | None = None  # the longest stop string that ends here
    hold: int = 0  # characters before here that a longer text could make a match


class StopMatcher:
    """All stop strings of a request at once (Aho and Corasick's automaton). Shared by its choices."""

    __slots__ = ("root",)

    def __init__(self, stops: Sequence[str]) -> None:
        self.root = _Node(0, {})
        for stop in stops:
            node = self.root
            for depth, char in enumerate(stop, 1):
                node = node.next.setdefault(char, _Node(depth, {}))
            node.match = stop
        self._link()

    def _link(self) -> None:
        waiting = deque([self.root])
        while waiting:
            node = waiting.popleft()
            fallback = node.fallback
            if fallback is not None:
                node.match = node.match or fallback.match
                node.hold = node.depth if node.next else fallback.hold
            for char, child in node.next.items():
                child.fallback = self.root if fallback is None else self.step(fallback, char)
                waiting.append(child)

    def step(self, node: _Node, char: str) -> _Node:
        """The longest prefix of a stop string that the text ends with after one more character."""
        at: _Node | None = node
        while at is not None:
            following = at.next.get(char)
            if following is not None:
                return following
            at = at.fallback
        return self.root


class StopScanner:
    """The text of one choice. Spans go in by `push` and come out by `released`."""

    __slots__ = ("_held", "_held_text", "_keep_stop", "_matcher", "_min_tokens", "_node", "_scanned", "_tokens")

    def __init__(self, matcher: StopMatcher, *, min_tokens: int = 0, include_stop: bool = False) -> None:
        self._matcher = matcher
        self._min_tokens = min_tokens
        self._keep_stop = include_stop
        self._node = matcher.root
        self._scanned = 0  # characters
        self._tokens = 0
        self._held: deque[Span] = deque()
        self._held_text = 0  # characters

    @property
    def holding(self) -> bool:
        """Whether some token is held back."""
        return bool(self._held)

    def push(self, span: Span) -> StopMatch | None:
        """Takes a token; gives the match that it completes. Afterwards call `released` or `cut`."""
        self._tokens += 1
        self._held.append(span)
        self._held_text += len(span.text)
        return self._scan(span.text)

    def _scan(self, text: str) -> StopMatch | None:
        considered = self._tokens >= self._min_tokens
        best: StopMatch | None = None
        node, step = self._node, self._matcher.step
        for end, char in enumerate(text, self._scanned + 1):
            node = step(node, char)
            if considered and node.match is not None and (best is None or end - len(node.match) < best.start):
                best = StopMatch(node.match, end - len(node.match), end)
        self._node = node
        self._scanned += len(text)
        return best

    def released(self) -> Iterator[Span]:
        """Takes out the tokens that lie wholly before anything that may become a match.

        Those without text that come right before it stay: they may be pieces of its first character.
        """
        held, hold = self._held, self._node.hold
        count, left = 0, self._held_text
        for span in held:
            if left - len(span.text) < hold:
                break
            left -= len(span.text)
            count += 1
        while 0 < count < len(held) and not held[count - 1].text:
            count -= 1
        self._held_text = left
        for _ in range(count):
            yield held.popleft()

    def cut(self, match: StopMatch) -> Iterator[Span]:
        """Takes out all tokens, with the text cut at the match."""
        room = (match.end if self._keep_stop else match.start) - (self._scanned - self._held_text)
        for span in self.drain():
            yield Span(span.token_id, span.text[: max(room, 0)])
            room -= len(span.text)

    def drain(self) -> Iterator[Span]:
        """Takes out all tokens as they are: the output has ended otherwise."""
        while self._held:
            yield self._held.popleft()
        self._held_text = 0
