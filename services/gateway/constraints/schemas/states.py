"""Which nodes hold together, which values exist at all, and which would never end.

A state is what one value must be: one of several ways, each a Merged. Values exist by the least fixed
point: a way can be gone if all that it needs can be, and what needs itself never can.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from services.gateway.constraints.schemas.document import Document
from services.gateway.constraints.schemas.keywords import canonical
from services.gateway.constraints.schemas.merging import Merged, Together, merge, together
from services.gateway.constraints.schemas.node import Node, Pointer

MOST_WAYS = 512
"""Ways of one state: each choice in anyOf times each in another."""
MOST_COMPARISONS = 10_000
MOST_STATES = 10_000
DEEPEST = 150
"""States within states. The library goes into them by recursion, and 500 are too much for its stack."""
_CHAIN = 64


@dataclass(slots=True)
class State:
    """What one value must be, one of several ways. `number` is its place in the order of discovery."""

    number: int
    at: Together
    ways: list[Merged] = field(default_factory=list)
    exists: bool = False
    ends: bool = False


@dataclass(slots=True, frozen=True)
class _Way:
    """Nodes that hold together, and which of the options of each oneOf are among them."""

    nodes: tuple[Node, ...] = ()
    picks: tuple[tuple[Pointer, int], ...] = ()

    def __add__(self, other: _Way) -> _Way:
        nodes = dict.fromkeys(node.at for node in self.nodes)
        return _Way(
            (*self.nodes, *(node for node in other.nodes if node.at not in nodes)),
            tuple(dict.fromkeys((*self.picks, *other.picks))),
        )


class States:
    """All states of a schema that can be reached from its root, and what is known of them."""

    def __init__(self, document: Document) -> None:
        self._document = document
        self._expanded: dict[Pointer, list[_Way]] = {}
        self._tagged: dict[Together, dict[str, frozenset[str]] | None] = {}
        self._comparisons = 0
        self._states: dict[frozenset[Pointer], State] = {}
        self.root = self._explore(together(document, [()]))

    def of(self, nodes: Together) -> State:
        """The state of nodes that hold together."""
        return self._states[frozenset(nodes)]

    def reachable(self, nodes: Together | None) -> State | None:
        """The state of nodes that hold together; None where no value fits."""
        state = None if nodes is None else self.of(nodes)
        return state if state is not None and state.exists else None

    # Exploring

    def _explore(self, root: Together | None) -> State:
        if root is None:
            raise self._document.spelling.refuse((), "no value can fit it")
        first = self._state(root)
        stack: list[Iterator[Together]] = [iter(_parts(first))]
        while stack:
            if len(stack) > DEEPEST:
                raise self._document.spelling.refuse((), f"is nested deeper than {DEEPEST}")
            nodes = next(stack[-1], None)
            if nodes is None:
                stack.pop()
            elif frozenset(nodes) not in self._states:
                stack.append(iter(_parts(self._state(nodes))))
        self._settle()
        return first

    def _state(self, nodes: Together) -> State:
        if len(self._states) >= MOST_STATES:
            raise self._document.spelling.refuse((), f"says more than {MOST_STATES} different things of values")
        state = State(len(self._states), nodes)
        self._states[frozenset(nodes)] = state
        for way in self._ways(nodes):
            merged = merge(self._document, way.nodes)
            if _possible(merged):
                self._check_picks(way)
                state.ways.append(merged)
        return state

    def _ways(self, nodes: Sequence[Pointer]) -> list[_Way]:
        ways = [_Way()]
        for pointer in nodes:
            ways = self._times(ways, self._expand(pointer, ()), pointer)
        return ways

    def _expand(self, at: Pointer, above: tuple[Pointer, ...]) -> list[_Way]:
        """The ways of a node: itself with all that holds beside it, once for each choice."""
        if at in above:
            raise self._document.spelling.refuse(above[0], "never terminates: it refers to itself")
        if at in self._expanded:
            return self._expanded[at]
        if len(above) >= _CHAIN:
            raise self._document.spelling.refuse(above[0], f"refers on more than {_CHAIN} times")
        node = self._document.node(at)
        ways = [] if node.never else [_Way((node,))]
        within = (*above, at)
        for pointer in node.all_of:
            ways = self._times(ways, self._expand(pointer, within), at)
        for options in node.any_of:
            ways = self._times(ways, [way for option in options for way in self._expand(option, within)], at)
        for options in node.one_of:
            picked = [
                way + _Way(picks=((options[0], i),))
                for i, option in enumerate(options)
                for way in self._expand(option, within)
            ]
            ways = self._times(ways, picked, at)
        self._expanded[at] = ways
        return ways

    def _times(self, ones: list[_Way], others: list[_Way], at: Pointer) -> list[_Way]:
        if len(ones) * len(others) > MOST_WAYS:
            raise self._document.spelling.refuse(at, f"its choices can be combined in more than {MOST_WAYS} ways")
        return [one + other for one in ones for other in others]

    # oneOf

    def _check_picks(self, way: _Way) -> None:
        """That what is picked of a oneOf fits no other of its options."""
        for first, picked in way.picks:
            group = first[:-1]
            for options in self._document.node(group[:-1]).one_of:
                for i, option in enumerate(options):
                    if options[0] == first and i != picked and not self._apart(way, option):
                        why = f"options {min(i, picked)} and {max(i, picked)} may fit the same value; say anyOf"
                        raise self._document.spelling.refuse(group, why)

    def _apart(self, way: _Way, option: Pointer) -> bool:
        return all(
            self._kinds_apart(way, other) or self._nothing((way + other).nodes, 3) for other in self._expand(option, ())
        )

    def _kinds_apart(self, one: _Way, other: _Way) -> bool:
        """Whether both are objects that need a property, which is one of these values here and of those there."""
        if self._tags(one) is None or self._tags(other) is None:
            return False
        mine, theirs = self._tags(one) or {}, self._tags(other) or {}
        return any(mine[name].isdisjoint(theirs[name]) for name in mine.keys() & theirs.keys())

    def _tags(self, way: _Way) -> dict[str, frozenset[str]] | None:
        """The properties that an object needs and that are one of a few values; None where it may be no object."""
        key = tuple(node.at for node in way.nodes)
        if key not in self._tagged:
            self._tagged[key] = self._find_tags(way)
        return self._tagged[key]

    def _find_tags(self, way: _Way) -> dict[str, frozenset[str]] | None:
        if frozenset(("object",)) not in (node.types for node in way.nodes):
            return None
        required = {name for node in way.nodes for name in node.objects.required}
        tags: dict[str, frozenset[str]] = {}
        for node in way.nodes:
            for name in required & node.objects.properties.keys():
                values = self._document.node(node.objects.properties[name]).values
                if values is not None:
                    tags[name] = frozenset(map(canonical, values))
        return tags

    def _nothing(self, nodes: Sequence[Node], depth: int) -> bool:
        """Whether it is sure that no value fits these nodes."""
        self._comparisons += 1
        if self._comparisons > MOST_COMPARISONS:
            raise self._document.spelling.refuse((), "its oneOf have too many options to be told apart")
        merged = merge(self._document, nodes)
        if not _possible(merged):
            return True
        if merged.types != {"object"} or merged.values is not None or not depth:
            return False
        return any(self._nothing_of(merged.names.get(name), depth - 1) for name in merged.required)

    def _nothing_of(self, nodes: Together | None, depth: int) -> bool:
        return nodes is None or all(self._nothing(way.nodes, depth) for way in self._ways(nodes))

    # What exists

    def _settle(self) -> None:
        """Finds out which values exist; raises for what would never end."""
        order = sorted(self._states.values(), key=lambda state: -state.number)
        changed = True
        while changed:
            changed = False
            for state in order:
                if not state.ends and (not state.ways or any(map(self._ends, state.ways))):
                    state.ends = changed = True
                if not state.exists and any(map(self._exists, state.ways)):
                    state.exists = changed = True
        for state in reversed(order):
            if not state.ends or not all(map(self._ends, state.ways)):
                raise self._document.spelling.refuse(state.at[0] if state.at else (), "never terminates")
        if not self._states[frozenset(together(self._document, [()]) or ())].exists:
            raise self._document.spelling.refuse((), "no value can fit it")

    def _exists(self, way: Merged) -> bool:
        return any(all(part is not None and self.of(part).exists for part in needed) for needed in _needed(way))

    def _ends(self, way: Merged) -> bool:
        return any(all(part is None or self.of(part).ends for part in needed) for needed in _needed(way))


def _possible(merged: Merged) -> bool:
    return bool(merged.types) and merged.values != ()


def _needed(way: Merged) -> Iterator[list[Together | None]]:
    """For each kind of value, what must exist for one of it to be."""
    if way.values is not None or way.types - {"array", "object"}:
        yield []
        return
    if "array" in way.types:
        yield [
            way.first[at] if at < len(way.first) else way.items
            for at in range(min(way.fewest_items, len(way.first) + 1))
        ]
    if "object" in way.types:
        yield [way.names[name] for name in way.required if name in way.names]


def _parts(state: State) -> list[Together]:
    """What stands within, in the order in which it is written."""
    found: list[Together | None] = []
    for way in state.ways:
        if way.values is not None:
            continue
        if "array" in way.types:
            found += [*way.first, way.items]
        if "object" in way.types:
            found += [*way.names.values(), *way.beginnings.values(), *(part for _, part in way.expressions), way.others]
    return [part for part in found if part is not None]
