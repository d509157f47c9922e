"""Expressions for all names but some.

The library's own complement compares spellings: a name that is taken passes it as \\u0061. An expression
for names is compared with what the name is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from services.gateway.constraints.schemas.patterns import NAMED, escape, none_of

_UNSAFE = '"\\'
_ANYTHING = "(?s:.*)"


@dataclass(slots=True)
class _Branch:
    """Names that begin alike. `ends`: one of them ends here; `open`: whatever goes on from here is one."""

    ends: bool = False
    open: bool = False
    then: dict[str, _Branch] = field(default_factory=dict)


def all_but(names: Iterable[str], beginnings: Iterable[str] = ()) -> str:
    """An expression for every text that is none of `names` and begins with none of `beginnings`.

    >>> all_but(["ab"])
    '^(?:[^a](?s:.*)|a(?:[^b](?s:.*)|b(?s:.)(?s:.*))?)?$'
    """
    root = _Branch()
    for name in names:
        _reach(root, name).ends = True
    for beginning in beginnings:
        _reach(root, beginning).open = True
    return f"^{_rest(root)}$"


def _reach(branch: _Branch, text: str) -> _Branch:
    for char in text:
        branch = branch.then.setdefault(char, _Branch())
    return branch


def _rest(branch: _Branch) -> str:
    """What may follow, as a group."""
    if branch.open:
        return r"[^\s\S]"
    if not branch.then:
        return f"(?s:.){_ANYTHING}" if branch.ends else _ANYTHING
    others = "".join(escape(char) for char in branch.then)
    if any(char in _UNSAFE or char < " " for char in branch.then):
        others = none_of(others, (named for char, named in NAMED.items() if chr(char) not in branch.then))
    else:
        others = f"[^{others}]"
    ways = [others + _ANYTHING]
    ways += [escape(char) + _rest(after) for char, after in branch.then.items() if not after.open]
    return f"(?:{'|'.join(ways)}){'' if branch.ends else '?'}"
