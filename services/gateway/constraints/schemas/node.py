"""A node of a schema as plain data. Other nodes stand in it by their pointers."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from services.common.errors import InvalidArgument

Pointer = tuple[str | int, ...]
"""The way from the root of a schema to a node: keys and positions."""
TYPES = ("null", "boolean", "number", "string", "array", "object")
"""The kinds of JSON values; an integer is a number."""


@dataclass(slots=True, frozen=True)
class Numbers:
    """Bounds of a number. `low` and `high` are themselves allowed unless `above_low`, `below_high`."""

    low: Fraction | None = None
    high: Fraction | None = None
    above_low: bool = False
    below_high: bool = False
    multiple_of: Fraction | None = None
    whole: bool = False


@dataclass(slots=True, frozen=True)
class Strings:
    """Bounds of a string: its length in code points, translated expressions, formats."""

    shortest: int = 0
    longest: int | None = None
    patterns: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()


@dataclass(slots=True, frozen=True)
class Arrays:
    """Bounds of an array: the first items one by one, then `items`; None allows any."""

    fewest: int = 0
    most: int | None = None
    first: tuple[Pointer, ...] = ()
    items: Pointer | None = None


@dataclass(slots=True, frozen=True)
class Objects:
    """Bounds of an object. `patterns` are expressions for names, with what they are in the schema."""

    properties: dict[str, Pointer] = field(default_factory=dict)
    patterns: tuple[tuple[str, Pointer], ...] = ()
    additional: Pointer | None = None
    required: tuple[str, ...] = ()
    fewest: int = 0
    most: int | None = None


@dataclass(slots=True, frozen=True)
class Node:
    """What one object of a schema says of a value; `never` is the schema false.

    types   kinds of values that it allows
    values  the only values that it allows; None where it has no enum and no const
    all_of  nodes that must hold too, any_of and one_of groups of which one must
    """

    at: Pointer
    never: bool = False
    types: frozenset[str] = frozenset(TYPES)
    values: tuple[Any, ...] | None = None
    numbers: Numbers = Numbers()
    strings: Strings = Strings()
    arrays: Arrays = Arrays()
    objects: Objects = field(default_factory=Objects)
    all_of: tuple[Pointer, ...] = ()
    any_of: tuple[tuple[Pointer, ...], ...] = ()
    one_of: tuple[tuple[Pointer, ...], ...] = ()

    @property
    def says_nothing(self) -> bool:
        """Whether any value fits."""
        return self == Node(self.at)

    @property
    def only_refers(self) -> bool:
        """Whether it says what one other node says."""
        return len(self.all_of) == 1 and self == Node(self.at, all_of=self.all_of)


@dataclass(slots=True, frozen=True)
class Spelling:
    """How a client knows the schema: the place of its root, for errors."""

    root: str

    def place(self, at: Pointer) -> str:
        """A node's place."""
        return self.root + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in at)

    def refuse(self, at: Pointer, why: str) -> InvalidArgument:
        """The error for what stands there."""
        place = self.place(at)
        return InvalidArgument(f"{place}: {why}", field=place)
