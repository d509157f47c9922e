"""What can be wrong with media: always the request's fault, told at the part that names it."""

from __future__ import annotations

from typing import Final, Literal

from services.common.errors import InvalidArgument

Reason = Literal[
    "MEDIA_REFUSED", "MEDIA_UNREACHABLE", "MEDIA_MALFORMED", "MEDIA_TOO_LARGE", "MEDIA_UNKNOWN", "TOO_MANY_MEDIA"
]
REFUSED: Final[Reason] = "MEDIA_REFUSED"  # nothing is fetched from there
UNREACHABLE: Final[Reason] = "MEDIA_UNREACHABLE"  # it was tried, and nothing came
MALFORMED: Final[Reason] = "MEDIA_MALFORMED"  # no URL, no base64, no image
TOO_LARGE: Final[Reason] = "MEDIA_TOO_LARGE"
TOO_MANY: Final[Reason] = "TOO_MANY_MEDIA"
UNKNOWN: Final[Reason] = "MEDIA_UNKNOWN"  # no upload, name or file of that name is here


def fault(reason: Reason, where: str, words: str) -> InvalidArgument:
    """The error for the part at `where`."""
    return InvalidArgument(f"{where}: {words}", field=where, reason=reason)


def too_large(where: str, limit: int) -> InvalidArgument:
    """The error for more bytes than are taken."""
    return fault(TOO_LARGE, where, f"more than {limit} bytes")
