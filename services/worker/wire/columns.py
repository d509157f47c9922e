"""Raw little-endian bytes as columns, and what a column of a frame can get wrong."""

from __future__ import annotations

import numpy as np

from services.common.errors import InvalidArgument
from services.worker.step import Int32


def column(data: bytes, name: str, length: int | None = None) -> Int32:
    """The elements. Raises InvalidArgument where bytes are left over or the length is another."""
    if len(data) % 4:
        raise InvalidArgument(f"{name} has {len(data)} bytes, not a multiple of 4", field=name)
    values = np.frombuffer(data, np.dtype("<i4")).astype(np.int32, copy=False)
    if length is not None and len(values) != length:
        raise InvalidArgument(f"{name} has {len(values)} elements, not {length}", field=name)
    return values


def within(values: Int32, low: int, limit: int, name: str) -> Int32:
    """The column, if each element is in [low, limit)."""
    if len(values) and not (low <= int(values.min()) and int(values.max()) < limit):
        raise InvalidArgument(f"{name} has an element outside [{low}, {limit})", field=name)
    return values


def distinct(rows: Int32, name: str) -> Int32:
    """The column of rows, if none stands twice."""
    if len(np.unique(rows)) != len(rows):
        raise InvalidArgument(f"{name} names a row twice", field=name)
    return rows
