"""Several nodes that hold of one value, as one: bounds meet, and what stands within meets by name and position."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from services.gateway.constraints.schemas.document import Document
from services.gateway.constraints.schemas.keywords import canonical, kind_of
from services.gateway.constraints.schemas.node import TYPES, Node, Numbers, Pointer, Strings

MOST_EXPRESSIONS = 6
"""Expressions that one string must match: each doubles the time that the library takes to look at them."""
_FEW = 16
_PLAIN = re.compile(r"[A-Za-z0-9_@:/ -]*")
Together = tuple[Pointer, ...]
"""Nodes that hold of one value; none of them allows anything."""


@dataclass(slots=True)
class Merged:
    """What one value must be. Each kind of value in `types` is possible as far as its own bounds tell.

    nodes        the nodes themselves, in which a keyword that cannot be held is found
    names        properties and what they must be, in the order in which the schema names them
    beginnings   beginnings of other names, and what such a property must be
    expressions  expressions for names, where no other name is told apart
    others       what a property of any other name must be

    Where something would be None, there is nothing that it can be.
    """

    at: Pointer
    nodes: Sequence[Node]
    types: frozenset[str]
    values: tuple[Any, ...] | None
    numbers: Numbers
    strings: Strings
    first: tuple[Together | None, ...]
    items: Together | None
    fewest_items: int
    most_items: int | None
    names: dict[str, Together | None]
    beginnings: dict[str, Together | None]
    expressions: tuple[tuple[str, Together | None], ...]
    others: Together | None
    required: tuple[str, ...]
    fewest: int
    most: int | None


def merge(document: Document, nodes: Sequence[Node]) -> Merged:
    """The nodes as one. Raises InvalidArgument for what cannot be merged, with its place."""
    types = frozenset(TYPES)
    for node in nodes:
        types &= frozenset() if node.never else node.types
    numbers, strings = _numbers(nodes), _strings(nodes)
    most_items = least([node.arrays.most for node in nodes])
    fewest_items = max((node.arrays.fewest for node in nodes), default=0)
    fewest = max((node.objects.fewest for node in nodes), default=0)
    most = least([node.objects.most for node in nodes])
    width = max((len(node.arrays.first) for node in nodes), default=0)
    expressions = _expressions(document, nodes)
    merged = Merged(
        nodes[0].at if nodes else (),
        nodes,
        types,
        None,
        numbers,
        strings,
        tuple(_item(document, nodes, at) for at in range(width)),
        _item(document, nodes, width),
        fewest_items,
        most_items,
        {} if expressions else _named(document, nodes),
        {} if expressions else _beginnings(document, nodes),
        expressions,
        together(document, [node.objects.additional for node in nodes if node.objects.additional is not None]),
        tuple(dict.fromkeys(name for node in nodes for name in node.objects.required)),
        fewest,
        most,
    )
    if len(strings.patterns) + len(strings.formats) > MOST_EXPRESSIONS:
        raise document.spelling.refuse(merged.at, f"more than {MOST_EXPRESSIONS} expressions of one string")
    _narrow(merged)
    merged.values = _values(document, nodes, merged)
    return merged


def least(values: Sequence[int | None]) -> int | None:
    """The smallest of those that are there."""
    return min((value for value in values if value is not None), default=None)


def together(document: Document, pointers: Sequence[Pointer]) -> Together | None:
    """Nodes that hold of one value, each once; None where one of them is the schema false."""
    kept: dict[Pointer, None] = {}
    for pointer in pointers:
        node = document.node(pointer)
        for _ in range(_FEW):
            if not node.only_refers:
                break
            node = document.node(node.all_of[0])
        if node.never:
            return None
        if not node.says_nothing:
            kept[node.at] = None
    return tuple(kept)


def _item(document: Document, nodes: Sequence[Node], at: int) -> Together | None:
    found = [
        node.arrays.first[at] if at < len(node.arrays.first) else node.arrays.items
        for node in nodes
        if at < len(node.arrays.first) or node.arrays.items is not None
    ]
    return together(document, [pointer for pointer in found if pointer is not None])


def _narrow(merged: Merged) -> None:
    """Leaves out the kinds of values whose bounds contradict each other."""
    out = set()
    numbers, strings = merged.numbers, merged.strings
    if "number" in merged.types and not _has_numbers(numbers):
        out.add("number")
    if strings.longest is not None and strings.shortest > strings.longest:
        out.add("string")
    if merged.most_items is not None and merged.fewest_items > merged.most_items:
        out.add("array")
    if merged.most is not None and max(merged.fewest, len(merged.required)) > merged.most:
        out.add("object")
    merged.types -= out


def _has_numbers(numbers: Numbers) -> bool:
    step = numbers.multiple_of
    if numbers.whole:
        step = Fraction(1) if step is None else Fraction(math.lcm(step.numerator, step.denominator), step.denominator)
    low, high = numbers.low, numbers.high
    if low is None or high is None:
        return True
    if step is None:
        return low < high or (low == high and not numbers.above_low and not numbers.below_high)
    first = math.ceil(low / step)
    if first * step == low and numbers.above_low:
        first += 1
    return first * step < high or (first * step == high and not numbers.below_high)


def _numbers(nodes: Sequence[Node]) -> Numbers:
    low = high = multiple = None
    above = below = whole = False
    for node in nodes:
        mine = node.numbers
        if mine.low is not None and (low is None or mine.low >= low):
            above = mine.above_low or (above and mine.low == low)
            low = mine.low
        if mine.high is not None and (high is None or mine.high <= high):
            below = mine.below_high or (below and mine.high == high)
            high = mine.high
        if mine.multiple_of is not None:
            multiple = mine.multiple_of if multiple is None else _lcm(multiple, mine.multiple_of)
        whole |= mine.whole
    return Numbers(low, high, above, below, multiple, whole)


def _lcm(one: Fraction, other: Fraction) -> Fraction:
    below = math.lcm(one.denominator, other.denominator)
    return Fraction(math.lcm(int(one * below), int(other * below)), below)


def _strings(nodes: Sequence[Node]) -> Strings:
    return Strings(
        max((node.strings.shortest for node in nodes), default=0),
        least([node.strings.longest for node in nodes]),
        tuple(dict.fromkeys(pattern for node in nodes for pattern in node.strings.patterns)),
        tuple(dict.fromkeys(name for node in nodes for name in node.strings.formats)),
    )


def _values(document: Document, nodes: Sequence[Node], merged: Merged) -> tuple[Any, ...] | None:
    """The values of enum and const that the bounds allow, as far as these can be told without an expression."""
    lists = [node for node in nodes if node.values is not None]
    if not lists:
        return None
    found = {canonical(value): value for value in lists[0].values or ()}
    for node in lists[1:]:
        others = set(map(canonical, node.values or ()))
        found = {key: value for key, value in found.items() if key in others}
    if any(isinstance(value, list | dict) for value in found.values()) and _bounds_within(nodes):
        at = lists[0].at
        raise document.spelling.refuse(at, "arrays and objects in enum or const cannot be held with other bounds")
    return tuple(value for value in found.values() if kind_of(value) in merged.types and _fits(value, merged))


def _bounds_within(nodes: Sequence[Node]) -> bool:
    """Whether anything is said of the inside of arrays or objects."""
    return any(
        node.arrays.items is not None
        or node.arrays.first
        or node.arrays.fewest
        or node.arrays.most is not None
        or node.objects.properties
        or node.objects.patterns
        or node.objects.additional is not None
        or node.objects.required
        or node.objects.fewest
        or node.objects.most is not None
        for node in nodes
    )


def _fits(value: Any, merged: Merged) -> bool:
    match value:
        case bool() | None:
            return True
        case int() | float():
            number = Fraction(str(value))
            return _has_numbers(_numbers([Node((), numbers=merged.numbers), Node((), numbers=Numbers(number, number))]))
        case str():
            longest = merged.strings.longest
            return merged.strings.shortest <= len(value) and (longest is None or len(value) <= longest)
    return True


def _named(document: Document, nodes: Sequence[Node]) -> dict[str, Together | None]:
    """What each property that a node names, or needs, must be; None where there must be none."""
    order = dict.fromkeys(
        [
            *(name for node in nodes for name in node.objects.properties),
            *(name for node in nodes for name in node.objects.required),
        ]
    )
    return {
        name: together(document, [pointer for node in nodes for pointer in _of_name(document, node, name)])
        for name in order
    }


def _of_name(document: Document, node: Node, name: str) -> list[Pointer]:
    """What a node says of a property."""
    objects = node.objects
    found = [objects.properties[name]] if name in objects.properties else []
    for pattern, at in objects.patterns:
        beginning = literal_beginning(pattern)
        if beginning is None:
            raise document.spelling.refuse(at, "beside named properties, only expressions like ^beginning can be held")
        if name.startswith(beginning):
            found.append(at)
    if not found and objects.additional is not None:
        found.append(objects.additional)
    return found


def _expressions(document: Document, nodes: Sequence[Node]) -> tuple[tuple[str, Together | None], ...]:
    """Properties by expressions for their names, which must stand alone."""
    found = [node for node in nodes if any(literal_beginning(pattern) is None for pattern, _ in node.objects.patterns)]
    if not found:
        return ()
    at = found[0].objects.patterns[0][1]
    additional = found[0].objects.additional
    if additional is None or not document.node(additional).never:
        raise document.spelling.refuse(at, "such names can be held only where additionalProperties is false")
    own = found[0].objects
    if own.properties or own.required or any(_names(node) for node in nodes if node is not found[0]):
        raise document.spelling.refuse(at, "such names cannot be held together with what else is said of the object")
    return tuple((document.pattern(at), together(document, [at])) for _, at in found[0].objects.patterns)


def _names(node: Node) -> bool:
    """Whether a node says something of properties."""
    objects = node.objects
    return bool(objects.properties or objects.patterns or objects.required) or objects.additional is not None


def _beginnings(document: Document, nodes: Sequence[Node]) -> dict[str, Together | None]:
    """What properties must be whose names begin in some way."""
    begun: dict[str, Pointer] = {}
    for node in nodes:
        for pattern, at in node.objects.patterns:
            beginning = literal_beginning(pattern)
            if beginning is not None:
                begun.setdefault(beginning, at)
    for one, at in begun.items():
        if any(other != one and other.startswith(one) for other in begun):
            raise document.spelling.refuse(at, "expressions for names that match the same names cannot be held")
    return {
        beginning: together(document, [at for node in nodes for at in _of_name(document, node, beginning)])
        for beginning in begun
    }


def literal_beginning(pattern: str) -> str | None:
    """The beginning that a name must have by an expression that says just that."""
    text = pattern.removeprefix("^")
    return text if (pattern.startswith("^") or not pattern) and _PLAIN.fullmatch(text) else None
