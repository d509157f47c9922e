"""/openapi.json says what the server does: every route, every field, every answer."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
import schemathesis
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from starlette.routing import Route

from services.common.errors import InvalidArgument
from services.gateway.fields import FIELDS, REFUSED, Api, accepted
from services.gateway.kinds import Anything, Bias, Ids, Kind
from services.gateway.rest import answers, asgi, bodies, openapi, routes, schemas
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.stack import Stack, gateway_stack
from tests.gateway.test_fields import value_of

BODIES = {row.takes: row for row in routes.ROUTES if row.takes is not None}


@cache
def description() -> dict[str, Any]:
    return json.loads(openapi.document("1.2.3"))


def validator(schema: dict[str, Any]) -> Draft202012Validator:
    """Of a schema that may name components."""
    return Draft202012Validator({**schema, "components": description()["components"]})


def of_body(api: Api) -> dict[str, Any]:
    reference = description()["paths"][BODIES[api].path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return description()["components"]["schemas"][reference["$ref"].rpartition("/")[2]]


def test_it_is_openapi_3_1_and_all_its_schemas_are_schemas() -> None:
    assert description()["info"]["version"] == "1.2.3"
    schemathesis.openapi.from_dict(description()).validate()
    components = description()["components"]["schemas"]
    for schema in components.values():
        Draft202012Validator.check_schema(schema)
    used = {rest.partition('"')[0] for rest in json.dumps(description()).split('"#/components/schemas/')[1:]}
    assert used <= components.keys()


def test_every_route_is_described_and_nothing_else() -> None:
    class Nobody:
        pass

    site = asgi.Site(Nobody(), "1", bytes, "text/plain", 1, lambda *_: None)  # type: ignore[arg-type]
    served = set()
    for route in asgi.application(site)._others.routes:  # type: ignore[attr-defined]
        assert isinstance(route, Route)
        methods = {"post"} if "POST" in (route.methods or ()) else {"get"}
        served |= {(route.path.replace("{model:path}", "{model}"), method) for method in methods}
    described = {(path, method) for path, operations in description()["paths"].items() for method in operations}
    assert described == served
    assert {route.path for route in asgi.private(site).routes} == {row.path for row in routes.PROCESS}  # type: ignore[attr-defined]


def test_names_of_operations_and_bodies_are_told_apart() -> None:
    operations = [row.operation for row in routes.ROUTES]
    assert len(set(operations)) == len(operations)
    assert len(BODIES) == sum(row.takes is not None for row in routes.ROUTES)
    assert answers.EVENTS.keys() <= answers.WHOLE.keys()


@pytest.mark.parametrize("api", BODIES)
def test_a_body_has_every_field_that_is_accepted_and_of_the_others_those_with_a_neutral_value(api: Api) -> None:
    body = of_body(api)
    neutral = {row.name: row.neutral for row in REFUSED if api in row.apis and row.neutral}
    assert body["properties"].keys() == accepted(api).keys() | neutral.keys()
    assert body["additionalProperties"] is False
    for name, row in accepted(api).items():
        assert body["properties"][name]["description"] == row.meaning
    for name, values in neutral.items():
        if name not in accepted(api):
            assert body["properties"][name]["enum"] == [*values, None]


@pytest.mark.parametrize("api", BODIES)
def test_good_values_fit_their_schema_and_so_does_null_where_it_means_unset(api: Api) -> None:
    body = of_body(api)
    for name in accepted(api):
        check = validator(body["properties"][name])
        if name != "messages":
            check.validate([1] if name == "tokens" else value_of(name, api))
        assert check.is_valid(None) == (name not in body["required"]), name


KINDS: list[Kind] = list({repr(row.kind): row.kind for row in FIELDS if not isinstance(row.kind, Anything)}.values())
SCALARS = st.none() | st.booleans() | st.integers(-3, 30) | st.integers() | st.floats() | st.text(max_size=3)
KEYS = st.text(max_size=3) | st.integers(-2, 9).map(str) | st.sampled_from(["include_usage", "effort", "01"])
VALUES = SCALARS | st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)


@pytest.mark.parametrize("kind", KINDS, ids=repr)
@given(value=VALUES)
def test_what_a_kind_takes_fits_its_schema(kind: Kind, value: object) -> None:
    try:
        taken = kind.read(value, "thing")
    except InvalidArgument:
        return
    ids = taken if isinstance(kind, Ids) else [pair[0] for pair in taken] if isinstance(kind, Bias) else []
    if all(0 <= token_id < 2**31 for token_id in ids):  # no model has others
        assert validator(schemas.of_kind(kind)).is_valid(value)


def test_a_kind_that_cannot_be_described_is_an_error_and_what_is_open_is_described_by_hand() -> None:
    with pytest.raises(TypeError, match="Anything"):
        schemas.of_kind(Anything())
    for row in FIELDS:
        if isinstance(row.kind, Anything) and row.apis is not Api.GRPC:
            known = bodies.OPEN[row.name]
            assert all(any(api in apis for apis in known) for api in BODIES if api in row.apis)


@pytest.mark.parametrize(
    ("component", "good", "bad"),
    [
        (
            "Messages",
            [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}],
            [{"role": "", "content": "x"}],
        ),
        ("Messages", [{"role": "user", "content": [{"type": "text", "text": "x"}, "y"]}], []),
        ("Messages", [{"role": "assistant", "content": "x", "refusal": None, "annotations": []}], [{"content": "x"}]),
        ("Prompt", ["a", [1, 2]], []),
        ("Prompt", [1, 2], [[]]),
        ("Prompt", "", [[-1]]),
        (
            "Input",
            [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}],
            [{"role": "cat", "content": ""}],
        ),
        (
            "Input",
            [{"role": "assistant", "content": [{"type": "output_text", "text": "x"}]}],
            [{"role": "user", "content": [{"type": "output_text", "text": "x"}]}],
        ),
        ("Input", [{"type": "function_call_output", "call_id": "c", "output": "x"}], [{"type": "web_search_call"}]),
        ("Tool", {"type": "function", "function": {"name": "f", "parameters": {}}}, {"type": "function", "name": "f"}),
        ("ToolChoice", {"type": "function", "function": {"name": "f"}}, "always"),
        (
            "ResponseFormat",
            {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
            {"type": "json_schema"},
        ),
        ("StructuredOutputs", {"choice": ["a"]}, {"choice": []}),
    ],
)
def test_what_is_described_by_hand(component: str, good: object, bad: object) -> None:
    check = validator(schemas.ref(component))
    check.validate(good)
    assert not check.is_valid(bad)


async def test_answers_are_as_described() -> None:
    """Whole and streamed, with everything that may be asked to be shown."""
    shown = {"n": 2, "return_token_ids": True, "prompt_logprobs": 2}
    usage = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    messages = [{"role": "user", "content": "x"}]
    async with gateway_stack(FakeEngine()) as stack:
        for body in ({}, {"logprobs": True, "top_logprobs": 2, **shown}):
            await follow(stack, "chat_completions", {"messages": messages, **body}, usage)
        for body in ({}, {"logprobs": 2, "echo": True, **shown}):
            await follow(stack, "completions", {"prompt": ["x", "y"], **body}, usage)
        await follow(stack, "responses", {"input": "x"}, {})
        await follow(stack, "tokenize", {"prompt": "x", "return_token_strs": True}, None)
        await follow(stack, "detokenize", {"tokens": [120]}, None)
        for row in routes.ROUTES:
            if row.method == "GET" and row.operation not in ("metrics", "description"):
                answer = await stack.http.get(row.path.format(model="bytes"))
                validator(schemas.ref(answers.WHOLE[row.operation])).validate(answer.json())
        assert (await stack.http.get("/openapi.json")).json()["paths"] == description()["paths"]
        refused = await stack.http.post("/detokenize", json={"tokens": "x"})
        validator(schemas.ref("Error")).validate(refused.json())


async def follow(stack: Stack, operation: str, body: dict[str, Any], streamed: dict[str, Any] | None) -> None:
    path = next(row.path for row in routes.API if row.operation == operation)
    answer = await stack.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    validator(schemas.ref(answers.WHOLE[operation])).validate(answer.json())
    if streamed is not None:
        answer = await stack.http.post(path, json={**body, "stream": True, **streamed})
        check = validator(schemas.ref(answers.EVENTS[operation]))
        data = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        assert len(data) > 3
        for document in data:
            if document != "[DONE]":
                check.validate(json.loads(document))
