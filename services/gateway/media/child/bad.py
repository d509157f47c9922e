"""What is wrong with an item, as its sender is told."""

from __future__ import annotations

import struct
import zlib


class BadMedia(Exception):
    """The item cannot be taken. The text goes on from "messages[0].content[1]: "."""


class TooLarge(BadMedia):
    """It is beyond a limit of the server."""


class NoRoom(Exception):
    """The blob, of `nbytes`, has no room in its file system."""

    def __init__(self, nbytes: int) -> None:
        super().__init__(f"no room for {nbytes} bytes")
        self.nbytes = nbytes


BROKEN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
    zlib.error,
)
"""What Pillow and PyAV have been seen to raise, or may raise, over a file that is broken or made to harm."""
