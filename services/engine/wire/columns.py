"""Columns are little-endian on the wire and native inside; only a big-endian host swaps."""

from __future__ import annotations

import sys
from array import array
from typing import Any

from services.common.errors import InvalidArgument

HASH_BYTES = 32
"""Of the SHA-256 that names an item of media."""
_SWAP = sys.byteorder == "big"


def to_bytes(column: array[Any]) -> bytes:
    """A column as the wire has it."""
    if _SWAP:
        column = column[:]
        column.byteswap()
    return column.tobytes()


def to_column(data: bytes, typecode: str, field: str) -> array[Any]:
    """A column from the wire. Raises InvalidArgument where the length is not whole."""
    column = array(typecode)
    if len(data) % column.itemsize:
        raise InvalidArgument(f"{field}: {len(data)} bytes are not whole {column.itemsize}-byte elements", field=field)
    column.frombytes(data)
    if _SWAP:
        column.byteswap()
    return column
