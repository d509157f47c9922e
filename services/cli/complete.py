"""`triptych complete TEXT`: continues a text; reads it from standard input when TEXT is - or left out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import ClassVar

from protos import gateway_pb2
from services.cli import client
from services.common.settings import SettingsError, build_parser, knob


class CompleteSettings(client.ClientSettings):
    """Continues a text."""

    section: ClassVar[str] = "complete"

    echo: bool = knob(False, "print the text before its continuation")
    ignore_eos: bool = knob(False, "go on after the model's own end, up to --max-tokens")


def main(command: str, argv: Sequence[str]) -> int:
    """Prints the continuation as it comes."""
    parser = build_parser(CompleteSettings, f"triptych {command}")
    parser.add_argument("text", nargs="?", metavar="TEXT", help="text to continue; - reads standard input")
    given = vars(parser.parse_args(list(argv)))
    text = given.pop("text", None)
    settings = CompleteSettings.resolve(given)
    if text in (None, "-"):
        text = sys.stdin.read()
    if not text:
        raise SettingsError("TEXT: nothing to continue")
    return client.run(_complete(text, settings))


async def _complete(text: str, settings: CompleteSettings) -> None:
    options = client.sampling(settings)
    options.ignore_eos = settings.ignore_eos
    request = gateway_pb2.GenerateRequest(
        model=settings.model,
        text=text,
        sampling=options,
        options=gateway_pb2.RequestOptions(stream=True),
        echo=settings.echo,
    )
    async with client.gateway(settings.address) as stub:
        async for message in stub.Generate(request):
            client.write(message.text)
    client.write("\n")
