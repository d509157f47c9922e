"""The headers that follow a request through all roles, its id and the W3C trace context; and our release."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from importlib import metadata
from typing import Final

REQUEST_ID: Final = "x-request-id"
TRACEPARENT: Final = "traceparent"
_PRINTABLE = re.compile(r"[\x21-\x7e]{1,128}")


def request_id_of(headers: Mapping[str, str]) -> str:
    """The client's x-request-id where it is one short printable word, else a new id."""
    given = headers.get(REQUEST_ID, "")
    return given if _PRINTABLE.fullmatch(given) else secrets.token_hex(16)


def release() -> str:
    """The installed release."""
    try:
        return metadata.version("triptych")
    except metadata.PackageNotFoundError:
        return "unreleased"
