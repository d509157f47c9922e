"""Kinds of values that request fields may have: each checks one JSON value and names what it wanted.

A kind knows no field and no model. Numbers are rounded to float32 as the contracts carry them, so a
range holds for what the worker sees.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from services.common.errors import InvalidArgument
from services.gateway.limits import check_text

Json = None | bool | int | float | str | list[Any] | dict[str, Any]


class Kind(Protocol):
    """What a field takes."""

    @property
    def wanted(self) -> str:
        """For an error message: "an integer from 1 to 20"."""
        ...

    def read(self, value: object, field: str) -> Any:
        """The value as the rest of the gateway uses it; raises InvalidArgument."""
        ...


def wrong(field: str, wanted: str, value: object, *, item: object = None) -> InvalidArgument:
    """The error for a value of the wrong type or size; `item` says which one of an array or object."""
    place = field if item is None else f"{field}[{item}]"
    return InvalidArgument(f"{place}: must be {wanted}, not {_shown(value)}", field=field)


def _shown(value: object) -> str:
    if isinstance(value, str | list | dict) and len(value) > 40:
        return f"{_type_name(value)} of length {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a huge integer"
    names = {None: "null", True: "true", False: "false"}
    try:
        text = names[value] if value is None or isinstance(value, bool) else repr(value)
    except RecursionError:
        return _type_name(value)
    return text if len(text) <= 80 else _type_name(value)


def _type_name(value: object) -> str:
    names = {str: "a string", list: "an array", dict: "an object", int: "an integer", float: "a number"}
    return names.get(type(value), "something else")


def whole(value: object) -> int | None:
    """The value if it is a whole number: in JSON 8.0 is one, and true is none.

    A float from 2**53 on may have been another number, such as an integer that is too long for the JSON parser.
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def read_ids(values: Sequence[object], field: str) -> tuple[int, ...]:
    """Token ids; raises InvalidArgument that says which is none."""
    if set(map(type, values)) == {int}:  # as nearly all are: a long array is read many times as fast
        return tuple(cast("Sequence[int]", values))
    ids = []
    for i, value in enumerate(values):
        token_id = whole(value)
        if token_id is None:
            raise wrong(field, "a token id", value, item=i)
        ids.append(token_id)
    return tuple(ids)


@dataclass(slots=True, frozen=True)
class Bool:
    """True or false."""

    @property
    def wanted(self) -> str:
        """For an error message."""
        return "true or false"

    def read(self, value: object, field: str) -> bool:
        """The value."""
        if not isinstance(value, bool):
            raise wrong(field, self.wanted, value)
        return value


@dataclass(slots=True, frozen=True)
class Int:
    """A whole number in [low, high]."""

    low: int
    high: int = 2**31 - 1

    @property
    def wanted(self) -> str:
        """For an error message."""
        return f"an integer from {self.low} to {self.high}"

    def read(self, value: object, field: str) -> int:
        """The value."""
        number = whole(value)
        if number is None or not self.low <= number <= self.high:
            raise wrong(field, self.wanted, value)
        return number


@dataclass(slots=True, frozen=True)
class Number:
    """A finite number in [low, high], or in (low, high]."""

    low: float
    high: float
    above_low: bool = False

    @property
    def wanted(self) -> str:
        """For an error message."""
        if self.above_low:
            return f"a number above {self.low:g}, at most {self.high:g}"
        return f"a number from {self.low:g} to {self.high:g}"

    def read(self, value: object, field: str) -> float:
        """The value in float32."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong(field, self.wanted, value)
        if not self.low <= value <= self.high:  # also refuses NaN
            raise wrong(field, self.wanted, value)
        number: float = struct.unpack("<f", struct.pack("<f", value))[0]
        if not math.isfinite(number) or (self.above_low and number <= self.low):
            raise wrong(field, self.wanted, value)
        return number


@dataclass(slots=True, frozen=True)
class Text:
    """A string; not empty unless `empty`."""

    longest: int = 1 << 30
    empty: bool = True

    @property
    def wanted(self) -> str:
        """For an error message."""
        kind = "a string" if self.empty else "a string that is not empty"
        return kind if self.longest >= 1 << 30 else f"{kind}, of at most {self.longest} characters"

    def read(self, value: object, field: str) -> str:
        """The value."""
        if not isinstance(value, str) or len(value) > self.longest or (not value and not self.empty):
            raise wrong(field, self.wanted, value)
        check_text(value, field)
        return value


@dataclass(slots=True, frozen=True)
class Texts:
    """Strings, none empty; `single` allows one string in place of a list of one."""

    most: int
    most_bytes: int
    single: bool = False

    @property
    def wanted(self) -> str:
        """For an error message."""
        return f"{'a string or ' if self.single else ''}an array of at most {self.most} strings"

    def read(self, value: object, field: str) -> tuple[str, ...]:
        """The strings."""
        values = [value] if self.single and isinstance(value, str) else value
        if not isinstance(values, list | tuple) or len(values) > self.most:
            raise wrong(field, self.wanted, value)
        for i, text in enumerate(values):
            if not isinstance(text, str) or not text:
                raise wrong(field, "a string that is not empty", text, item=i)
            check_text(text, field)
        if sum(len(text.encode()) for text in values) > self.most_bytes:
            raise InvalidArgument(f"{field}: more than {self.most_bytes} bytes in all", field=field)
        return tuple(values)


@dataclass(slots=True, frozen=True)
class Ids:
    """Token ids. Whether the vocabulary has them is checked with the model at hand."""

    most: int
    least: int = 0

    @property
    def wanted(self) -> str:
        """For an error message."""
        return f"an array of {f'{self.least} to' if self.least else 'at most'} {self.most} token ids"

    def read(self, value: object, field: str) -> tuple[int, ...]:
        """The ids."""
        if not isinstance(value, list | tuple) or not self.least <= len(value) <= self.most:
            raise wrong(field, self.wanted, value)
        return read_ids(value, field)


@dataclass(slots=True, frozen=True)
class Bias:
    """Token ids with a bias each: an object with the ids as keys, or pairs."""

    most: int
    bias: Number = Number(-100.0, 100.0)

    @property
    def wanted(self) -> str:
        """For an error message."""
        return f"an object of at most {self.most} token ids, each with {self.bias.wanted}"

    def read(self, value: object, field: str) -> tuple[tuple[int, float], ...]:
        """Pairs of id and bias, each id once."""
        pairs = list(value.items()) if isinstance(value, Mapping) else value
        if not isinstance(pairs, list | tuple) or len(pairs) > self.most:
            raise wrong(field, self.wanted, value)
        biases: dict[int, float] = {}
        for pair in pairs:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise wrong(field, self.wanted, value)
            key, bias = pair
            token_id = _key_id(key)
            if token_id is None:
                raise wrong(field, "an object with token ids as keys", key)
            if token_id in biases:
                raise InvalidArgument(f"{field}: token id {token_id} stands there twice", field=field)
            try:
                biases[token_id] = self.bias.read(bias, field)
            except InvalidArgument:
                raise wrong(field, self.bias.wanted, bias, item=token_id) from None
        return tuple(biases.items())


def _key_id(key: object) -> int | None:
    if isinstance(key, str) and len(key) <= 20 and key.removeprefix("-").isascii() and key.removeprefix("-").isdigit():
        return int(key)
    return whole(key)


@dataclass(slots=True, frozen=True)
class Object:
    """An object, as it is."""

    @property
    def wanted(self) -> str:
        """For an error message."""
        return "an object"

    def read(self, value: object, field: str) -> dict[str, Any]:
        """The object."""
        if not isinstance(value, dict):
            raise wrong(field, self.wanted, value)
        return value


@dataclass(slots=True, frozen=True)
class Labels:
    """An object of short strings."""

    most: int
    longest_key: int
    longest_value: int

    @property
    def wanted(self) -> str:
        """For an error message."""
        return (
            f"an object of at most {self.most} strings of at most {self.longest_value} characters, "
            f"with keys of at most {self.longest_key}"
        )

    def read(self, value: object, field: str) -> dict[str, str]:
        """The labels."""
        if not isinstance(value, dict) or len(value) > self.most:
            raise wrong(field, self.wanted, value)
        for key, label in value.items():
            if len(key) > self.longest_key or not isinstance(label, str) or len(label) > self.longest_value:
                raise wrong(field, self.wanted, label, item=key)
            check_text(key + label, field)
        return value


@dataclass(slots=True, frozen=True)
class Flags:
    """An object with some of these keys, each true or false."""

    keys: tuple[str, ...]

    @property
    def wanted(self) -> str:
        """For an error message."""
        return f"an object with {' and '.join(self.keys)}"

    def read(self, value: object, field: str) -> dict[str, bool]:
        """The flags that are set or unset."""
        if not isinstance(value, dict):
            raise wrong(field, self.wanted, value)
        for key in value:
            if key not in self.keys:
                raise InvalidArgument(f"{field}.{key}: unknown field; {field} is {self.wanted}", field=f"{field}.{key}")
        return {key: Bool().read(flag, f"{field}.{key}") for key, flag in value.items() if flag is not None}


@dataclass(slots=True, frozen=True)
class OneOf:
    """One of these values and no other."""

    values: tuple[Json, ...]

    @property
    def wanted(self) -> str:
        """For an error message."""
        return " or ".join(_shown(value) for value in self.values)

    def read(self, value: object, field: str) -> object:
        """The value."""
        if not any(value == known and type(value) is type(known) for known in self.values):
            raise wrong(field, self.wanted, value)
        return value


@dataclass(slots=True, frozen=True)
class Anything:
    """Taken as it is; whoever uses it checks it."""

    wanted: str = "a value"

    def read(self, value: object, field: str) -> object:
        """The value."""
        del field
        return value
