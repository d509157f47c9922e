"""Lark rules that no output ever gets to the end of: the library takes them, and a model under one never stops.

A rule can end if one of its alternatives is made of what can end: the least fixed point. Texts, expressions
and names that are defined elsewhere can. Knows a grammar's skeleton only, in which such things stand as "".
"""

from __future__ import annotations

import re
from collections import defaultdict, deque
from dataclasses import dataclass, field

SOMETHING = ' "" '
"""In a skeleton, what can end by itself."""
NOTHING = " ∅ "
"""In a skeleton, an expression that no text matches."""
_PIECE = re.compile(r'[A-Za-z_][\w-]*|""|∅|->|\{[\d\s,]*\}|~\s*\d+(?:\s*\.\.\s*\d+)?|[^\s.]')
_ELSEWHERE = re.compile(r"^[ \t]*%(?:ignore|import)\b.*$|^[ \t]*[?!](?=[A-Za-z_])", re.MULTILINE)
_MAY_BE_LEFT_OUT = re.compile(r"[*?]|\{\s*,|\{\s*0|~\s*0")
_SHOWN = 8


@dataclass(slots=True)
class _Way:
    """An alternative: all that it names, and what of it cannot be left out."""

    names: dict[str, None] = field(default_factory=dict)
    needs: dict[str, None] = field(default_factory=dict)


_Rules = dict[str, list[_Way]]


def endless(skeleton: str) -> str | None:
    """Why outputs under a grammar may never end, in a line; None if they may. No word of what is no grammar."""
    rules = _read(skeleton)
    if "start" not in rules:
        return None
    nothing = NOTHING.strip()
    rules[nothing] = [_Way()]
    ending = _ending(rules)
    reached, line = {"start": None}, deque(["start"])
    while line:
        name = line.popleft()
        if name not in ending and not name.startswith("("):
            return f"no output of the rule {name} can end: {' → '.join(_circle(rules, ending, name))}"
        new = [other for way in rules[name] for other in way.names if other in rules and other not in reached]
        reached.update(dict.fromkeys(new))
        line.extend(new)
    rules[nothing] = []
    return None if "start" in _ending(rules) else "no output can follow it: it needs an expression that matches nothing"


def _read(skeleton: str) -> _Rules:
    """The rules by name; groups in them are rules of their own, whose names begin with a bracket."""
    rules: _Rules = {}
    within: list[str] = []
    pieces = [found[0] for found in _PIECE.finditer(_ELSEWHERE.sub("", skeleton))]
    pieces += ["", ""]
    for at, piece in enumerate(pieces[:-2]):
        after = pieces[at + 1]
        if after == ":" and pieces[at + 2] == ":":  # a rule with parameters, whose alternatives depend on them
            return {}
        if piece[0].isalpha() or piece[0] == "_":
            if after == ":":
                within = [piece]
                rules[piece] = [_Way()]
            elif within and pieces[at - 1] != "->":
                _add(rules[within[-1]][-1], piece, after)
        elif not within:
            continue
        elif piece == "∅":
            _add(rules[within[-1]][-1], piece, after)
        elif piece == "|":
            rules[within[-1]].append(_Way())
        elif piece in "([":
            within.append(f"({len(rules)}")
            rules[within[-1]] = [_Way()]
        elif piece in ")]":
            group = within.pop()
            if not within:
                return {}
            _add(rules[within[-1]][-1], group, "?" if piece == "]" else after)
        elif piece in "&~":  # terminals that meet, or all but one: a text of one's own
            rules[within[-1]].insert(0, _Way())
    return rules


def _add(way: _Way, name: str, after: str) -> None:
    way.names[name] = None
    if not _MAY_BE_LEFT_OUT.match(after):
        way.needs[name] = None


def _ending(rules: _Rules) -> set[str]:
    """The rules that can end."""
    needed_by: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
    missing: dict[tuple[str, int], int] = {}
    for rule, ways in rules.items():
        for at, way in enumerate(ways):
            needs = [name for name in way.needs if name in rules]
            missing[rule, at] = len(needs)
            for name in needs:
                needed_by[name].append((rule, at))
    ending: set[str] = set()
    found = [rule for (rule, _), count in missing.items() if not count]
    while found:
        rule = found.pop()
        if rule in ending:
            continue
        ending.add(rule)
        for key in needed_by[rule]:
            missing[key] -= 1
            if not missing[key]:
                found.append(key[0])
    return ending


def _circle(rules: _Rules, ending: set[str], name: str) -> list[str]:
    """A rule and what it needs that never ends, until one comes again."""
    shown, seen = [name], {name}
    while len(shown) < _SHOWN:
        name = next(other for other in rules[name][0].needs if other in rules and other not in ending)
        if not name.startswith("("):
            shown.append(name)
        if name in seen:
            break
        seen.add(name)
    return shown
