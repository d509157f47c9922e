"""Steps for tests, plain and as frames."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos import common_pb2, worker_pb2
from services.worker.step import (
    SAMPLES,
    CacheShape,
    Int32,
    Masks,
    MediaItem,
    NewRow,
    Runner,
    SamplingParams,
    StepInput,
    StepOutput,
)

SHAPE = CacheShape(num_blocks=64, block_size=4, max_num_seqs=4, max_model_len=64, max_num_batched_tokens=32)


def ints(*values: int) -> Int32:
    return np.array(values, np.int32)


def pack(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


def unpack(column: bytes) -> list[int]:
    return np.frombuffer(column, "<i4").tolist()


def request(row: int, tokens: Sequence[int], prompt_len: int | None = None, epoch: int = 1, **sampling: Any) -> NewRow:
    params = SamplingParams(**{"seed": 0, **sampling})
    return NewRow(row, epoch, ints(*tokens), prompt_len or len(tokens), params, f"request-{row}", None)


def step(
    step_id: int,
    rows: Sequence[tuple[int, int, int]] = (),
    new: Sequence[NewRow] = (),
    freed: Sequence[int] = (),
    blocks: dict[int, Sequence[int]] | None = None,
    flags: Sequence[int] | None = None,
    first_writable: Sequence[int] | None = None,
    drafts: dict[int, Sequence[int]] | None = None,
    media: Sequence[MediaItem] = (),
    dropped: Sequence[bytes] = (),
    received_s: float | None = None,
) -> StepInput:
    """A step of (row, computed, tokens); rows sample unless told otherwise.

    `blocks` are the new ones by row; unless told otherwise a row that starts gets blocks for a whole context.
    `drafts` are by row, and counted in tokens.
    """
    if blocks is None:
        blocks = {row: range(SHAPE.max_model_len // SHAPE.block_size) for row, computed, _ in rows if computed == 0}
    listed = [list(blocks.get(row, ())) for row, _, _ in rows]
    drafted = [list((drafts or {}).get(row, ())) for row, _, _ in rows]
    return StepInput(
        step_id=step_id,
        received_s=time.monotonic() if received_s is None else received_s,
        resync=False,
        freed_rows=ints(*freed),
        new_rows=tuple(new),
        rows=ints(*(row for row, _, _ in rows)),
        num_tokens=ints(*(count for _, _, count in rows)),
        num_computed=ints(*(computed for _, computed, _ in rows)),
        flags=np.array([SAMPLES] * len(rows) if flags is None else flags, np.uint8),
        first_writable=ints(*([0] * len(rows) if first_writable is None else first_writable)),
        block_counts=ints(*(len(ids) for ids in listed)),
        block_ids=ints(*(block for ids in listed for block in ids)),
        draft_counts=ints(*(len(ids) for ids in drafted)) if drafts else ints(),
        draft_ids=ints(*(draft for ids in drafted for draft in ids)),
        encode=tuple(media),
        dropped_media=tuple(dropped),
    )


def no_masks() -> Masks:
    """For steps in which no row waits for a mask."""
    raise AssertionError("no row waits for a mask")


def run(runner: Runner, given: StepInput, masks: Callable[[], Masks] = no_masks) -> StepOutput:
    """Runs a step on a runner, and waits for it."""
    output = runner.execute(given, masks)
    return output if isinstance(output, StepOutput) else output.wait()


def packed(*allowed: Sequence[int], vocab_size: int) -> NDArray[np.uint8]:
    """Grammar masks, one per position, that allow these ids."""
    bits = np.zeros((len(allowed), -(-vocab_size // 32) * 32), np.uint8)
    for position, ids in enumerate(allowed):
        bits[position, list(ids)] = 1
    return np.packbits(bits, axis=1, bitorder="little")


def new_row(row: int, tokens: Sequence[int], epoch: int = 1, prompt_len: int | None = None, **sampling: Any) -> Any:
    seed = sampling.pop("seed", 7)
    return worker_pb2.NewRow(
        row=row,
        epoch=epoch,
        token_id_i32le=pack(*tokens),
        prompt_len=prompt_len or len(tokens),
        sampling=common_pb2.SamplingParams(max_tokens=100, **sampling),
        seed=seed,
        request_id=f"request-{row}",
    )


def frame(
    step_id: int,
    rows: Sequence[tuple[int, int, int]] = (),
    new: Sequence[Any] = (),
    freed: Sequence[int] = (),
    resync: bool = False,
    flags: int = SAMPLES,
) -> Any:
    """A step of (row, computed, tokens) whose rows get blocks for all their tokens when they start."""
    counts = [-(-tokens // SHAPE.block_size) + 4 if computed == 0 else 0 for _, computed, tokens in rows]
    return worker_pb2.Step(
        step_id=step_id,
        resync=resync,
        freed_row_i32le=pack(*freed),
        new_rows=list(new),
        row_i32le=pack(*(row for row, _, _ in rows)),
        num_tokens_i32le=pack(*(count for _, _, count in rows)),
        num_computed_i32le=pack(*(computed for _, computed, _ in rows)),
        flags_u8=bytes([flags] * len(rows)),
        block_count_i32le=pack(*counts),
        block_id_i32le=pack(*range(sum(counts))),
    )
