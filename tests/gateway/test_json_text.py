from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidArgument
from services.gateway.json_text import read_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(['"', "\\", '\\"', "\\u0022", '":', "\0"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(['"', "a", "\\u0022"]), inner),
    max_leaves=8,
)  # fmt: skip


@given(VALUES, st.booleans(), st.sampled_from([None, 1]), st.booleans())
def test_whatever_is_json_is_read_however_it_is_spelled(value: Any, ascii_only: bool, indent: Any, net: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode()
    if net:  # as .NET spells quotes
        text = json.dumps(value).replace("\\\\", "\0").replace('\\"', "\\u0022").replace("\0", "\\\\").encode()
    assert read_json(text) == orjson.loads(text)


@given(VALUES, VALUES, VALUES, st.booleans())
def test_a_key_that_stands_twice_is_always_found(first: Any, second: Any, other: Any, nested: bool) -> None:
    inner = f'{{"o": {json.dumps(other)}, "n": {json.dumps(first)}, "n": {json.dumps(second)}}}'
    text = f'{{"a": [1, {inner}]}}' if nested else inner
    with pytest.raises(InvalidArgument, match="stands there twice") as caught:
        read_json(text.encode())
    assert caught.value.field == ("a[1].n" if nested else "n")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"n": 1, "n": 1}', "n"),
        ('{"n": 1, "\\u006e": 2}', "n"),
        ('{"a": {"": 1, "": 2}}', "a."),
        ('{"temperature": NaN}', "temperature"),
        ('{"temperature": 1e999}', "temperature"),
        ('{"temperature": ' + "9" * 400 + "}", "temperature"),
        ('{"temperature": ' + "9" * 5000 + "}", "temperature"),
        ('{"logit_bias": {"5": -Infinity}}', "logit_bias.5"),
        ('{"a": "1", "tools": [{"x": 18446744073709551616}]}', "tools[0].x"),
        ('{"a": [1, -9223372036854775809, 2]}', "a[1]"),
        ('{"a": ' + "7" * 300 + "}", "a"),
        ('{"messages": [{"content": "ok"}, {"content": "\\ud800"}]}', "messages[1].content"),
        ('{"metadata": {"\\udc00": "x"}}', "metadata"),
        ("[NaN]", "body[0]"),
        ("NaN", "body"),
        ('{"a": NaN', "body"),
        ('{"a": tru, "b": NaN}', "body"),
        ("\ufeff{}", "body"),
        ("", "body"),
        ("[" * 100_000, "body"),
        ("[" * 600 + "]" * 600, "body"),
        ('{"a": "' + "x" * (1 << 20) + '", "n": 1, "n": 2}', "body"),
    ],
)
def test_what_can_not_be_taken_is_refused_by_its_place(text: str, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_json(text.encode())
    assert caught.value.field == field
    assert len(caught.value.message) < 300


@pytest.mark.parametrize(
    "text",
    [
        '{"a": [18446744073709551615, -9223372036854775808], "18446744073709551616": "99999999999999999999"}',
        '{"a": [1e30, 1.7976931348623157e308, 0.12345678901234567890123, 123456789012345678901.5]}',
    ],
)
def test_digits_are_refused_only_where_an_integer_would_be_rounded(text: str) -> None:
    assert read_json(text.encode()) == json.loads(text)


def test_who_keeps_the_digits_may_have_integers_of_any_length() -> None:
    assert read_json(b'{"a": 18446744073709551616}', rounded=True) == {"a": 2.0**64}
    with pytest.raises(InvalidArgument, match=r"x\.n: stands there twice"):
        read_json(b'{"a": 18446744073709551616, "n": 1, "n": 2}', "x", rounded=True)


def test_places_stand_within_a_field() -> None:
    for text, field in (
        ('[{"x": 1, "x": 2}]', "tools_json[0].x"), ("[1, NaN]", "tools_json[1]"), ("[", "tools_json")
    ):  # fmt: skip
        with pytest.raises(InvalidArgument) as caught:
            read_json(text.encode(), "tools_json")
        assert caught.value.field == field


def test_bytes_that_are_no_text_are_no_json() -> None:
    with pytest.raises(InvalidArgument, match="body: no JSON"):
        read_json(b'{"a": "\xff"}')
