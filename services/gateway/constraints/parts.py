"""What passes between the rooms of this package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.common.errors import InvalidArgument, TriptychError, from_code_number
from services.gateway.parsers.formats import CallShape
from services.gateway.request import Constraint, ConstraintKind, ReasoningOptions
from services.gateway.tools import Tool, ToolChoice

LONGEST = 256 * 1024
"""Characters of what a client sends as a schema, an expression, choices or a grammar."""


@dataclass(slots=True, frozen=True)
class Wanted:
    """What the whole answer must be; `field` is where the client said so. A schema is in its normal form."""

    kind: ConstraintKind
    text: str
    field: str


@dataclass(slots=True, frozen=True)
class Calls:
    """Tools that the model may or must call, and how it writes calls.

    marks  texts by which the format's parser knows a call
    field  how the client spells the tools, `flat` whether a tool's fields stand beside its type
    held   whether arguments follow the schemas also of tools that are not strict
    """

    tools: Sequence[Tool]
    choice: ToolChoice
    shape: CallShape
    marks: Sequence[str] = ()
    parallel: bool = True
    field: str = "tools"
    flat: bool = False
    held: bool = False

    @property
    def offered(self) -> list[Tool]:
        """The tools that may be called."""
        return [tool for tool in self.tools if self.choice.mode != "named" or tool.name == self.choice.name]

    @property
    def hold(self) -> bool:
        """Whether an answer that is free otherwise must be held to something."""
        return self.choice.forced or (self.choice.mode == "auto" and any(tool.strict for tool in self.tools))

    def place(self, tool: Tool) -> str:
        """Where the client wrote the tool's schema."""
        at = next(index for index, other in enumerate(self.tools) if other is tool)
        return f"{self.field}[{at}]{'' if self.flat else '.function'}.parameters"


class Tokens(Protocol):
    """What a vocabulary tells of a text that one token stands for."""

    def special_id(self, text: str) -> int | None:
        """The special token that is written so."""
        ...

    def added_id(self, text: str) -> int | None:
        """The token, special or not, that stands wherever this text does."""
        ...


@dataclass(slots=True, frozen=True)
class Surroundings:
    """What the answer stands in.

    reasoning  what may come before it
    tokens     the model's vocabulary
    marks      texts that may be special tokens
    """

    reasoning: ReasoningOptions | None = None
    tokens: Tokens | None = None
    marks: Sequence[str] = ()

    @property
    def special_ids(self) -> dict[str, int]:
        """The special tokens among tags and marks."""
        if self.tokens is None:
            return {}
        tags = () if self.reasoning is None else (self.reasoning.open, self.reasoning.close)
        found = {text: self.tokens.special_id(text) for text in (*tags, *self.marks)}
        return {text: token_id for text, token_id in found.items() if token_id is not None}

    def added_id(self, text: str) -> int | None:
        """The one token that stands for a text."""
        return None if self.tokens is None else self.tokens.added_id(text)


def refuse(place: str, why: str) -> InvalidArgument:
    """The error for something that cannot be held, by its place."""
    return InvalidArgument(f"{place}: {why}", field=place)


def spelled(error: TriptychError, constraint: Constraint | None) -> TriptychError:
    """An engine's error; one about the constraint names its place as the client knows it."""
    if constraint is None or not constraint.place:
        return error
    if error.field != "constraint" and not error.message.startswith("constraint: "):
        return error
    why = error.message.removeprefix("constraint: ")
    return from_code_number(
        error.code_number,
        f"{constraint.place}: {why}",
        field=constraint.place,
        reason=error.reason,
        retry_after_ms=error.retry_after_ms,
        error_id=error.error_id,
    )
