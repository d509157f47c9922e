"""Prometheus: the buckets that all roles share and the endpoint that is scraped.

Names and labels are the ones dashboards for vLLM know; the lowest buckets resolve a fast step.
"""

from __future__ import annotations

import socket
import threading
from http.server import ThreadingHTTPServer

from prometheus_client import CollectorRegistry, MetricsHandler

MILLISECONDS_UP = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.04, 0.05, 0.075)
TTFT_BUCKETS = (*MILLISECONDS_UP, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560)
TOKEN_TIME_BUCKETS = (*MILLISECONDS_UP, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LATENCY_BUCKETS = (*MILLISECONDS_UP, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2.5, 5, 10, 20, 30, 40, 60, 120, 240, 480, 960, 1920)
STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_LOOK_S = 86_400.0  # the library would look twice a second whether its thread shall end


def token_count_buckets(limit: int) -> tuple[int, ...]:
    """1, 2, 5, 10, … up to and including `limit`."""
    buckets: list[int] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale >= limit:
                return (*buckets, limit)
            buckets.append(step * scale)
        scale *= 10


class Scrape(ThreadingHTTPServer):
    """/metrics of this process, on a thread that sleeps until somebody asks. Raises OSError where it cannot listen."""

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), MetricsHandler.factory(registry))
        except OSError as error:
            raise OSError(f"--metrics-port: cannot listen on {host}:{port}: {error}") from None
        threading.Thread(target=self.serve_forever, args=(_LOOK_S,), name="scrape", daemon=True).start()
