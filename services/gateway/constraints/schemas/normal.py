"""The way through: a client's schema in, text for the library out."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.gateway.constraints.parts import LONGEST, refuse
from services.gateway.constraints.schemas.document import Document
from services.gateway.constraints.schemas.states import States
from services.gateway.constraints.schemas.writing import Writer

DEEPEST = 100
"""Arrays and objects within each other in the text of a schema."""
_SPACE = r" |\r?\n[ \t]{0,32}"
"""White space between the parts of a JSON text: a blank, or a line and its indentation. A model may never stop."""


@dataclass(slots=True, frozen=True)
class Style:
    """How JSON is to be written: `compact` is without white space, `closed` without properties nobody named."""

    compact: bool = False
    closed: bool = False


def normal_text(schema: object, place: str, style: Style = Style(), *, prefix: str = "") -> str:
    """A schema in its normal form, as JSON text. Raises InvalidArgument that names the place.

    The names of its definitions begin with `prefix`.
    """
    _check_size(schema, place)
    document = Document(schema, place, closed=style.closed)
    made = Writer(document, States(document), prefix).write()
    space: dict[str, Any] = {"whitespace_flexible": False, "whitespace_pattern": None}
    if not style.compact:
        space = {"whitespace_pattern": _SPACE}
    text = json.dumps({"x-guidance": space, **made}, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        raise refuse(place, "has half of a surrogate pair, which is no text") from None
    return text


def _check_size(schema: object, place: str) -> None:
    """Bounds what is looked at further. A value that is not JSON is found when it is read."""
    left = LONGEST
    level: list[Any] = [schema]
    for _ in range(DEEPEST):
        within: list[Any] = []
        for value in level:
            left -= 4
            if isinstance(value, str):
                left -= len(value)
            elif isinstance(value, float) and not math.isfinite(value):
                raise refuse(place, "has a number that is not finite")
            elif isinstance(value, int) and value.bit_length() > 1024:
                raise refuse(place, "has a number that is too large")
            elif isinstance(value, Mapping):
                left -= sum(map(len, value))
                within += value.values()
            elif isinstance(value, list):
                within += value
            if left < 0:
                raise refuse(place, f"is too large: more than {LONGEST} characters")
        if not within:
            return
        level = within
    raise refuse(place, f"is nested deeper than {DEEPEST}")
