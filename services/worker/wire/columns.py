"""Raw little-endian bytes as columns, and what a column of a frame can get wrong."""

from __future__ import annotations

import numpy as np

from services.common.errors import InvalidArgument
from services.worker.step import Int32

_INT32 = np.dtype("<i4")
_FEW = 256
NONE = np.zeros(0, np.int32)


def column(data: bytes, name: str, length: int | None = None) -> Int32:
    """The elements. Raises InvalidArgument where bytes are left over or the length is another."""
    if not data and not length:
        return NONE
    if len(data) % 4:
        raise InvalidArgument(f"{name} has {len(data)} bytes, not a multiple of 4", field=name)
    values = np.frombuffer(data, _INT32)
    if not _INT32.isnative:
        values = values.astype(np.int32)
    if length is not None and len(values) != length:
        raise InvalidArgument(f"{name} has {len(values)} elements, not {length}", field=name)
    return values


def within(values: Int32, low: int, limit: int, name: str) -> Int32:
    """The column, if each element is in [low, limit)."""
    if len(values):
        few = len(values) <= _FEW  # numpy's reductions take longer to begin than to run
        listed = values.tolist() if few else [int(values.min()), int(values.max())]
        if min(listed) < low or max(listed) >= limit:
            raise InvalidArgument(f"{name} has an element outside [{low}, {limit})", field=name)
    return values


def distinct(rows: Int32, name: str) -> Int32:
    """The column of rows, if none stands twice."""
    if len(set(rows.tolist())) != len(rows):
        raise InvalidArgument(f"{name} names a row twice", field=name)
    return rows
