"""The example client over gRPC, run as a user runs it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from protos import engine_pb2
from tests.gateway.client_checks import call
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.stack import Stack, gateway_stack

ROOT = Path(__file__).resolve().parents[2]
PERSON = '{"name": "Goethe", "born": 1749}'


def script(submit: engine_pb2.Submit, choice: int) -> list[int]:
    """A model that asks for the weather, and answers once it has been told."""
    prompt = bytes(submit.prompt_id_i32le[::4]).decode()
    if submit.sampling.constraint.HasField("json_schema"):
        return list(PERSON.encode())
    if '"degrees": 12' in prompt:
        return list(b"12 degrees in Oslo.")
    if "get_weather" in prompt:
        return list(call("get_weather", city="Oslo").encode())
    return list("It scatters 🌍.".encode())


async def example(s: Stack, *arguments: str) -> tuple[int, str, str]:
    command = ("examples/grpc_client.py", "--address", f"127.0.0.1:{s.gateway.grpc_port}", *arguments)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    child = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=ROOT, env=environ, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await child.communicate()
    assert child.returncode is not None
    return child.returncode, out.decode(), err.decode()


async def test_the_grpc_client() -> None:
    async with gateway_stack(FakeEngine(script=script, context=4096)) as s:
        chat, tool, schema, embed, wrong = await asyncio.gather(
            example(s, "chat", "Why", "is", "the", "sky", "blue?"),
            example(s, "tool", "What is the weather in Oslo?"),
            example(s, "schema", "Who wrote Faust?"),
            example(s, "embed", "one", "two"),
            example(s, "chat", "x" * 5000),
        )
    assert chat == (0, "It scatters 🌍.\n", "")
    assert tool == (0, '\n[get_weather({"city": "Oslo"})]\n12 degrees in Oslo.\n', "")
    assert schema == (0, f"{json.loads(PERSON)}\n", "")
    assert embed[0] == 0
    assert len(embed[1].splitlines()) == 2
    assert wrong[:2] == (1, "")
    assert wrong[2].startswith("INVALID_ARGUMENT messages: ")
