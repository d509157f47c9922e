"""`triptych chat`: a conversation in the terminal; without a terminal each line of standard input is a turn."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import ClassVar

from protos import gateway_pb2, gateway_pb2_grpc
from services.cli import client
from services.common.settings import build_parser, knob

_HELP = "/new forgets the conversation, /exit leaves; Ctrl-C stops an answer"


class ChatSettings(client.ClientSettings):
    """A conversation in the terminal."""

    section: ClassVar[str] = "chat"

    system: str | None = knob(None, "instructions before the conversation")


def main(command: str, argv: Sequence[str]) -> int:
    """Talks until /exit or the end of input."""
    settings = ChatSettings.resolve(vars(build_parser(ChatSettings, f"triptych {command}").parse_args(list(argv))))
    return client.run(_talk(settings))


async def _talk(settings: ChatSettings) -> None:
    opening = [_turn("system", settings.system)] if settings.system else []
    turns = list(opening)
    async with client.gateway(settings.address) as stub:
        for line in _lines(await _model_name(stub, settings)):
            if line == "/new":
                turns = list(opening)
                continue
            turns.append(_turn("user", line))
            turns.append(_turn("assistant", await _answer(stub, turns, settings)))


def _lines(model: str) -> Iterator[str]:
    """What the user says, turn by turn."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    import readline  # noqa: F401  (gives input() history and editing)

    from rich.console import Console

    console = Console(highlight=False)
    console.print(f"[bold]{model}[/bold]  [dim]{_HELP}[/dim]")
    while True:
        try:
            line = console.input("[bold cyan]> [/bold cyan]").strip()
        except (EOFError, KeyboardInterrupt):
            console.print()
            return
        if line == "/exit":
            return
        if line.startswith("/") and line != "/new":
            console.print(f"[dim]{_HELP}[/dim]")
        elif line:
            yield line


async def _answer(
    stub: gateway_pb2_grpc.GatewayServiceAsyncStub, turns: Sequence[gateway_pb2.ChatMessage], settings: ChatSettings
) -> str:
    """Prints the answer as it comes and returns it; Ctrl-C keeps what has come so far."""
    pieces: list[str] = []

    async def read() -> None:
        async for text in client.stream_chat(stub, turns, client.sampling(settings), settings.model):
            pieces.append(text)
            client.write(text)

    task = asyncio.create_task(read())
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        with contextlib.suppress(asyncio.CancelledError):
            await task
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    client.write("\n")
    return "".join(pieces)


async def _model_name(stub: gateway_pb2_grpc.GatewayServiceAsyncStub, settings: ChatSettings) -> str:
    models = await stub.ListModels(gateway_pb2.ListModelsRequest())
    return settings.model or ", ".join(model.name for model in models.models)


def _turn(role: str, text: str) -> gateway_pb2.ChatMessage:
    return gateway_pb2.ChatMessage(role=role, content=[gateway_pb2.ContentPart(text=text)])
