"""The options of `triptych top`, and its loop: scrape, compare, show."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import deque
from collections.abc import AsyncIterator, Sequence
from typing import ClassVar

import aiohttp
from rich.console import Console
from rich.live import Live

from services.cli.top.overview import Addresses, Overview, Scrapes, overview
from services.cli.top.scrape import scrape_all
from services.cli.top.tables import tables
from services.common.settings import Settings, build_parser, knob
from services.local.cluster import PRIVATE_PORT

_PLAIN_WIDTH = 140
"""Columns where the output is no terminal."""
_TRIED_PORTS = 64


class TopSettings(Settings):
    """Shows what the processes of a cluster do, from their metrics. Ctrl-C ends it."""

    section: ClassVar[str] = "top"

    engines: list[str] = knob(["127.0.0.1:9101"], "metrics of the engines: host:port")
    workers: list[str] = knob(["127.0.0.1:9102"], "metrics of the workers: host:port")
    gateways: list[str] = knob(
        [],
        "metrics of the gateways: host:port; by default the private ports that `triptych serve` gives several "
        f"gateways, from {PRIVATE_PORT} on, and where none answers 127.0.0.1:8000",
    )

    interval: float = knob(2.0, "seconds between two looks", gt=0, le=3600)
    window: float = knob(10.0, "seconds that rates, shares and medians are taken over", gt=0, le=3600)
    once: bool = knob(False, "look twice, show that, and end")
    json_lines: bool = knob(False, "one JSON object per look on standard output")

    @property
    def is_live(self) -> bool:
        """Whether one table is drawn over the last."""
        return not (self.once or self.json_lines)


def main(command: str, argv: Sequence[str]) -> int:
    """Shows until Ctrl-C. Status 1 where nothing answers."""
    parser = build_parser(TopSettings, f"triptych {command}")
    parser.add_argument("--json", dest="json_lines", action="store_true", help="the same as --json-lines")
    settings = TopSettings.resolve(vars(parser.parse_args(list(argv))))
    try:
        return asyncio.run(show(settings))
    except KeyboardInterrupt:
        return 0


async def show(settings: TopSettings) -> int:
    """Shows what is seen, as the settings say."""
    console = Console() if sys.stdout.isatty() else Console(width=_PLAIN_WIDTH)
    async with aiohttp.ClientSession() as session:
        addresses = await find(session, settings)
        with Live(console=console, auto_refresh=False) if settings.is_live else contextlib.nullcontext() as live:
            async for seen in look(session, settings, addresses):
                if settings.json_lines:
                    print(json.dumps(seen.as_dict()), flush=True)
                elif live is None:
                    console.print(tables(seen))
                else:
                    live.update(tables(seen), refresh=True)
                if settings.once:
                    return 0
    where = ", ".join(addresses.all)
    print(f"triptych top: nothing answers at {where}; `triptych serve` starts a cluster", file=sys.stderr)
    return 1


async def find(session: aiohttp.ClientSession, settings: TopSettings) -> Addresses:
    """Where to look: gateways that nobody named are looked for."""
    gateways = settings.gateways
    if not gateways:
        ports = (f"127.0.0.1:{PRIVATE_PORT + i}" for i in range(_TRIED_PORTS))
        found = await scrape_all(session, ports)
        is_gateway = {name for name, seen in found.items() if seen and "triptych:gateway_info" in seen.samples}
        gateways = [name for name in found if name in is_gateway] or ["127.0.0.1:8000"]
    return Addresses(settings.engines, gateways, settings.workers)


async def look(session: aiohttp.ClientSession, settings: TopSettings, addresses: Addresses) -> AsyncIterator[Overview]:
    """After each interval what happened since the oldest look within the window. Ends if nobody answers at first."""
    first = await scrape_all(session, addresses.all)
    if overview(addresses, first, first).nobody:
        return
    kept: deque[Scrapes] = deque([first], maxlen=max(1, round(settings.window / settings.interval)))
    while True:
        await asyncio.sleep(settings.interval)
        now = await scrape_all(session, addresses.all)
        yield overview(addresses, kept[0], now)
        kept.append(now)
