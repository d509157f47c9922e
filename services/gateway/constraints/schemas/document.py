"""The nodes of one schema, by pointer, each read once; and what a $ref points to."""

from __future__ import annotations

import urllib.parse
from collections.abc import Mapping
from typing import Any

from services.common.settings import nearest
from services.gateway.constraints.schemas.keywords import CLOSED, Reader
from services.gateway.constraints.schemas.node import Node, Pointer, Spelling

MOST_NODES = 20_000
_OLD = ("draft-04", "draft-06", "draft-07", "2019-09")
_DIALECTS = {
    **{f"http://json-schema.org/{name}/schema": name for name in ("draft-04", "draft-06", "draft-07")},
    **{f"https://json-schema.org/draft/{name}/schema": name for name in ("2019-09", "2020-12")},
}


class Document:
    """A schema. `closed` stands for additionalProperties false wherever properties are named without it."""

    def __init__(self, root: object, place: str, *, closed: bool = False) -> None:
        self.spelling = Spelling(place)
        self._root = root
        self._nodes: dict[Pointer, Node] = {CLOSED: Node(CLOSED, never=True)}
        self._reader = Reader(self.spelling, old=self._dialect() in _OLD, closed=closed)

    def node(self, at: Pointer) -> Node:
        """The node at a pointer."""
        found = self._nodes.get(at)
        if found is None:
            if len(self._nodes) > MOST_NODES:
                raise self.spelling.refuse((), f"has more than {MOST_NODES} parts")
            found = self._nodes[at] = self._reader.read(self._value(at), at, self._target)
        return found

    def pattern(self, at: Pointer) -> str:
        """The expression, translated, that is the key at a pointer into patternProperties."""
        return self._reader.pattern(at[-1], at)

    def _dialect(self) -> str:
        said = self._root.get("$schema") if isinstance(self._root, Mapping) else None
        if said is None:
            return "2020-12"
        if not isinstance(said, str) or said.rstrip("#") not in _DIALECTS:
            known = nearest(said, list(_DIALECTS)) if isinstance(said, str) else ""
            raise self.spelling.refuse(("$schema",), f"this dialect is not known{known}")
        return _DIALECTS[said.rstrip("#")]

    def _value(self, at: Pointer) -> Any:
        value: Any = self._root
        for part in at:
            value = value[part]
        return value

    def _target(self, ref: object, at: Pointer) -> Pointer:
        """Where a $ref leads: a pointer within this schema, and nothing else."""
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise self.spelling.refuse(at, "must be a pointer within this schema, as #/$defs/name")
        if ref != "#" and not ref.startswith("#/"):
            raise self.spelling.refuse(at, "anchors cannot be held; say #/$defs/name")
        pointer: list[str | int] = []
        value: Any = self._root
        for part in ref[2:].split("/") if len(ref) > 1 else ():
            key = urllib.parse.unquote(part).replace("~1", "/").replace("~0", "~")
            if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
                pointer.append(int(key))
                value = value[int(key)]
            elif isinstance(value, Mapping) and key in value:
                pointer.append(key)
                value = value[key]
            else:
                raise self.spelling.refuse(at, f"points to {ref}, which is not there")
        return tuple(pointer)
