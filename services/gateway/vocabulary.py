"""A model's vocabulary as plain data: what each id stands for, and how the pieces join to text.

Read once from tokenizer.json; no tokenizer object is needed afterwards, so any thread may use it.
Decoders that can't be followed token by token are refused by name when the model loads.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.common.errors import FailedPrecondition

_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")

Change = Callable[[str], str]
"""What a decoder does to one piece, whatever stands beside it."""


@dataclass(slots=True, frozen=True)
class Joining:
    """How pieces become text: by their bytes (byte-level BPE), or one text after another."""

    by_bytes: bool = False
    byte_fallback: bool = False
    changes: tuple[Change, ...] = ()
    first_changes: tuple[Change, ...] | None = None
    strip_char: str = ""
    strip_count: int = 0

    def apply(self, piece: str, *, first: bool = False) -> str:
        """The text of a piece, as the first of a text or a later one."""
        changes = self.first_changes if first and self.first_changes is not None else self.changes
        for change in changes:
            piece = change(piece)
        return piece


class Vocabulary:
    """Pieces, special ids and joining of one model. Ids without a piece stand for no text.

    `added` are the tokens that are cut out of a text before anything else, by their text; special ones are among them.
    """

    __slots__ = ("_added", "_bytes", "_fragments", "_longest", "joining", "pieces", "special_ids")

    def __init__(
        self,
        pieces: Sequence[str | None],
        special_ids: Collection[int],
        joining: Joining,
        *,
        added: Mapping[str, int] | None = None,
    ) -> None:
        self.pieces = tuple(pieces)
        self.special_ids = frozenset(special_ids)
        self._added = dict(added or {})
        self.joining = joining
        if joining.by_bytes:
            self._bytes = tuple(_byte_level_bytes(joining.apply(piece)) if piece else b"" for piece in pieces)
            self._fragments: tuple[str | bytes | int, ...] = tuple(_text_or_bytes(data) for data in self._bytes)
        else:
            self._fragments = tuple(self._fragment(piece) for piece in pieces)
            self._bytes = tuple(bytes((f,)) if isinstance(f, int) else _utf8(f) for f in self._fragments)
        self._longest = max((len(data) for data in self._bytes), default=1)  # asked for by every request

    def __len__(self) -> int:
        """One more than the highest id."""
        return len(self.pieces)

    def _fragment(self, piece: str | None) -> str | int:
        if piece is None:
            return ""
        text = self.joining.apply(piece)
        if self.joining.byte_fallback and _BYTE_PIECE.fullmatch(text):
            return int(text[3:5], 16)
        return text

    @property
    def fragments(self) -> tuple[str | bytes | int, ...]:
        """Per id: its text; or, where it is no whole text, its bytes; or its one byte (byte fallback)."""
        return self._fragments

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that an id stands for, perhaps a part of a character; none for an unknown id."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def piece(self, token_id: int) -> str:
        """The vocabulary's own spelling of an id; empty for an unknown one."""
        return (self.pieces[token_id] or "") if 0 <= token_id < len(self.pieces) else ""

    def special_id(self, text: str) -> int | None:
        """The special token that is written so; None if there is none."""
        token_id = self._added.get(text)
        return token_id if token_id in self.special_ids else None

    def added_text(self, token_id: int) -> str:
        """What an added token is written as; empty for another."""
        return next((text for text, added in self._added.items() if added == token_id), "")

    def added_id(self, text: str) -> int | None:
        """The token, special or not, that stands wherever this text does; None if it is spelled with others."""
        return self._added.get(text)

    @property
    def longest_token(self) -> int:
        """Most bytes, so most characters, that one id stands for."""
        return self._longest


def read_joining(decoder: Mapping[str, Any] | None) -> Joining:
    """The joining that the `decoder` of a tokenizer.json asks for."""
    if decoder is None:
        return Joining(changes=(_after_space,), first_changes=())
    plan = _Plan()
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    for step in steps:
        plan.add(step)
    return plan.joining()


class _Plan:
    """A decoder's steps, read in order."""

    def __init__(self) -> None:
        self.by_bytes = False
        self.byte_fallback = False
        self.fused = False
        self.changes: list[Change] = []
        self.first_changes: list[Change] = []
        self.strip = ("", 0)

    def add(self, step: Mapping[str, Any]) -> None:
        kind = str(step.get("type"))
        joined = self.by_bytes or self.byte_fallback or self.fused
        if kind == "ByteLevel" and not joined:
            self.by_bytes = True
        elif kind == "ByteFallback" and not joined:
            self.byte_fallback = True
        elif kind == "Fuse":
            self.fused = True
        elif kind == "Replace" and not joined:
            self._both(_replacement(step["pattern"], step["content"]))
        elif kind == "Metaspace" and not joined:
            self._metaspace(step)
        elif kind == "Strip" and not step["stop"] and self.fused and not self.by_bytes and not self.strip[1]:
            self.strip = (step["content"], int(step["start"]))
        elif kind == "Strip" and not step["stop"] and not joined:
            self._both(_stripping(step["content"], int(step["start"])))
        else:
            raise FailedPrecondition(
                f"tokenizer.json: the decoder step {kind} can't be streamed where it stands", field="tokenizer.json"
            )

    def joining(self) -> Joining:
        first = tuple(self.first_changes)
        changes = tuple(self.changes)
        return Joining(
            self.by_bytes,
            self.byte_fallback,
            changes,
            None if first == changes else first,
            self.strip[0],
            self.strip[1],
        )

    def _both(self, change: Change) -> None:
        self.changes.append(change)
        self.first_changes.append(change)

    def _metaspace(self, step: Mapping[str, Any]) -> None:
        mark = str(step["replacement"])
        never = step.get("prepend_scheme") == "never" or step.get("add_prefix_space") is False
        self.changes.append(_replacement({"String": mark}, " "))
        self.first_changes.append(_replacement({"String": mark}, " " if never else ""))


def _after_space(piece: str) -> str:
    return " " + piece


def _replacement(pattern: Mapping[str, str], content: str) -> Change:
    if "String" in pattern:
        old = pattern["String"]
        return lambda piece: piece.replace(old, content)
    regex = re.compile(pattern["Regex"])
    return lambda piece: regex.sub(lambda _: content, piece)


def _stripping(char: str, count: int) -> Change:
    return lambda piece: strip_left(piece, char, count)[0]


def strip_left(text: str, char: str, count: int) -> tuple[str, int]:
    """Text without up to `count` leading `char`s, and how many more may still be cut from what follows."""
    cut = 0
    while cut < count and text.startswith(char, cut):
        cut += 1
    return text[cut:], count - cut if cut == len(text) else 0


def _byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's spelling of bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in piece])
    except KeyError:  # an added token, written as it is
        return _utf8(piece)


def _text_or_bytes(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _utf8(text: str | bytes | int) -> bytes:
    return text.encode() if isinstance(text, str) else b""
