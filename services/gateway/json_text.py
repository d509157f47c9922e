"""JSON as clients write it, read so that nothing in it is lost: no key twice, no number that is none or is rounded.

The fast reader keeps the last of two equal keys without a word, and tells of a NaN only at which byte it
stands; integers beyond 64 bits it rounds. So what it has kept is counted; where that is not all, where it
refuses, and where so many digits stand in a row, the place is looked for.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import orjson

from services.common.errors import InvalidArgument
from services.gateway.limits import check_text

_LONGEST_SEARCHED = 1 << 20
"""Bytes; in longer texts no place is looked for: that takes some times as long as reading does."""
_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)
_LONG = b"0" * 19
"""Digits of the shortest integer that may be beyond 64 bits, all of them alike: so they are found fastest."""


def read_json(text: bytes, field: str = "", *, rounded: bool = False) -> Any:
    """The value. Raises InvalidArgument with the place at fault: a field of `field`, or of a body where that is "".

    `rounded` says that integers beyond 64 bits may be: for callers that need to know only whether all is well.
    """
    whole = field or "body"
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        _raise_for_place(text, field)
        raise InvalidArgument(f"{whole}: no JSON: {error}", field=whole) from None
    try:
        kept = orjson.dumps(value).count(b'"')
    except TypeError:
        raise InvalidArgument(f"{whole}: nested too deep", field=whole) from None
    if kept != text.count(b'"') + _spelled_out(text):
        _raise_for_place(text, field)
        raise InvalidArgument(f"{whole}: an object has a key twice", field=whole)
    if not rounded and _LONG in text.translate(_DIGITS):
        _raise_for_place(text, field, long=True)
    return value


def _spelled_out(text: bytes) -> int:
    r"""Quotes that are spelled \u0022, which others write as \"."""
    found = text.count(b"\\u0022")
    return text.replace(b"\\\\", b"").count(b"\\u0022") if found else 0


class _Rounded(float):
    """An integer beyond 64 bits."""


def _integer(digits: str) -> float:
    value = float(digits)
    if abs(value) < 2**62 or (len(digits) < 21 and -(2**63) <= int(digits) < 2**64):
        return value
    return _Rounded(value)


class _Object(dict[str, Any]):
    """An object, with the first key that it has twice."""

    __slots__ = ("twin",)

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.twin: str | None = None
        if len(self) < len(pairs):
            seen: set[str] = set()
            self.twin = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]


def _raise_for_place(text: bytes, field: str, *, long: bool = False) -> None:
    """Raises for the first place that can't be taken, if the text is otherwise JSON and not too long."""
    if len(text) > _LONGEST_SEARCHED:
        return
    try:
        value = json.loads(text.decode(), object_pairs_hook=_Object, parse_int=_integer if long else float)
    except (ValueError, RecursionError):
        return
    waiting = [(field, value)]
    while waiting:
        place, value = waiting.pop()
        whole = place or "body"
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidArgument(f"{whole}: must be a finite number", field=whole)
        if isinstance(value, _Rounded):
            raise InvalidArgument(f"{whole}: an integer beyond 64 bits, which would be rounded", field=whole)
        if isinstance(value, str):
            check_text(value, whole)
        if isinstance(value, _Object):
            for key in value:
                check_text(key, whole)
            if value.twin is not None:
                twin = _inside(place, value.twin)
                raise InvalidArgument(f"{twin}: stands there twice", field=twin)
        waiting += reversed([*_children(place, value)])


def _children(place: str, value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _Object):
        for key, child in value.items():
            yield _inside(place, key), child
    elif isinstance(value, list):
        for i, child in enumerate(value):
            yield f"{place or 'body'}[{i}]", child


def _inside(place: str, key: str) -> str:
    return f"{place}.{key}" if place else key
