"""What the official client asks to be enforced, over a real engine and a simulated model that would rather end at once.

The model ends whenever it may, closes what it can close, and speaks when it must: so whatever is
right in its answers was forced upon it.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field

from services.gateway.__main__ import Gateway
from services.gateway.config import GatewaySettings
from services.gateway.rest.http import bind
from tests.engine.cluster import EOS, WorkerProcess, running_engine
from tests.gateway.fake_engine import until

LAZY = {"otherwise": {"prefer": [EOS, '"', "}", "]", ":", ",", "0"]}}
ASK: Any = [{"role": "user", "content": "Anything."}]


class Part(BaseModel):
    """Something inside something else."""

    label: str
    weights: list[int] = Field(min_length=1, max_length=3)


class Thing(BaseModel):
    """What the model has no wish to describe."""

    kind: Literal["apple", "pear"]
    count: int
    part: Part
    note: str | None


TOOLS: Any = [openai.pydantic_function_tool(Thing, name="describe"), openai.pydantic_function_tool(Part, name="take")]
FLAT: Any = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.fixture
def lazy_worker() -> Iterator[str]:
    """The address of a worker process, in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="tri", dir="/tmp") as folder:
        script = Path(folder, "script.json")
        script.write_text(json.dumps(LAZY))
        times = ("--simulated-step-us", "200", "--simulated-token-us", "0", "--simulated-row-us", "0")
        worker = WorkerProcess(f"unix:{folder}/worker.sock", "--script", str(script), *times)
        worker.start()
        yield worker.address
        worker.stop()


@pytest.fixture
async def client(lazy_worker: str) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a gateway over an engine in this process."""
    listen = lazy_worker.replace("worker", "engine")
    async with running_engine(lazy_worker, listen, num_blocks=800):
        gateway = Gateway(GatewaySettings.build(engine=listen, http_port=0, grpc_port=0), bind("127.0.0.1", 0), "0")
        await gateway.start()
        try:
            await until(lambda: gateway.front.obstacle() is None, 20)
            url = f"http://127.0.0.1:{gateway.http.port}/v1"
            async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=30) as client:
                yield client
        finally:
            await gateway.close()


async def test_what_is_asked_for_is_enforced(client: openai.AsyncOpenAI) -> None:
    model = (await client.models.list()).data[0].id
    free = await client.chat.completions.create(model=model, messages=ASK)
    assert free.choices[0].message.content == ""
    await asyncio.gather(
        answers_fit_their_schema(client, model),
        forced_calls_are_made(client, model),
        responses_too(client, model),
        other_constraints_hold(client, model),
    )


async def answers_fit_their_schema(client: openai.AsyncOpenAI, model: str) -> None:
    answer = await client.chat.completions.parse(model=model, messages=ASK, response_format=Thing, n=2)
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Thing)
        assert choice.finish_reason == "stop"
    async with client.chat.completions.stream(model=model, messages=ASK, response_format=Thing) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.parsed == answer.choices[0].message.parsed


async def forced_calls_are_made(client: openai.AsyncOpenAI, model: str) -> None:
    names = {"describe": Thing, "take": Part}
    named = {"type": "function", "function": {"name": "take"}}
    choices: tuple[Any, ...] = ("required", named)
    for choice in choices:
        async with client.chat.completions.stream(
            model=model, messages=ASK, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False
        ) as stream:
            final = await stream.get_final_completion()
        (call,) = final.choices[0].message.tool_calls or []
        assert final.choices[0].finish_reason == "tool_calls"
        assert isinstance(call.function.parsed_arguments, names[call.function.name])
        assert choice == "required" or call.function.name == "take"
    for choice in ("auto", "none"):
        free = await client.chat.completions.create(model=model, messages=ASK, tools=TOOLS, tool_choice=choice)
        assert free.choices[0].message.tool_calls is None
        assert free.choices[0].finish_reason == "stop"


async def responses_too(client: openai.AsyncOpenAI, model: str) -> None:
    answer = await client.responses.parse(model=model, input="Anything.", text_format=Thing)
    assert isinstance(answer.output_parsed, Thing)
    made = await client.responses.parse(
        model=model, input="Anything.", tools=FLAT, tool_choice={"type": "function", "name": "take"}
    )
    calls = [item for item in made.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["take"]
    assert isinstance(Part.model_validate_json(calls[0].arguments), Part)


async def other_constraints_hold(client: openai.AsyncOpenAI, model: str) -> None:
    for outputs, expected in (
        ({"choice": ["yes", "no"]}, {"yes", "no"}),
        ({"regex": "a{3}b"}, {"aaab"}),
        ({"grammar": 'start: "x" "y"'}, {"xy"}),
    ):
        answer = await client.completions.create(
            model=model, prompt="p", max_tokens=20, extra_body={"structured_outputs": outputs}
        )
        assert answer.choices[0].text in expected
    anything = await client.chat.completions.create(model=model, messages=ASK, response_format={"type": "json_object"})
    assert isinstance(json.loads(anything.choices[0].message.content or ""), dict)
    with pytest.raises(openai.BadRequestError) as refused:
        await client.completions.create(model=model, prompt="p", extra_body={"structured_outputs": {"regex": "("}})
    assert refused.value.param == "structured_outputs.regex"
