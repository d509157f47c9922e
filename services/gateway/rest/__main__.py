"""The REST API in a process of its own: bodies go to a gateway over gRPC, answers come back as they are."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from services.common import logs
from services.common.logs import Log
from services.common.server import wait_for_signal
from services.common.settings import SettingsError
from services.gateway import metrics
from services.gateway.config import RestSettings
from services.gateway.metrics import HttpMetrics
from services.gateway.rest import asgi
from services.gateway.rest.forward import Forward
from services.gateway.rest.http import HttpServer, bind
from services.gateway.trace import release

_log = Log("rest")


async def serve(settings: RestSettings) -> int:
    """Runs until a signal asks it to end; live streams finish within `drain_s`."""
    try:
        bound = bind(settings.host, settings.http_port)
    except OSError as error:
        _log.error("cannot listen", host=settings.host, http_port=settings.http_port, reason=str(error))
        return 1
    forward = Forward(settings.gateway)
    counts = HttpMetrics()
    site = asgi.Site(
        forward, release(), counts.render, metrics.CONTENT_TYPE, settings.max_body_bytes, counts.http_answered
    )
    server = HttpServer(asgi.application(site), bound, drain_s=settings.drain_s)
    await server.start()
    _log.info("listening", http_port=server.port, gateway=settings.gateway)
    await wait_for_signal()
    _log.info("draining", limit_s=settings.drain_s)
    await server.stop()
    await forward.close()
    return 0


async def main(argv: Sequence[str]) -> int:
    """`python -m services.gateway.rest`; the exit status."""
    try:
        settings = RestSettings.load(argv, "triptych rest")
    except SettingsError as error:
        print(f"triptych rest: {error}", file=sys.stderr)
        return 2
    logs.configure("rest", settings.name, settings.log_level, settings.log_style)
    return await serve(settings)


if __name__ == "__main__":
    sys.exit(asyncio.run(main(sys.argv[1:])))
