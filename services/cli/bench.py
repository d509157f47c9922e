"""`triptych bench`: measures any OpenAI-compatible server with a closed loop of streaming clients."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
from pydantic import field_validator

from services.cli import load
from services.cli.figures import Figures, summarize
from services.cli.prompts import LocalTokenizer, Prompts, ServerTokenizer, Tokenizer
from services.common.settings import Settings, SettingsError, build_parser, knob

_WARM_UP_OUTPUT = 8
_WARM_UP_CLIENTS = 4
_LONGEST_WARM_UP = 300
_RUN_STRIDE = 1000


class BenchSettings(Settings):
    """Measures an OpenAI-compatible server: greedy streams of a fixed length, in a closed loop."""

    section: ClassVar[str] = "bench"

    base_url: str = knob("http://127.0.0.1:8000", "the server, without /v1")
    model: str | None = knob(None, "name of the model; the server's first one by default")
    chat: bool = knob(False, "ask /v1/chat/completions; /v1/completions by default")
    tokenizer: Path | None = knob(None, "folder with tokenizer.json; /tokenize of the server by default")

    concurrency: int = knob(1, "clients, each with one request at a time", ge=1)
    requests: int = knob(8, "requests in a run", ge=1)
    prompt_tokens: int = knob(128, "tokens of each prompt", ge=1, le=100_000)
    output_tokens: int = knob(128, "tokens of each answer", ge=1)
    shared_prefix_tokens: int = knob(0, "tokens that all prompts begin with", ge=0)

    runs: int = knob(1, "runs, each with prompts of its own", ge=1)
    warm_up: int = knob(2, "short requests per client before the first run, at most 4 clients", ge=0)
    seed: int = knob(1, "equal seeds give equal prompts", ge=0)
    timeout_s: float = knob(300.0, "a request that takes longer has failed", gt=0)
    extra_body: str = knob("{}", "JSON object put into each request; a field that is null there is left out")
    json_lines: bool = knob(False, "one JSON object per run on standard output")

    @field_validator("extra_body")
    @classmethod
    def _is_an_object(cls, text: str) -> str:
        if not isinstance(json.loads(text), dict):
            raise ValueError("must be a JSON object")
        return text

    def extra_fields(self) -> dict[str, Any]:
        """`extra_body` as it is read."""
        fields: dict[str, Any] = json.loads(self.extra_body)
        return fields


Report = Callable[[BenchSettings, int, Figures], None]
"""Is told each run: the settings, its number, its figures."""


def main(command: str, argv: Sequence[str]) -> int:
    """Prints the figures of each run. Status 1 if a request failed."""
    parser = build_parser(BenchSettings, f"triptych {command}")
    parser.add_argument("--json", dest="json_lines", action="store_true", help="the same as --json-lines")
    settings = BenchSettings.resolve(vars(parser.parse_args(list(argv))))
    if settings.shared_prefix_tokens >= settings.prompt_tokens:
        raise SettingsError("--shared-prefix-tokens: must be less than --prompt-tokens")
    try:
        runs = asyncio.run(measure(settings))
    except (aiohttp.ClientError, OSError, ValueError) as error:
        print(f"triptych {command}: {settings.base_url}: {error}", file=sys.stderr)
        return 1
    return 1 if any(figures.failed for figures in runs) else 0


async def measure(settings: BenchSettings, report: Report | None = None) -> list[Figures]:
    """Warms up, then measures and reports each run; prints it where no `report` is given."""
    report = report or _print
    timeout = aiohttp.ClientTimeout(total=settings.timeout_s)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        model = settings.model or await _first_model(session, settings.base_url)
        extra = settings.extra_fields()
        target = load.Target(settings.base_url, model, settings.chat, settings.output_tokens, extra)
        prompts = await Prompts.load(_tokenizer(settings, session, model))
        await _warm_up(session, settings, target, prompts)
        found = []
        for run in range(settings.runs):
            found.append(await _run(session, settings, target, prompts, run))
            report(settings, run, found[-1])
        return found


async def _run(
    session: aiohttp.ClientSession, settings: BenchSettings, target: load.Target, prompts: Prompts, run: int
) -> Figures:
    texts = await prompts.make(
        settings.seed * _RUN_STRIDE + run, settings.requests, settings.prompt_tokens, settings.shared_prefix_tokens
    )
    began = time.perf_counter()
    timings = await load.run(session, target, texts, settings.concurrency)
    return summarize(timings, time.perf_counter() - began)


async def _warm_up(
    session: aiohttp.ClientSession, settings: BenchSettings, target: load.Target, prompts: Prompts
) -> None:
    clients = min(settings.concurrency, _WARM_UP_CLIENTS)
    if not settings.warm_up:
        return
    short = replace(target, output_tokens=_WARM_UP_OUTPUT)
    tokens = min(settings.prompt_tokens, _LONGEST_WARM_UP)
    texts = await prompts.make(-1 - settings.seed, settings.warm_up * clients, tokens, 0)
    await load.run(session, short, texts, clients)


def _tokenizer(settings: BenchSettings, session: aiohttp.ClientSession, model: str) -> Tokenizer:
    if settings.tokenizer:
        return LocalTokenizer(settings.tokenizer)
    return ServerTokenizer(session, settings.base_url, model)


async def _first_model(session: aiohttp.ClientSession, base_url: str) -> str:
    async with session.get(f"{base_url}/v1/models") as answer:
        answer.raise_for_status()
        models = (await answer.json())["data"]
    if not models:
        raise ValueError("the server lists no model; name one with --model")
    return str(models[0]["id"])


def _print(settings: BenchSettings, run: int, figures: Figures) -> None:
    if settings.json_lines:
        load_of = settings.model_dump(mode="json", exclude={"json_lines"})
        print(json.dumps({"run": run, **load_of, **figures.as_dict()}), flush=True)
        return
    done = figures.requests - figures.failed
    print(
        f"run {run}: {done} of {figures.requests} requests in {figures.duration_s:.1f} s, "
        f"{settings.concurrency} at a time, {settings.prompt_tokens}/{settings.output_tokens} tokens\n"
        f"  output  {figures.output_tokens_per_s:>9.1f} tok/s  with prompts {figures.total_tokens_per_s:.1f} tok/s\n"
        f"  TTFT    {figures.ttft_p50_ms:>9.1f} ms p50 {figures.ttft_p99_ms:>9.1f} ms p99\n"
        f"  ITL     {figures.itl_p50_ms:>9.1f} ms p50 {figures.itl_p99_ms:>9.1f} ms p99\n"
        f"  TPOT    {figures.tpot_p50_ms:>9.1f} ms p50 {figures.tpot_p99_ms:>9.1f} ms p99",
        flush=True,
    )
    if figures.first_error:
        print(f"  {figures.failed} failed; the first: {figures.first_error}", flush=True)
