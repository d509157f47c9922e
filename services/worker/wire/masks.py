"""Grammar masks: which steps wait for them, and a frame of them into masks by row."""

from __future__ import annotations

import numpy as np

from protos import worker_pb2
from services.common.errors import InvalidArgument
from services.worker.step import MASKED, Masks, StepInput
from services.worker.wire.columns import column, distinct

_ROWS, _DROP, _MASK = "masks.row_i32le", "masks.drop_u8", "masks.mask_u32le"


def waits_for_masks(step: worker_pb2.Step) -> bool:
    """Whether a frame of masks must follow this step."""
    return any(flags & MASKED for flags in set(step.flags_u8))


def decode_masks(message: worker_pb2.StepMasks, step: StepInput, vocab_size: int) -> Masks:
    """The masks of the rows of a step that wait for one. Raises InvalidArgument naming the column."""
    flagged = (step.flags & MASKED) != 0
    drafts = step.draft_counts if len(step.draft_counts) else np.zeros(len(step.rows), np.int32)
    positions = dict(zip(step.rows[flagged].tolist(), (drafts[flagged] + 1).tolist(), strict=True))
    rows = distinct(column(message.row_i32le, _ROWS), _ROWS).tolist()
    for row in rows:
        if row not in positions:
            raise InvalidArgument(f"{_ROWS} names row {row}, which does not wait for a mask", field=_ROWS)
    missing = sorted(positions.keys() - set(rows))
    if missing:
        raise InvalidArgument(f"{_ROWS} lacks row {missing[0]}, which waits for a mask", field=_ROWS)
    drop = message.drop_u8
    if len(drop) != len(rows) or any(value > 1 for value in drop):
        raise InvalidArgument(f"{_DROP} has {len(drop)} elements for {len(rows)} rows, or one above 1", field=_DROP)
    size = -(-vocab_size // 32) * 4
    counts = [0 if dropped else positions[row] for row, dropped in zip(rows, drop, strict=True)]
    if len(message.mask_u32le) != sum(counts) * size:
        raise InvalidArgument(
            f"{_MASK} has {len(message.mask_u32le)} bytes, not {sum(counts)} masks of {size} bytes", field=_MASK
        )
    packed = np.frombuffer(message.mask_u32le, np.uint8).reshape(-1, size)
    ends = np.cumsum(counts)
    return {
        row: None if dropped else packed[end - count : end]
        for row, dropped, count, end in zip(rows, drop, counts, ends.tolist(), strict=True)
    }
