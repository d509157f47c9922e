"""States as the normal form. Each state with parts is a definition, so that no text is nested deep."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from services.gateway.constraints.schemas.document import Document
from services.gateway.constraints.schemas.keywords import kind_of
from services.gateway.constraints.schemas.merging import Merged, Together
from services.gateway.constraints.schemas.names import all_but
from services.gateway.constraints.schemas.node import TYPES, Numbers, Strings
from services.gateway.constraints.schemas.patterns import escape
from services.gateway.constraints.schemas.states import State, States

MOST_REMAINDERS = 10_000
"""The library looks at each remainder that multiples can leave, and no limit of its own ends that: some thousands
take 0.1 s, a hundred thousand seconds."""
Json = dict[str, Any]


class Writer:
    """Writes one schema."""

    def __init__(self, document: Document, states: States, prefix: str) -> None:
        self._document = document
        self._states = states
        self._prefix = prefix
        self._definitions: dict[str, Json] = {}
        self._waiting: list[State] = []
        self._remainders = 1  # that its numbers, begun together, leave to tell apart

    def write(self) -> Json:
        """The whole of it, with its definitions."""
        root = self._reference(self._states.root)
        while self._waiting:
            state = self._waiting.pop()
            self._definitions[self._name(state)] = self._state(state)
        return root if not self._definitions else {**root, "$defs": self._definitions}

    def _reference(self, state: State) -> Json:
        if not any(way.values is None and way.types & {"array", "object"} for way in state.ways):
            return self._state(state)
        if _anything(state):
            return {}
        name = self._name(state)
        if name not in self._definitions:
            self._definitions[name] = {}
            self._waiting.append(state)
        return {"$ref": f"#/$defs/{name}"}

    def _name(self, state: State) -> str:
        return f"{self._prefix}{state.number}"

    def _part(self, nodes: Together | None) -> Json | bool:
        """What stands within; false where nothing can."""
        state = self._states.reachable(nodes)
        return False if state is None else self._reference(state)

    def _state(self, state: State) -> Json:
        options = [option for way in state.ways for option in self._way(way)]
        return options[0] if len(options) == 1 else {"anyOf": options}

    def _way(self, way: Merged) -> list[Json]:
        if way.values is not None:
            return _values(way)
        made: list[Json] = []
        for kind in TYPES:
            if kind not in way.types:
                continue
            if kind == "number":
                self._check_numbers(way)
                made.append(_number(way.numbers))
            elif kind == "string":
                made.append(_string(way.strings))
            elif kind == "array":
                made += self._array(way)
            elif kind == "object":
                made += self._object(way)
            else:
                made.append({"type": kind})
        return made

    def _check_numbers(self, way: Merged) -> None:
        numbers = way.numbers
        if (keyword := _narrow(numbers)) is not None:
            why = "numbers between a whole one, which is left out, and one less than 1 away cannot be held"
            bounded = [node.at for node in way.nodes if keyword in _said(node.numbers)]
            raise self._document.spelling.refuse((*(bounded or [way.at])[0], keyword), why)
        if numbers.multiple_of is not None:
            self._remainders = math.lcm(self._remainders, remainders(numbers.multiple_of))
            if self._remainders > MOST_REMAINDERS:
                found = [node.at for node in way.nodes if node.numbers.multiple_of is not None]
                why = f"this and what else must be a multiple have more than {MOST_REMAINDERS} remainders to tell apart"
                raise self._document.spelling.refuse((*found[-1], "multipleOf"), why)

    def _array(self, way: Merged) -> list[Json]:
        first: list[Json] = []
        most = way.most_items
        for part in way.first:
            written = self._part(part)
            if isinstance(written, bool):  # no array goes on from here
                most = len(first) if most is None else min(most, len(first))
                break
            first.append(written)
        else:
            if isinstance(self._part(way.items), bool):
                most = len(first) if most is None else min(most, len(first))
        if most is not None and way.fewest_items > most:
            return []
        made: Json = {"type": "array"}
        if first:
            made["prefixItems"] = first
        made["items"] = self._part(way.items)
        if way.fewest_items:
            made["minItems"] = way.fewest_items
        if most is not None:
            made["maxItems"] = most
        return [made]

    def _object(self, way: Merged) -> list[Json]:
        properties = {name: self._part(nodes) for name, nodes in way.names.items()}
        if any(properties[name] is False for name in way.required):
            return []
        made: Json = {"type": "object"}
        patterns = {expression: self._part(nodes) for expression, nodes in way.expressions}
        others: Json | bool = False if way.expressions else self._part(way.others)
        open_names = [*properties]
        for beginning, nodes in way.beginnings.items():
            rest = [name.removeprefix(beginning) for name in open_names if name.startswith(beginning)]
            patterns[f"^{escape(beginning)}{all_but(rest)[1:]}"] = self._part(nodes)
        if others is not False and (open_names or way.beginnings):
            patterns[all_but(open_names, way.beginnings)] = others
            others = False
        kept = {name: part for name, part in properties.items() if part is not False}
        if kept:
            made["properties"] = kept
        patterns = {expression: part for expression, part in patterns.items() if part is not False}
        if patterns:
            made["patternProperties"] = patterns
        made["additionalProperties"] = others
        if way.required:
            made["required"] = list(way.required)
        return self._counted(way, made, bool(patterns) or others is not False)

    def _counted(self, way: Merged, made: Json, open_: bool) -> list[Json]:
        """With how many properties there may be, as far as it is not said already."""
        needed, named = len(way.required), len(made.get("properties", {}))
        fewest = way.fewest if way.fewest > needed else 0
        most = way.most if way.most is not None and (open_ or way.most < named) else None
        if fewest > named and not open_:
            return []
        if (fewest and (fewest > 1 or named)) or (most is not None and named > needed):
            word = "minProperties" if fewest and (fewest > 1 or named) else "maxProperties"
            raise self._document.spelling.refuse(
                self._where(way, word), "cannot be held with the properties that are named"
            )
        if fewest:
            made["minProperties"] = fewest
        if most is not None:
            made["maxProperties"] = most
        return [made]

    def _where(self, way: Merged, word: str) -> tuple[str | int, ...]:
        return (*way.at, word)


def _anything(state: State) -> bool:
    return not state.at


def _values(way: Merged) -> list[Json]:
    """The values one by one; expressions that strings must match stand beside them."""
    texts = [value for value in way.values or () if kind_of(value) == "string"]
    others = [value for value in way.values or () if kind_of(value) != "string"]
    made: list[Json] = [{"enum": others}] if others else []
    if texts:
        made += [_with_expressions({"enum": texts}, way.strings)]
    return made


def _number(numbers: Numbers) -> Json:
    made: Json = {"type": "integer" if numbers.whole else "number"}
    if numbers.low is not None:
        made["exclusiveMinimum" if numbers.above_low else "minimum"] = _plain(numbers.low)
    if numbers.high is not None:
        made["exclusiveMaximum" if numbers.below_high else "maximum"] = _plain(numbers.high)
    if numbers.multiple_of is not None:
        made["multipleOf"] = _plain(numbers.multiple_of)
    return made


def _narrow(numbers: Numbers) -> str | None:
    """The bound that is left out, a whole number nearer to 0 than the others, where the library would take it."""
    low, high = numbers.low, numbers.high
    if numbers.whole or low is None or high is None or high - low >= 1:
        return None
    if numbers.above_low and low >= 0 and low.denominator == 1:
        return "exclusiveMinimum"
    return "exclusiveMaximum" if numbers.below_high and high <= 0 and high.denominator == 1 else None


def _said(numbers: Numbers) -> list[str]:
    return ["exclusiveMinimum"] * numbers.above_low + ["exclusiveMaximum"] * numbers.below_high


def remainders(multiple: Fraction) -> int:
    """How many remainders the digits of a number can leave while it is written: powers of 10 need none."""
    left = multiple
    while left.denominator != 1:
        left *= 10
    whole = int(left)
    while whole % 10 == 0:
        whole //= 10
    return whole


def _plain(number: Fraction) -> int | float:
    return int(number) if number.denominator == 1 else float(number)


def _string(strings: Strings) -> Json:
    made: Json = {"type": "string"}
    if strings.shortest:
        made["minLength"] = strings.shortest
    if strings.longest is not None:
        made["maxLength"] = strings.longest
    return _with_expressions(made, strings)


def _with_expressions(made: Json, strings: Strings) -> Json:
    more = [{"type": "string", "pattern": pattern} for pattern in strings.patterns]
    more += [{"type": "string", "format": name} for name in strings.formats]
    return {**made, "allOf": more} if more else made
