"""What the renderer answers, apart from any transport, and how an error looks in it.

asgi (HTTP) ──┐                 ┌── renderer: in this process
              ├── Api.call ─────┤
facade (gRPC) ┘                 └── forward: over HttpBody to a gateway
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import orjson

from services.common.errors import TriptychError

JSON: Final = "application/json"
SSE: Final = "text/event-stream; charset=utf-8"


class Outlet(Protocol):
    """Where a streamed answer leaves, without waiting."""

    def write(self, chunk: bytes) -> bool:
        """Takes a chunk; tells whether the client keeps up."""
        ...

    async def drained(self) -> None:
        """Returns when the client keeps up again, or is gone."""
        ...


class Events(Protocol):
    """Server-sent events on their way out. `aclose` ends the request behind them."""

    def __aiter__(self) -> AsyncIterator[bytes]:
        """The events, framed."""
        ...

    async def aclose(self) -> None:
        """Ends the request if it runs."""
        ...


@dataclass(slots=True, frozen=True)
class Reply:
    """An answer with status 200: a whole JSON document, or events. Anything else is raised.

    `pour` is a cheaper way than iteration to get all events out, where there is one.
    """

    body: bytes | Events
    content_type: str = JSON
    pour: Callable[[Outlet], Awaitable[None]] | None = None


class Api(Protocol):
    """The OpenAI API without its transport."""

    async def call(self, operation: str, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Answers one request. `headers` has lower-case names. Raises TriptychError."""
        ...

    async def obstacle(self) -> str | None:
        """What keeps requests from being served, or None."""
        ...


def error_body(error: TriptychError) -> bytes:
    """The error object of OpenAI's API."""
    return orjson.dumps(
        {
            "error": {
                "message": error.message,
                "type": error.kind,
                "param": error.field,
                "code": (error.reason or error.code.name).lower(),
            }
        }
    )


def error_headers(error: TriptychError) -> dict[str, str]:
    """Retry-After in whole seconds, rounded up, where trying again helps."""
    if error.retry_after_ms is None:
        return {}
    return {"retry-after": str(max(1, -(-error.retry_after_ms // 1000)))}


def event(document: bytes) -> bytes:
    """One server-sent event."""
    return b"data: " + document + b"\n\n"


DONE: Final = event(b"[DONE]")
