"""The closed loop: so many clients, each sending its next request when its last one has ended."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from services.cli.figures import Timing


@dataclass(frozen=True, slots=True)
class Target:
    """The server and how it is asked."""

    base_url: str
    model: str
    chat: bool
    output_tokens: int
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Put into each request in the end; a field that is None there is left out."""

    @property
    def path(self) -> str:
        """Where requests go."""
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, prompt: str) -> dict[str, Any]:
        """A greedy request that produces exactly `output_tokens` where the server knows ignore_eos."""
        asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if self.chat else {"prompt": prompt}
        body = {
            "model": self.model,
            **asked,
            "max_tokens": self.output_tokens,
            "min_tokens": self.output_tokens,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        return {name: value for name, value in body.items() if value is not None}


async def run(session: aiohttp.ClientSession, target: Target, prompts: Sequence[str], clients: int) -> list[Timing]:
    """Sends every prompt once, `clients` at a time."""
    waiting = iter(prompts)

    async def client() -> list[Timing]:
        return [await measure(session, target, prompt) for prompt in waiting]

    return [timing for timings in await asyncio.gather(*(client() for _ in range(clients))) for timing in timings]


async def measure(session: aiohttp.ClientSession, target: Target, prompt: str) -> Timing:
    """One request, streamed. What goes wrong is kept in the timing, so that one failure ends no run."""
    timing = Timing(sent=time.perf_counter())
    try:
        async with session.post(target.base_url + target.path, json=target.body(prompt)) as answer:
            if answer.status != 200:
                timing.error = f"HTTP {answer.status}: {(await answer.text())[:300]}"
            else:
                async for arrived, event in _events(answer.content):
                    _read(timing, arrived, event)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        timing.error = repr(error)
    timing.ended = time.perf_counter()
    if not timing.error and not timing.texts:
        timing.error = "the stream held no text"
    return timing


async def _events(content: aiohttp.StreamReader) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """Each server-sent event with the time its bytes arrived."""
    rest = b""
    async for chunk in content.iter_any():
        arrived = time.perf_counter()
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield arrived, json.loads(data)


def _read(timing: Timing, arrived: float, event: dict[str, Any]) -> None:
    if "error" in event:
        timing.error = json.dumps(event["error"])[:300]
    if usage := event.get("usage"):
        timing.prompt_tokens = usage["prompt_tokens"]
        timing.output_tokens = usage["completion_tokens"]
        timing.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    for choice in event.get("choices") or []:
        if choice.get("text") or (choice.get("delta") or {}).get("content"):
            timing.texts.append(arrived)
