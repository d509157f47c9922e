"""Calls as Hermes and Qwen write them: a JSON object between two tags, once per call."""

from __future__ import annotations

from services.gateway.parsers.shape import CallShape, ToolFormat

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

HERMES = ToolFormat(
    "hermes",
    CallShape(f'{OPEN}\n{{"name": "', '", "arguments": ', f"}}\n{CLOSE}", between="\n"),
    (OPEN, CLOSE),
)
