"""The REST API attacked by its own description: schemathesis makes bodies that fit it and bodies that do not.

Whatever comes, no answer is a 5xx, every answer has a described status, type and shape, and what
does not fit the description is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from jsonschema import Draft202012Validator
from schemathesis import GenerationMode
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.gateway.fake_engine import CONTEXT, END, VOCAB, FakeEngine
from tests.gateway.stack import gateway_stack

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
ANSWER = [*b"hello world", END, *b"." * CONTEXT]
"""Goes on for those who ignore its end."""
OF_POSTS = {GenerationMode.POSITIVE: 5, GenerationMode.NEGATIVE: 3}
"""Shares of the examples; a GET has one share."""


@contextlib.contextmanager
def served() -> Iterator[str]:
    """The address of a gateway before a scripted engine, both in a thread of their own."""
    started, address = threading.Event(), []

    async def run() -> None:
        async with gateway_stack(FakeEngine(script=lambda *_: ANSWER, per_step=16)) as stack:
            address.append(str(stack.http.base_url))
            ended.append((asyncio.get_running_loop(), asyncio.Event()))
            started.set()
            await ended[0][1].wait()

    ended: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    thread = threading.Thread(target=asyncio.run, args=(run(),))
    thread.start()
    assert started.wait(60)
    try:
        yield address[0]
    finally:
        loop, event = ended[0]
        loop.call_soon_threadsafe(event.set)
        thread.join()


def narrowed(description: dict[str, Any]) -> dict[str, Any]:
    """The same, with the ids and the name that this model has: else most bodies would be refused for those alone."""
    narrow = copy.deepcopy(description)
    components = narrow["components"]["schemas"]
    components["TokenId"]["maximum"] = VOCAB - 1
    for name, schema in components.items():
        if name.endswith("Request"):
            schema["properties"]["model"] = {"enum": ["bytes", None]}
    parameter = narrow["paths"]["/v1/models/{model}"]["get"]["parameters"][0]
    parameter["schema"] = {"enum": ["bytes", "an/other"]}
    return narrow


def shared_out(description: dict[str, Any]) -> dict[str, Any]:
    """The same with short conversations, and each optional field in one body only: long bodies take long to make."""
    short = copy.deepcopy(description)
    short["components"]["schemas"]["Messages"]["maxItems"] = 2
    bodies = [schema for name, schema in short["components"]["schemas"].items() if name.endswith("Request")]
    kept: list[set[str]] = [set(body["required"]) for body in bodies]
    for name in sorted({name for body in bodies for name in body["properties"]} - set().union(*kept)):
        min((k for k, body in zip(kept, bodies, strict=True) if name in body["properties"]), key=len).add(name)
    for body, names in zip(bodies, kept, strict=True):
        body["properties"] = {name: schema for name, schema in body["properties"].items() if name in names}
    return short


def check_events(case: schemathesis.Case, response: Any) -> None:
    """Each event of a stream has the described shape, and the stream says how it ended."""
    if not response.headers["content-type"][0].startswith("text/event-stream"):
        return
    schema = case.operation.definition.raw["responses"]["200"]["content"]["text/event-stream"]["schema"]
    document = schema["properties"]["data"]["anyOf"][1]["contentSchema"]
    check = Draft202012Validator({**document, "components": case.operation.schema.raw_schema["components"]})
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert events
    for event in events:
        if event != "[DONE]":
            check.validate(json.loads(event))


def attack(base_url: str, examples: int, narrow: Callable[[dict[str, Any]], dict[str, Any]]) -> Counter[int]:
    """Sends about so many requests; answers how often each status came."""
    load_all_checks()
    statuses: Counter[int] = Counter()
    description = httpx.get(f"{base_url}/openapi.json").json()
    schema = schemathesis.openapi.from_dict(narrow(description))
    schema.config.update(base_url=base_url)

    def check(case: schemathesis.Case) -> None:
        response = case.call(timeout=30)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        check_events(case, response)

    operations = [result.ok() for result in schema.get_all_operations()]
    shares = sum(sum(OF_POSTS.values()) if operation.method == "post" else 1 for operation in operations)
    for operation in operations:
        modes = OF_POSTS if operation.method == "post" else {GenerationMode.POSITIVE: 1}
        for mode, share in modes.items():
            run = given(operation.as_strategy(generation_mode=mode))(check)
            limit = settings(
                max_examples=max(1, round(examples * share / shares)),
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            with contextlib.suppress(Unsatisfiable):
                seed(20)(limit(run))()
    return statuses


def test_what_the_description_allows_and_what_it_forbids() -> None:
    with served() as base_url:
        statuses = attack(base_url, 125, lambda description: shared_out(narrowed(description)))
    assert statuses.total() >= 100
    assert statuses[200] >= 10
    assert statuses[400] >= 20


@pytest.mark.slow
def test_much_of_it() -> None:
    with served() as base_url:
        statuses = attack(base_url, 2400, narrowed)  # a GET has few different requests
    assert statuses.total() >= 2000
    assert statuses[200] >= 200
