"""Expressions as JSON schema has them (ECMA-262), translated into those of the library.

What the two read differently is written out: "." and \\s, literal braces, brackets within a class.
What ECMA-262 and other readers of schemas see differently is taken in the sense that both allow.
"""

from __future__ import annotations

import re

_SPACE = r" \t\n\r\f\v"
_ANY_SPACE = r"\s\x1c-\x1f\x{FEFF}"
_CLASSES = {
    "d": "[0-9]",
    "D": r"[^\p{Nd}]",
    "w": "[A-Za-z0-9_]",
    "W": r"[^\w]",
    "s": f"[{_SPACE}]",
    "S": f"[^{_ANY_SPACE}]",
}
_IN_CLASS = {"d": "0-9", "D": r"\P{Nd}", "w": "A-Za-z0-9_", "W": r"\W", "s": _SPACE}
_IN_NEGATED = {"d": "0-9", "w": "A-Za-z0-9_", "s": _ANY_SPACE}
_CONTROLS = {"n": r"\n", "r": r"\r", "t": r"\t", "f": r"\x0c", "v": r"\x0b"}
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
            return "char", _CONTROLS[char]
        if char in _HEX:
            found = _HEX[char].match(self._pattern, self._at)
            if found is None:
                raise ValueError(f"\\{char} at position {self._at - 2} needs hexadecimal digits")
            self._at = found.end()
            if 0xD800 <= int(found[0], 16) < 0xE000:
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
        return "char", _literal(char)

    def _class(self) -> str:
        negated = self._pattern.startswith("^", self._at)
        self._at += negated
        items: list[str] = []
        while True:
            if self._at == len(self._pattern):
                raise ValueError("a class is not closed")
            if self._pattern[self._at] == "]":
                self._at += 1
                break
            items.append(self._item(negated))
        if not items:
            raise ValueError("an empty class cannot be held")
        return f"[{'^' if negated else ''}{''.join(items)}]"

    def _item(self, negated: bool) -> str:
        low, single = self._member(negated)
        rest = self._pattern[self._at :]
        if not rest.startswith("-") or rest.startswith("-]") or len(rest) < 2:
            return low
        self._at += 1
        high, also_single = self._member(negated)
        if not (single and also_single):
            raise ValueError("a range in a class goes from one character to another")
        return f"{low}-{high}"

    def _member(self, negated: bool) -> tuple[str, bool]:
        """A member of a class, and whether it is a single character."""
        char = self._next()
        if char != "\\":
            return _literal(char), True
        if self._pattern.startswith("b", self._at):
            self._at += 1
            return r"\x08", True
        kind, text = self._escaped()
        if kind != "class":
            return text, kind == "char"
        known = _IN_NEGATED if negated else _IN_CLASS
        if text not in known:
            raise ValueError(f"\\{text} cannot be held in this class")
        return known[text], False
