"""W3C trace context: read, continued and carried from role to role in gRPC metadata and frames."""

from __future__ import annotations

import re
import secrets

_TRACEPARENT = re.compile(r"^00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}$")


def valid(traceparent: str | None) -> str | None:
    """The header if it is well-formed; a malformed one is ignored, as the standard asks."""
    return traceparent if traceparent is not None and _TRACEPARENT.match(traceparent) else None


def start() -> str:
    """A new, unsampled trace."""
    return f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-00"


def child(traceparent: str | None) -> str:
    """The same trace with a span id of our own, or a new trace."""
    parent = valid(traceparent)
    if parent is None:
        return start()
    version, trace_id, _, flags = parent.split("-")
    return f"{version}-{trace_id}-{secrets.token_hex(8)}-{flags}"


def trace_id(traceparent: str | None) -> str | None:
    """The 32 hexadecimal digits that name the trace, for logs."""
    parent = valid(traceparent)
    return parent.split("-")[1] if parent else None
