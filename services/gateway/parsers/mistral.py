"""Calls as Mistral's models write them: first as one JSON array, later by name; both are read as one format."""

from __future__ import annotations

from services.gateway.parsers.shape import CallShape, ToolFormat

TAG = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"

MISTRAL = ToolFormat(
    "mistral",
    CallShape('{"name": "', '", "arguments": ', "}", opening=f"{TAG}[", between=", ", closing="]"),
    (TAG, CALL_ID, ARGS),
)
MISTRAL_NAMED = ToolFormat("mistral_named", CallShape(TAG, ARGS), (TAG, CALL_ID, ARGS))
