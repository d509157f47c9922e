"""Expressions as JSON schema has them (ECMA-262), translated into those of the library.

What the two read differently is written out: "." and \\s, literal braces, brackets within a class.
What ECMA-262 and other readers of schemas see differently is taken in the sense that both allow.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_ANY_SPACE = r"\s\x1c-\x1f\x{FEFF}"
_CLASSES = {
    "d": "[0-9]",
    "D": r"[^\p{Nd}]",
    "w": "[A-Za-z0-9_]",
    "W": r"[^\w]",
    "s": r"[\t\n\r\x0c\x20]",
    "S": f"[^{_ANY_SPACE}]",
}
_IN_CLASS = {"d": "0-9", "D": r"\P{Nd}", "w": "A-Za-z0-9_", "W": r"\W", "s": r"\t\n\r\x0c\x20"}
_IN_NEGATED = {"d": "0-9", "w": "A-Za-z0-9_", "s": _ANY_SPACE}
NAMED = {8: r"\x08", 9: r"\t", 10: r"\n", 12: r"\x0c", 13: r"\r"}
"""Control characters that have a short spelling in JSON. The library takes a class with another of them, or
a range with one, to hold a quotation mark and a backslash too."""
_CONTROLS = {"n": (10, r"\n"), "r": (13, r"\r"), "t": (9, r"\t"), "f": (12, r"\x0c"), "v": (11, r"\x0b")}
_DOT = r"[^\n\r\x{2028}\x{2029}]"
_REPEAT = re.compile(r"\{(\d{1,6})(,(\d{1,6})?)?\}")
_PROPERTY = re.compile(r"\{[A-Za-z_]{1,40}\}")
_HEX = {"x": re.compile(r"[0-9a-fA-F]{2}"), "u": re.compile(r"[0-9a-fA-F]{4}")}
_PUNCTUATION = set("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~ ")
_META = set("\\.+*?()|[]{}^$#&-~/")
DEEPEST = 64
"""Groups within groups."""


def escape(text: str) -> str:
    """An expression for this text."""
    return "".join(_literal(char) for char in text)


def _literal(char: str) -> str:
    if char in _META:
        return f"\\{char}"
    return char if char.isalnum() or char in _PUNCTUATION else f"\\x{{{ord(char):X}}}"


def translate(pattern: str) -> str:
    """The same expression for the library. Raises ValueError that says what it can't be."""
    return _Reader(pattern).read()


class _Reader:
    """Goes through an expression once, from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._depth = 0
        self._code = 0  # of the character that was escaped last

    def read(self) -> str:
        out: list[str] = []
        repeatable = False
        while self._at < len(self._pattern):
            char = self._next()
            if char in "*+?" or (char == "{" and _REPEAT.match(self._pattern, self._at - 1)):
                if not repeatable:
                    raise ValueError(f"nothing to repeat at position {self._at - 1}")
                out.append(self._repeat(char))
                repeatable = False
                continue
            repeatable = char not in "^$|("
            out.append(self._one(char))
        if self._depth:
            raise ValueError("a group is not closed")
        return "".join(out)

    def _next(self) -> str:
        char = self._pattern[self._at]
        self._at += 1
        return char

    def _one(self, char: str) -> str:
        match char:
            case "(":
                return self._group()
            case ")":
                if not self._depth:
                    raise ValueError(f"a group ends at position {self._at - 1} that has not begun")
                self._depth -= 1
                return ")"
            case "^" | "$" | "|":
                return char
            case ".":
                return _DOT
            case "[":
                return self._class()
            case "\\":
                return self._escape()
        return _literal(char)

    def _group(self) -> str:
        self._depth += 1
        if self._depth > DEEPEST:
            raise ValueError(f"groups are nested deeper than {DEEPEST}")
        rest = self._pattern[self._at :]
        if rest.startswith("?:"):
            self._at += 2
        elif named := re.match(r"\?<[A-Za-z_][A-Za-z0-9_]*>", rest):
            self._at += named.end()
        elif rest.startswith(("?=", "?!", "?<=", "?<!")):
            raise ValueError("expressions that look ahead or behind cannot be held")
        elif rest.startswith("?"):
            raise ValueError(f"a group of unknown kind begins at position {self._at - 1}")
        return "(?:"

    def _repeat(self, char: str) -> str:
        if char == "{":
            found = _REPEAT.match(self._pattern, self._at - 1)
            assert found is not None
            self._at = found.end()
            if found[3] is not None and int(found[3]) < int(found[1]):
                raise ValueError(f"a repetition is from {found[1]} to {found[3]}")
            char = found[0]
        if self._pattern.startswith("?", self._at):  # takes as little as it can, of the same texts
            self._at += 1
        return char

    def _escape(self) -> str:
        kind, text = self._escaped()
        return _CLASSES[text] if kind == "class" else text

    def _escaped(self) -> tuple[str, str]:
        """("class", its letter), ("property", its text) or ("char", its text)."""
        if self._at == len(self._pattern):
            raise ValueError("a backslash stands at the end")
        char = self._next()
        if char in _CLASSES:
            return "class", char
        if char in _CONTROLS:
            self._code, text = _CONTROLS[char]
            return "char", text
        if char in _HEX:
            found = _HEX[char].match(self._pattern, self._at)
            if found is None:
                raise ValueError(f"\\{char} at position {self._at - 2} needs hexadecimal digits")
            self._at = found.end()
            self._code = int(found[0], 16)
            if 0xD800 <= self._code < 0xE000:
                raise ValueError("halves of surrogate pairs are no text")
            return "char", f"\\x{{{found[0]}}}"
        if char in "pP" and (found := _PROPERTY.match(self._pattern, self._at)):
            self._at = found.end()
            return "property", f"\\{char}{found[0]}"
        if char in "bB":
            raise ValueError("boundaries of words (\\b) cannot be held")
        if char.isdigit():
            raise ValueError(f"references to groups (\\{char}) cannot be held")
        if char not in _PUNCTUATION:
            raise ValueError(f"\\{char} at position {self._at - 2} is not known")
        self._code = ord(char)
        return "char", _literal(char)

    def _class(self) -> str:
        negated = self._pattern.startswith("^", self._at)
        self._at += negated
        items: list[str] = []
        left = dict(NAMED)
        while True:
            if self._at == len(self._pattern):
                raise ValueError("a class is not closed")
            if self._pattern[self._at] == "]":
                self._at += 1
                break
            text, low, high = self._item(negated)
            items.append(text)
            if not negated and 0 <= low < 32 and (low != high or low not in NAMED):
                raise ValueError("control characters in a class can be held one by one only: tab, line break and such")
            for code in NAMED:
                if low <= code <= high or text == _ANY_SPACE:
                    left.pop(code, None)
        if not items:
            raise ValueError("an empty class cannot be held")
        return none_of("".join(items), left.values()) if negated else f"[{''.join(items)}]"

    def _item(self, negated: bool) -> tuple[str, int, int]:
        """A character, a range or a class within a class, and its first and last character; -1 for classes."""
        low, first = self._member(negated)
        rest = self._pattern[self._at :]
        if not rest.startswith("-") or rest.startswith("-]") or len(rest) < 2:
            return low, first, first
        self._at += 1
        high, last = self._member(negated)
        if first < 0 or last < first:
            raise ValueError("a range in a class goes from one character to a later one")
        return f"{low}-{high}", first, last

    def _member(self, negated: bool) -> tuple[str, int]:
        """A member of a class, and its character."""
        char = self._next()
        if char != "\\":
            return _literal(char), ord(char)
        if self._pattern.startswith("b", self._at):
            self._at += 1
            return r"\x08", 8
        kind, text = self._escaped()
        if kind == "char":
            return text, self._code
        known = _IN_NEGATED if negated else _IN_CLASS
        if kind == "class" and text not in known:
            raise ValueError(f"\\{text} cannot be held in this class")
        return known[text] if kind == "class" else text, -1


def none_of(items: str, named: Iterable[str] = NAMED.values()) -> str:
    """Any character but those of a class. Of the control characters, only the `named` ones are among them."""
    others, controls = rf"[^{items}\x00-\x1f]", "".join(named)
    return f"(?:{others}|[{controls}])" if controls else others
