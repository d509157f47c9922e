"""What gateway and media process say to each other over a socket: a length, a JSON object, and bytes where it says so.

gateway ── limits ──▶ child                        once
gateway ◀── ready ─── child
gateway ── job, size, then so many bytes ──▶ child
gateway ◀── need ──── child                        bytes that decoding will take, by the header
gateway ── go ──────▶ child
gateway ◀── made, or wrong ── child
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

HEAD = struct.Struct("<I")
LONGEST = 1 << 20
"""Of the JSON text of one frame: the times of 36,000 frames fit."""

Frame = Mapping[str, Any]


def pack(frame: Frame) -> bytes:
    """One frame, as it is sent."""
    text = json.dumps(frame).encode()
    return HEAD.pack(len(text)) + text
