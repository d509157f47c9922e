"""The exception tree and its one mapping to gRPC and HTTP status codes. Imports neither (status puts it on the wire).

TriptychError                INTERNAL             500
├── InvalidArgument          INVALID_ARGUMENT     400   names the field
│   └── DataLoss             DATA_LOSS            400   media does not match its hash
├── FailedPrecondition       FAILED_PRECONDITION  400
├── Unauthenticated          UNAUTHENTICATED      401
├── PermissionDenied         PERMISSION_DENIED    403
├── NotFound                 NOT_FOUND            404
├── OutOfRange               OUT_OF_RANGE         410   the tail to resume is gone
├── ResourceExhausted        RESOURCE_EXHAUSTED   429   says when to try again
├── Cancelled                CANCELLED            499
├── Unimplemented            UNIMPLEMENTED        501   refused by name
├── Unavailable              UNAVAILABLE          503   says when to try again
├── DeadlineExceeded         DEADLINE_EXCEEDED    504
└── Fenced                   ABORTED              500   between the roles only
"""

from __future__ import annotations

import re
import secrets
from typing import ClassVar, NamedTuple

_MESSAGE_BYTES = 600
_FIELD_BYTES = 200
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def _cut(text: str, most: int) -> str:
    """A caller's own text comes back in errors, in several spellings: all of them have to fit into 8 KiB of headers."""
    text = _CONTROLS.sub("\ufffd", text)
    data = text.encode(errors="replace")
    return text if len(data) <= most else data[:most].decode(errors="ignore") + "…"


class Code(NamedTuple):
    """A canonical code of google.rpc."""

    number: int
    name: str


class TriptychError(Exception):
    """Something that a caller is told, cut if long. `field` is in the caller's spelling; `reason` is a stable word."""

    code: ClassVar[Code] = Code(13, "INTERNAL")
    http_status: ClassVar[int] = 500
    kind: ClassVar[str] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        reason: str | None = None,
        retry_after_ms: int | None = None,
        error_id: str | None = None,
    ) -> None:
        self.message = _cut(message, _MESSAGE_BYTES)
        super().__init__(self.message)
        self.field = None if field is None else _cut(field, _FIELD_BYTES)
        self.reason = reason
        self.retry_after_ms = retry_after_ms
        self.error_id = error_id

    @property
    def code_number(self) -> int:
        """The canonical google.rpc code number."""
        return self.code.number


class InvalidArgument(TriptychError):
    """The request is wrong, whatever the state of the server."""

    code = Code(3, "INVALID_ARGUMENT")
    http_status = 400
    kind = "invalid_request_error"


class DataLoss(InvalidArgument):
    """Content does not match the hash that names it."""

    code = Code(15, "DATA_LOSS")


class FailedPrecondition(TriptychError):
    """The request does not fit the state of the server; trying again does not help."""

    code = Code(9, "FAILED_PRECONDITION")
    http_status = 400
    kind = "invalid_request_error"


class Unauthenticated(TriptychError):
    """No key, or a wrong one."""

    code = Code(16, "UNAUTHENTICATED")
    http_status = 401
    kind = "authentication_error"


class PermissionDenied(TriptychError):
    """The key does not allow this."""

    code = Code(7, "PERMISSION_DENIED")
    http_status = 403
    kind = "permission_error"


class NotFound(TriptychError):
    """Nothing has that name."""

    code = Code(5, "NOT_FOUND")
    http_status = 404
    kind = "not_found_error"


class OutOfRange(TriptychError):
    """The tail that a client wants to resume from is gone."""

    code = Code(11, "OUT_OF_RANGE")
    http_status = 410
    kind = "invalid_request_error"


class ResourceExhausted(TriptychError):
    """A limit is reached; `retry_after_ms` says when to try again."""

    code = Code(8, "RESOURCE_EXHAUSTED")
    http_status = 429
    kind = "rate_limit_error"


class Cancelled(TriptychError):
    """The caller gave up."""

    code = Code(1, "CANCELLED")
    http_status = 499
    kind = "cancelled"


class Unimplemented(TriptychError):
    """Known by name, not built."""

    code = Code(12, "UNIMPLEMENTED")
    http_status = 501
    kind = "not_implemented_error"


class Unavailable(TriptychError):
    """Not now; `retry_after_ms` says when to try again."""

    code = Code(14, "UNAVAILABLE")
    http_status = 503
    kind = "service_unavailable_error"


class DeadlineExceeded(TriptychError):
    """The caller's time ran out."""

    code = Code(4, "DEADLINE_EXCEEDED")
    http_status = 504
    kind = "timeout_error"


class Fenced(TriptychError):
    """An older incarnation called; a newer one holds the lease."""

    code = Code(10, "ABORTED")


_TREE: tuple[type[TriptychError], ...] = (*TriptychError.__subclasses__(), DataLoss)
_BY_NUMBER = {kind.code.number: kind for kind in _TREE}


def from_code_number(
    number: int,
    message: str,
    *,
    field: str | None = None,
    reason: str | None = None,
    retry_after_ms: int | None = None,
    error_id: str | None = None,
) -> TriptychError:
    """The error that a google.rpc code number stands for; unknown numbers become INTERNAL."""
    kind = _BY_NUMBER.get(number, TriptychError)
    return kind(message, field=field, reason=reason, retry_after_ms=retry_after_ms, error_id=error_id)


def internal(message: str = "internal error") -> TriptychError:
    """An INTERNAL error with a fresh id that also stands in the logs."""
    error_id = secrets.token_hex(8)
    return TriptychError(f"{message} (error id {error_id})", error_id=error_id)
