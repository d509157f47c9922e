"""Calls as Llama 3.1 and later write them: bare JSON objects, perhaps after a tag."""

from __future__ import annotations

from services.gateway.parsers.shape import CallShape, ToolFormat

TAG = "<|python_tag|>"

LLAMA3 = ToolFormat("llama3", CallShape('{"name": "', '", "parameters": ', "}", between="; "), (TAG,))
