"""gRPC channels with our options, and waiting for a peer with back-off.

An address is `unix:/path` or `host:port`. The keepalive names are traps that were measured: the
ping interval alone does nothing for a minute unless grpc.http2.ping_timeout_ms goes with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio

MAX_MESSAGE_BYTES = 8 * 1024 * 1024
CHUNK_BYTES = 1024 * 1024
_SOCKET_PATH_LIMIT = 107

STREAM_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.bdp_probe", 0),  # a ping for all that is read: a third of what idle roles cost
    ("grpc.http2.lookahead_bytes", CHUNK_BYTES),  # what it would have found out
)
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    *STREAM_OPTIONS,
)


def check_address(address: str) -> str:
    """The address, or ValueError where a socket path is too long for the kernel."""
    if address.startswith("unix:") and len(address.removeprefix("unix:").encode()) > _SOCKET_PATH_LIMIT:
        raise ValueError(f"socket path of {address!r} is longer than {_SOCKET_PATH_LIMIT} bytes")
    return address


def connect(address: str) -> grpc.aio.Channel:
    """A channel to `address`. It connects when it is used, and reconnects by itself."""
    return grpc.aio.insecure_channel(check_address(address), options=list(CHANNEL_OPTIONS))


async def backoff(first_s: float = 0.05, limit_s: float = 1.0) -> AsyncIterator[int]:
    """Yields 0, 1, 2, … and sleeps twice as long each time between them, up to `limit_s`."""
    delay, attempt = first_s, 0
    while True:
        yield attempt
        await asyncio.sleep(delay)
        delay, attempt = min(delay * 2, limit_s), attempt + 1
