"""Expressions of JSON schema against Python's own, and expressions for names that are not taken."""

from __future__ import annotations

import json
import random
import re
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.gateway.constraints.schemas.names import all_but
from services.gateway.constraints.schemas.patterns import translate
from services.gateway.request import Constraint
from tests.gateway.constraints.walks import matcher, walk

ALPHABET = 'ab"\\\n/0é-x '


def fits(pattern: str, text: str) -> bool:
    """Whether a string of JSON may be this text where the library has this expression."""
    made = matcher(Constraint("json_schema", json.dumps({"type": "string", "pattern": pattern})))
    ids = list(json.dumps(text, ensure_ascii=False).encode())
    return made.take(ids) == len(ids) and made.may_end


@pytest.mark.parametrize(
    "pattern",
    [
        r"^a[b-d]\d+$",
        r"^[^\"]*$",
        r"^[^\\]$",
        r"[^\n]\n",
        r"^\{}$",
        r"^]}$",
        r"^\s\S$",
        r"^.$",
        r"^(?:a|b)+?c?$",
        r"^(?<x>a)b$".replace("?<x>", "?:"),
        r"^[\w-]+$",
        r"^[^\W]$",
        r"^\/\-\_\x41\u0042$",
        r"^[a\]b]$",
        r"^[-a]$",
        r"^[a-]$",
        r"^[\t\n]$",
        r"a|^b|c$",
        r"^\.\*\+$",
        r"^é$",
        r"^[à-ü]$",
        r"^x{2,3}$",
        "",
        "^$",
    ],
)
def test_expressions_mean_what_they_mean_elsewhere(pattern: str) -> None:
    texts = ["", "a", "b", "ab", "abc", "ac1", "ad42", '"', "\\", " a", "a ", ".*+", "é", "xx", "xxxx", "{}", "é-x"]
    texts += ["]}", "[", "&", "~", "-", "/-_AB", "]", "\t", "c", "]b", "\na"]
    try:
        translated = translate(pattern)
    except ValueError:
        assert pattern == r"^[^\W]$"  # a class that cannot be held
        return
    for text in texts:
        if fits(translated, text):
            assert re.search(pattern, text, re.ASCII), text
        else:
            assert not re.search(pattern, text, re.ASCII), text


@given(st.text(ALPHABET, max_size=6), st.text('ab"\\\n()[]^$|.*+?{}-12d', max_size=8))
@settings(max_examples=60, deadline=None)
def test_any_expression_is_translated_or_refused(text: str, pattern: str) -> None:
    try:
        translated = translate(pattern)
    except ValueError:
        return
    made = Constraint("json_schema", json.dumps({"type": "string", "pattern": translated}))
    try:
        machine = matcher(made)
    except ValueError:  # where an anchor stands amid it, the library refuses it
        assert "^" in pattern or "$" in pattern
        return
    ids = list(json.dumps(text, ensure_ascii=False).encode())
    if machine.take(ids) == len(ids) and machine.may_end and "{," not in pattern:
        with warnings.catch_warnings(action="ignore"):  # that brackets may mean more some day
            assert re.search(pattern, text)


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [(r"^[[a&&b~~]+$", ["[a&b~", "a"], ["c", "]"]), (r"^a{,2}$", ["a{,2}"], ["", "a", "aa"]), ("^{$", ["{"], [""])],
)
def test_what_others_see_as_more_than_letters(pattern: str, good: list[str], bad: list[str]) -> None:
    assert all(fits(translate(pattern), text) for text in good)
    assert not any(fits(translate(pattern), text) for text in bad)


@pytest.mark.parametrize(
    "pattern", [r"^\d$", r"^\w$", r"^[\d]$", r"^[\w.]$", r"^\d\d$", r"^[^\W]?$", r"^\s$", r"^[^\d]$"]
)
def test_digits_and_letters_of_other_scripts_are_none(pattern: str) -> None:
    """As ECMA-262 reads them."""
    try:
        translated = translate(pattern)
    except ValueError:
        assert pattern == r"^[^\W]?$"  # a class that cannot be held
        return
    for text in ("\u0663", "\u0967", "é", "\u0416", "1\u0663", "\u0663\u0664", "7", "42", "z", "_", " "):
        assert fits(translated, text) is bool(re.search(pattern, text, re.ASCII)), text


NONE_HELD = r"""
( ) [ [] [^] a** * a{2}{3} (?i)a (?P<n>a) \ \1 \b \Z \u12 [z-a] (?=a) (?!a) (?<=a) (?<!a)
[a-\d] a{3,2} \ud800 [\x00-z] +a
"""


@pytest.mark.parametrize("pattern", [*NONE_HELD.split(), "(" * 100 + ")" * 100])
def test_what_is_no_expression_or_cannot_be_held_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        translate(pattern)


@given(
    st.lists(st.text(ALPHABET, max_size=5), max_size=6),
    st.lists(st.text("abx-", min_size=1, max_size=3), max_size=2),
    st.text(ALPHABET, max_size=6),
)
@settings(max_examples=60, deadline=None)
def test_all_names_but_some(names: list[str], beginnings: list[str], name: str) -> None:
    taken = name in names or any(name.startswith(beginning) for beginning in beginnings)
    assert fits(all_but(names, beginnings), name) is not taken
    for other in names:
        assert not fits(all_but(names, beginnings), other)


def test_walks_find_no_name_that_is_taken() -> None:
    names = ["a", "ab", 'q"', "\\", "\n", "é"]
    made = Constraint("json_schema", json.dumps({"type": "string", "pattern": all_but(names)}))
    hints = [spelling for name in names for spelling in (name.encode(), json.dumps(name).encode())]
    for seed in range(40):
        output = walk(matcher(made), random.Random(seed), hints, most=80)
        assert output is None or json.loads(output) not in names
