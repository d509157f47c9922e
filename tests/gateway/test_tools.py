from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.common.errors import InvalidArgument
from services.gateway.tools import Tool, ToolChoice, read_tool_choice, read_tools

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FULL = {"name": "get_weather", "description": "How it is.", "parameters": SCHEMA, "strict": True}
TOOLS = (Tool("f"), Tool("get_weather"))


def nested(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": function}]


def test_both_shapes_say_the_same() -> None:
    tool = Tool("get_weather", "How it is.", SCHEMA, True)
    assert read_tools(nested(**FULL)) == (tool,) == read_tools([{"type": "function", **FULL}], flat=True)
    assert read_tools(nested(name="f")) == (Tool("f"),)
    assert read_tools(nested(name="f", description=None, parameters=None, strict=None)) == (Tool("f"),)
    assert read_tools(nested(name="f", parameters={}))[0].parameters == {}
    assert read_tools(None) == read_tools([]) == ()


def test_what_templates_see() -> None:
    shown = {"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}
    assert Tool("f", "d", SCHEMA, strict=True).for_template() == shown
    assert Tool("f").for_template() == {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("value", "flat", "field"),
    [
        ("x", False, "tools"),
        ({}, False, "tools"),
        (nested(name="f") * 129, False, "tools"),
        ([5], False, "tools[0]"),
        ([{}], False, "tools[0]"),
        ([{"type": "web_search"}], True, "tools[0]"),
        ([{"type": "custom", "custom": {"name": "f"}}], False, "tools[0]"),
        ([{"type": "function"}], False, "tools[0].function"),
        ([{"type": "function", "name": "f"}], False, "tools[0].name"),
        ([{"type": "function", "function": {"name": "f"}}], True, "tools[0].function"),
        ([*nested(name="f"), *nested(name="")], False, "tools[1].function.name"),
        (nested(), False, "tools[0].function.name"),
        (nested(name="a b"), False, "tools[0].function.name"),
        (nested(name="f" * 65), False, "tools[0].function.name"),
        (nested(name="f\n"), False, "tools[0].function.name"),
        (nested(name="é"), False, "tools[0].function.name"),
        (nested(name="f", description=5), False, "tools[0].function.description"),
        (nested(name="f", description="\ud800"), False, "tools[0].function.description"),
        (nested(name="f", parameters=[]), False, "tools[0].function.parameters"),
        (nested(name="f", parameters={"type": "array"}), False, "tools[0].function.parameters.type"),
        (nested(name="f", strict="yes"), False, "tools[0].function.strict"),
        (nested(name="f", paramters={}), False, "tools[0].function.paramters"),
        ([*nested(name="f"), *nested(name="g"), *nested(name="f")], False, "tools[2]"),
    ],
)
def test_bad_tools_are_named(value: object, flat: bool, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_tools(value, flat=flat)
    assert caught.value.field == field
    assert caught.value.message.startswith(f"{field}:")


def test_other_kinds_of_tools_are_refused_by_their_kind() -> None:
    with pytest.raises(InvalidArgument, match="'web_search' are not supported"):
        read_tools([{"type": "web_search"}], flat=True)


@pytest.mark.parametrize(
    ("value", "flat", "choice"),
    [
        (None, False, ToolChoice("auto")),
        ("none", False, ToolChoice("none")),
        ("auto", False, ToolChoice("auto")),
        ("required", True, ToolChoice("required")),
        ({"type": "function", "function": {"name": "f"}}, False, ToolChoice("named", "f")),
        ({"type": "function", "name": "get_weather"}, True, ToolChoice("named", "get_weather")),
    ],
)
def test_choices(value: object, flat: bool, choice: ToolChoice) -> None:
    assert read_tool_choice(value, TOOLS, flat=flat) == choice
    assert choice.forced == (choice.mode in ("required", "named"))


def test_without_tools_nothing_can_be_called() -> None:
    assert read_tool_choice(None, ()) == read_tool_choice("none", ()) == ToolChoice("none")
    for value in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
        with pytest.raises(InvalidArgument, match="only allowed together with tools") as caught:
            read_tool_choice(value, ())
        assert caught.value.field == "tool_choice"


@pytest.mark.parametrize(
    ("value", "flat", "field"),
    [
        ("any", False, "tool_choice"),
        (5, False, "tool_choice"),
        ({}, False, "tool_choice"),
        ({"type": "function"}, False, "tool_choice"),
        ({"type": "function", "name": "f"}, False, "tool_choice"),
        ({"type": "function", "function": {"name": "f"}}, True, "tool_choice"),
        ({"type": "function", "function": {"name": "f", "x": 1}}, False, "tool_choice"),
        ({"type": "function", "function": {"name": "f"}, "x": 1}, False, "tool_choice"),
        ({"type": "function", "name": "f", "x": 1}, True, "tool_choice"),
        ({"type": "function", "function": {"name": 5}}, False, "tool_choice"),
        ({"type": "allowed_tools", "allowed_tools": {}}, False, "tool_choice"),
        ({"type": "function", "function": {"name": "get_wether"}}, False, "tool_choice.function.name"),
        ({"type": "function", "name": "g"}, True, "tool_choice.name"),
    ],
)
def test_bad_choices_are_named(value: object, flat: bool, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_tool_choice(value, TOOLS, flat=flat)
    assert caught.value.field == field


def test_a_name_that_is_nearly_right_is_offered() -> None:
    with pytest.raises(InvalidArgument, match="did you mean 'get_weather'"):
        read_tool_choice({"type": "function", "function": {"name": "get_wether"}}, TOOLS)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["function", "f", "none"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "function", "name", "parameters", "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(value=JSON, flat=st.booleans())
def test_any_json_is_read_or_refused_by_its_place(value: object, flat: bool) -> None:
    refused: dict[str, str | None] = {}
    try:
        tools = read_tools(value, flat=flat)
        assert len({tool.name for tool in tools}) == len(tools)
    except InvalidArgument as error:
        refused["tools"] = error.field
    try:
        assert read_tool_choice(value, TOOLS, flat=flat).mode
    except InvalidArgument as error:
        refused["tool_choice"] = error.field
    assert all((field or "").startswith(name) for name, field in refused.items())
