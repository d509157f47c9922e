"""Constraints through gateway, engine and a simulated worker, over models that would rather say something else."""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from services.gateway.__main__ import Gateway
from services.gateway.config import GatewaySettings
from services.gateway.rest.http import bind
from tests.engine.cluster import EOS, WorkerProcess, running_engine
from tests.gateway.fake_engine import until

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 12, "maxLength": 20},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 3, "maxItems": 5},
        "id": {"type": "integer", "minimum": 100, "maximum": 9999},
    },
    "required": ["name", "tags", "id"],
    "additionalProperties": False,
}
TALKATIVE = ["b", "1", "r", '"', "]", "}", EOS, ":", ",", "[", "{", "t", "n", "i"]
SCRIPT = {
    "requests": [
        {"contains": "blank", "prefer": [" ", "\n", '"', "}", "]", EOS, "0"]},
        {"contains": "fatal", "prefer": TALKATIVE, "die_at": 17},
        {"contains": "repeat", "text": "ab" * 200},
    ],
    "otherwise": {"prefer": TALKATIVE},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@dataclass
class Served:
    """A gateway that serves, and the worker behind it."""

    http: httpx.AsyncClient
    worker: WorkerProcess

    async def complete(self, prompt: str, **fields: Any) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 400, "temperature": 0, **fields}
        answer = await self.http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        read: dict[str, Any] = answer.json()
        return read

    async def text(self, prompt: str, **fields: Any) -> str:
        return str((await self.complete(prompt, **fields))["choices"][0]["text"])

    async def refusal(self, **fields: Any) -> dict[str, Any]:
        answer = await self.http.post("/v1/completions", json={"prompt": "p", "max_tokens": 8, **fields})
        assert answer.status_code == 400, answer.text
        error: dict[str, Any] = answer.json()["error"]
        return error


@pytest.fixture
def worker() -> Iterator[WorkerProcess]:
    with tempfile.TemporaryDirectory(prefix="tri", dir="/tmp") as folder:
        script = Path(folder, "script.json")
        script.write_text(json.dumps(SCRIPT))
        times = ("--simulated-step-us", "200", "--simulated-token-us", "0", "--simulated-row-us", "0")
        made = WorkerProcess(f"unix:{folder}/worker.sock", "--script", str(script), *times)
        made.start()
        yield made
        made.stop()


@pytest.fixture
async def served(worker: WorkerProcess) -> AsyncIterator[Served]:
    listen = worker.address.replace("worker", "engine")
    async with running_engine(worker.address, listen, num_blocks=800):
        gateway = Gateway(GatewaySettings.build(engine=listen, http_port=0, grpc_port=0), bind("127.0.0.1", 0), "0")
        await gateway.start()
        try:
            await until(lambda: gateway.front.obstacle() is None, 20)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{gateway.http.port}", timeout=30) as http:
                yield Served(http, worker)
        finally:
            await gateway.close()


async def test_constraints_hold_beside_everything_else(served: Served) -> None:
    calm = await served.text("calm", response_format=FORMAT)
    jsonschema.validate(json.loads(calm), SCHEMA)
    await asyncio.gather(
        white_space_ends(served),
        a_stop_string_ends_the_text_within_it(served, calm),
        a_stop_id_ends_the_text_within_it(served, calm),
        each_choice_is_held(served, calm),
        drafts_change_nothing(served),
        min_tokens_holds(served),
        refusals_of_the_engine_name_the_place(served),
        texts_of_special_tokens_stay_texts(served),
    )
    await what_dies_within_goes_on_where_it_was(served, calm)


async def white_space_ends(served: Served) -> None:
    """A model that only wants to say blanks may say one at each place, and then must go on."""
    schema = {"type": "object", "properties": {"id": {"enum": [0]}}, "required": ["id"], "additionalProperties": False}
    for fields in (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"structured_outputs": {"grammar": f"start: %json {json.dumps(schema)}"}},
    ):
        answer = await served.complete("blank", **fields)
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert json.loads(choice["text"]) == {"id": 0}
        assert [len(blanks) for blanks in re.findall(r"[ \n]+", choice["text"])] == [1] * 4
    compact = {"json": SCHEMA, "disable_any_whitespace": True}
    text = await served.text("blank", structured_outputs=compact)
    assert text == json.dumps(json.loads(text), separators=(",", ":"))


async def a_stop_string_ends_the_text_within_it(served: Served, calm: str) -> None:
    cut = await served.complete("calm", response_format=FORMAT, stop=['"tags"'])
    assert cut["choices"][0]["text"] == calm[: calm.index('"tags"')]
    assert cut["choices"][0]["finish_reason"] == "stop"


async def each_choice_is_held(served: Served, calm: str) -> None:
    answer = await served.complete("calm", response_format=FORMAT, n=2, temperature=1, seed=5)
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        jsonschema.validate(json.loads(choice["text"]), SCHEMA)
    body = {"prompt": "calm", "max_tokens": 400, "temperature": 0, "stream": True, "response_format": FORMAT}
    streamed = (await served.http.post("/v1/completions", json=body)).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(choice["text"] for event in events for choice in event["choices"]) == calm


async def drafts_change_nothing(served: Served) -> None:
    pattern = {"regex": "(ab){20}c"}
    plain = await served.text("repeat", structured_outputs=pattern, num_speculative_tokens=0)
    drafted = await served.text("repeat", structured_outputs=pattern, num_speculative_tokens=4)
    assert plain == drafted == "ab" * 20 + "c"


async def min_tokens_holds(served: Served) -> None:
    pattern = {"regex": "r{1,30}"}
    assert await served.text("calm", structured_outputs=pattern, min_tokens=9, logit_bias={str(ord("r")): -50}) != ""
    answer = await served.complete("blank", structured_outputs={"regex": "( |0)*"}, min_tokens=9, max_tokens=12)
    assert answer["usage"]["completion_tokens"] >= 9
    finished = [{"choice": ["red"]}, {"regex": "red"}, {"grammar": 'start: "red"'}, {"json": {"const": "red"}}]
    for wanted in finished:
        for stops in ([], [ord("e")], [ord("d"), ord("r")]):
            short = await served.complete("calm", structured_outputs=wanted, min_tokens=9, stop_token_ids=stops)
            assert short["choices"][0]["text"].strip('"') == "red"
            assert short["choices"][0]["finish_reason"] == "stop"


async def a_stop_id_ends_the_text_within_it(served: Served, calm: str) -> None:
    """It is left out, and named; until min_tokens it is text where nothing else may stand."""
    for fields in ({"response_format": FORMAT}, {"structured_outputs": {"regex": re.escape(calm)}}):
        comma = await served.complete("calm", stop_token_ids=[ord(",")], **fields)
        choice = comma["choices"][0]
        assert choice["text"] == calm[: calm.index(",")]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ord(","))
    at = calm.index(",") + 1
    late = await served.complete("calm", stop_token_ids=[ord(",")], min_tokens=at, **fields)
    assert late["choices"][0]["text"] == calm[: calm.index(",", at)]


async def refusals_of_the_engine_name_the_place(served: Served) -> None:
    unknown = await served.refusal(structured_outputs={"grammar": "start: <[70000]>"})
    assert unknown["param"] == "structured_outputs.grammar"
    assert unknown["message"].startswith("structured_outputs.grammar: ")
    endless = await served.refusal(response_format=FORMAT, ignore_eos=True)
    assert endless["param"] == "response_format.json_schema"


async def texts_of_special_tokens_stay_texts(served: Served) -> None:
    """What is written like the end of a text is no end where a schema asks for it."""
    names = await served.http.post("/detokenize", json={"tokens": [EOS]})
    end = names.json()["prompt"]
    assert len(end) > 3
    assert json.loads(await served.text("calm", structured_outputs={"json": {"const": end}})) == end
    assert await served.text("calm", structured_outputs={"choice": [end]}) == end


async def what_dies_within_goes_on_where_it_was(served: Served, calm: str) -> None:
    running = asyncio.create_task(served.text("fatal", response_format=FORMAT))
    await until(lambda: served.worker.ended, 20)
    served.worker.start()
    assert await running == calm
