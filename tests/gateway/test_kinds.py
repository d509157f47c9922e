from __future__ import annotations

import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidArgument
from services.gateway.kinds import (
    Anything,
    Bias,
    Bool,
    Flags,
    Ids,
    Int,
    Kind,
    Labels,
    Number,
    Object,
    OneOf,
    Text,
    Texts,
)

NESTED: list[object] = []
for _ in range(1000):  # what the JSON reader lets through
    NESTED = [NESTED]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
KINDS: list[Kind] = [
    Bool(),
    Int(0, 5),
    Number(0.0, 2.0),
    Number(0.0, 1.0, above_low=True),
    Text(longest=3, empty=False),
    Texts(3, 10, single=True),
    Ids(3),
    Bias(3),
    Object(),
    Flags(("a", "b")),
    OneOf((False, ["text"])),
    Labels(2, 3, 4),
    Anything(),
]


@pytest.mark.parametrize("kind", KINDS)
@given(value=JSON)
def test_any_json_value_is_read_or_refused_by_name(kind: Kind, value: object) -> None:
    refused: InvalidArgument | None = None
    try:
        kind.read(value, "thing")
    except InvalidArgument as error:
        refused = error
    if refused is not None:
        assert refused.field is not None
        assert refused.field.startswith("thing")
        assert len(refused.message) < 300
        refused.message.encode()


@pytest.mark.parametrize(
    ("kind", "value", "read"),
    [
        (Bool(), True, True),
        (Int(0, 5), 5, 5),
        (Int(0, 5), 5.0, 5),
        (Ids(4), [1.0, 2], (1, 2)),
        (Number(0.0, 2.0), 1, 1.0),
        (Number(0.0, 2.0), -0.0, 0.0),
        (Text(), "", ""),
        (Texts(4, 100, single=True), "END", ("END",)),
        (Texts(4, 100), [], ()),
        (Texts(4, 100), ("a", "b"), ("a", "b")),
        (Ids(4), [3, -1], (3, -1)),
        (Bias(4), {"5": 1, "7": -100.0}, ((5, 1.0), (7, -100.0))),
        (Bias(4), [(5, 1.0)], ((5, 1.0),)),
        (Flags(("a", "b")), {"a": True, "b": None}, {"a": True}),
        (OneOf((["text"],)), ["text"], ["text"]),
        (Labels(2, 3, 4), {"abc": "defg", "": ""}, {"abc": "defg", "": ""}),
    ],
)
def test_right_values(kind: Kind, value: object, read: object) -> None:
    assert kind.read(value, "thing") == read


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (Bool(), 1),
        (Bool(), "true"),
        (Bool(), NESTED),
        (Int(0, 5), True),
        (Int(0, 5), 4.5),
        (Int(-(2**63), 2**64 - 1), float(-(2**63) - 1)),
        (Int(0, 5), 6),
        (Int(0, 5), 10**400),
        (Number(0.0, 2.0), math.nan),
        (Number(0.0, 2.0), math.inf),
        (Number(0.0, 2.0), "1"),
        (Number(0.0, 2.0), True),
        (Number(0.0, 2.0), 10**400),
        (Number(0.0, 1.0, above_low=True), 0),
        (Number(0.0, 1.0, above_low=True), 1e-60),
        (Text(empty=False), ""),
        (Text(), "\ud800"),
        (Texts(4, 100, single=True), ""),
        (Texts(4, 100), "no array"),
        (Texts(4, 100), ["a", ""]),
        (Texts(4, 100), ["\udc00"]),
        (Texts(4, 100), ["é" * 51]),
        (Texts(4, 100), ["a"] * 5),
        (Ids(4), [1.5]),
        (Ids(4), [True]),
        (Ids(4), "12"),
        (Bias(4), {"a": 1}),
        (Bias(4), {"1": 101}),
        (Bias(4), {"1": math.nan}),
        (Bias(4), [(1, 1.0), (1, 2.0)]),
        (Bias(4), [5]),
        (Bias(4), [(1, 2, 3)]),
        (Bias(4), {"1": 1, "01": 1}),
        (Flags(("a",)), {"c": True}),
        (Flags(("a",)), {"a": 1}),
        (OneOf((False,)), 0),
        (Labels(2, 3, 4), [["a", "b"]]),
        (Labels(2, 3, 4), {"a": "", "b": "", "c": ""}),
        (Labels(2, 3, 4), {"abcd": "x"}),
        (Labels(2, 3, 4), {"a": "12345"}),
        (Labels(2, 3, 4), {"a": 1}),
        (Labels(2, 3, 4), {"a": "\ud800"}),
    ],
)
def test_wrong_values(kind: Kind, value: object) -> None:
    with pytest.raises(InvalidArgument, match="thing"):
        kind.read(value, "thing")


def test_an_item_is_named_in_the_message_and_the_field_stays() -> None:
    with pytest.raises(InvalidArgument, match=r"stop\[1\]") as caught:
        Texts(4, 100).read(["a", ""], "stop")
    assert caught.value.field == "stop"


@given(st.floats(0.0, 2.0))
def test_numbers_are_what_the_worker_will_see(value: float) -> None:
    assert Number(0.0, 2.0).read(value, "thing") == struct.unpack("<f", struct.pack("<f", value))[0]
