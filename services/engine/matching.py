"""What the core knows of grammars: the protocol behind which the library stands. No library, no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.engine.events import StepFailure


class Matcher(Protocol):
    """How far one output has come in its grammar."""

    @property
    def error(self) -> str | None:
        """What broke it, for the client; it stays broken then."""

    @property
    def may_end(self) -> bool:
        """Whether the output is complete if nothing follows."""

    def take(self, ids: Sequence[int]) -> int:
        """Goes on by these ids; how many of them the grammar allows. The others are not taken."""

    def give_back(self, count: int) -> None:
        """Undoes the last ids taken."""

    def mask(self) -> bytearray:
        """Which ids may come next: one bit each, lowest first, in whole 32-bit words. No end of text is among them."""


class Compiling(Protocol):
    """A grammar on its way to being usable."""

    @property
    def done(self) -> bool:
        """It is usable, or there is an error."""

    @property
    def error(self) -> str | None:
        """Why it will never be usable, for the client."""

    @property
    def matchers(self) -> tuple[Matcher, ...]:
        """One per output, each as far as that output had come."""

    def cancel(self) -> None:
        """Nobody waits for it any more."""


class GrammarSource(Protocol):
    """Makes grammars usable, somewhere else: a call returns at once."""

    def start(self, kind: str, text: str, starts_after: tuple[int, ...], outputs: Sequence[Sequence[int]]) -> Compiling:
        """Begins with a grammar (kind and text as in Constraint) for outputs that may have come some way.

        Raises a TriptychError for what is refused at once.
        """


@dataclass(slots=True)
class Held:
    """One output that a grammar holds to its rules."""

    matcher: Matcher
    taken: int  # outputs that the matcher has gone by
    failure: StepFailure | None = None  # it cannot go on
