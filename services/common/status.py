"""Errors as google.rpc.Status, and back."""

from __future__ import annotations

from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2

from services.common.errors import TriptychError, from_code_number


def to_rpc_status(error: TriptychError) -> status_pb2.Status:
    """google.rpc.Status with BadRequest, ErrorInfo and RetryInfo details where they apply."""
    details: list[any_pb2.Any] = []

    def pack(message: error_details_pb2.BadRequest | error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> None:
        packed = any_pb2.Any()
        packed.Pack(message)
        details.append(packed)

    if error.field is not None:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.reason is not None or error.error_id is not None:
        metadata = {"error_id": error.error_id} if error.error_id else {}
        pack(error_details_pb2.ErrorInfo(reason=error.reason or "", domain="triptych", metadata=metadata))
    if error.retry_after_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(code=error.code_number, message=error.message, details=details)


def from_rpc_status(status: status_pb2.Status) -> TriptychError:
    """The error that `to_rpc_status` packed."""
    bad_request = error_details_pb2.BadRequest()
    info = error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    field: str | None = None
    reason: str | None = None
    error_id: str | None = None
    retry_after_ms: int | None = None
    for detail in status.details:
        if detail.Unpack(bad_request) and bad_request.field_violations:
            field = bad_request.field_violations[0].field
        elif detail.Unpack(info):
            reason = info.reason or None
            error_id = info.metadata.get("error_id")
        elif detail.Unpack(retry):
            retry_after_ms = retry.retry_delay.ToMilliseconds()
    return from_code_number(
        status.code, status.message, field=field, reason=reason, retry_after_ms=retry_after_ms, error_id=error_id
    )
