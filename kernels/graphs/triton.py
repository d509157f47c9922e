"""A step's inputs copied to the memory that a graph reads, and padded, in one launch."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.graphs.reference import Columns
from kernels.launch import Launch

_TOKENS = 256
_COLUMNS = 1024
"""Of a program: a table of 128 k tokens in blocks of 16 has 8,192 columns, and each of its rows one program."""
_NUMBERS = (
    "tokens",
    "rows",
    "columns",
    "all_tokens",
    "all_rows",
    "per_row",
    "table_row",
    "to_row",
    "page",
    "token_programs",
)
_GIVEN = ("ids", "positions", "slots", "starts", "contexts", "table")


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_GIVEN)
def _fill(
    ids,
    positions,
    slots,
    starts,
    contexts,
    table,
    to_ids,
    to_positions,
    to_slots,
    to_starts,
    to_contexts,
    to_table,
    tokens,
    rows,
    columns,
    all_tokens,
    all_rows,
    per_row,
    table_row,
    to_row,
    page,
    token_programs,
    BLOCK_T: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    # One program copies BLOCK_T tokens, or all that there is of one row.
    program = tl.program_id(0)
    if program < token_programs:
        at = program * BLOCK_T + tl.arange(0, BLOCK_T)
        real = at < tokens
        inside = at < all_tokens
        tl.store(to_ids + at, tl.load(ids + at, mask=real, other=0), mask=inside)
        tl.store(to_positions + at, tl.load(positions + at, mask=real, other=0), mask=inside)
        tl.store(to_slots + at, tl.load(slots + at, mask=real, other=-1), mask=inside)
    else:
        row = program - token_programs
        real_row = row < rows
        padded = tl.minimum(tokens + (row - rows) * per_row, all_tokens)
        start = tl.where(real_row, tl.load(starts + row, mask=real_row, other=0), padded)
        tl.store(to_starts + row, start)
        context = tl.load(contexts + row, mask=real_row, other=0)
        tl.store(to_contexts + row, context, mask=row < all_rows)
        used = tl.minimum(tl.cdiv(context, page), columns)
        for first in range(0, used, BLOCK_B):
            at_b = first + tl.arange(0, BLOCK_B)
            blocks = tl.load(table + row.to(tl.int64) * table_row + at_b, mask=at_b < used, other=0)
            tl.store(to_table + row.to(tl.int64) * to_row + at_b, blocks, mask=at_b < used)


def plan_fill(given: Columns, to: Columns, per_row: int, block_size: int) -> Launch:
    """The launch. Raises ValueError where what is given is larger than what is written."""
    tokens, all_tokens = len(given.ids_T), len(to.ids_T)
    rows, columns = given.table_RB.shape
    all_rows, all_columns = to.table_RB.shape
    if tokens > all_tokens or rows > all_rows:
        raise ValueError(
            f"a step of {tokens} tokens and {rows} rows does not fit in a graph of {all_tokens} and {all_rows}"
        )
    programs = -(-all_tokens // _TOKENS)
    strides = given.table_RB.stride(0), to.table_RB.stride(0)
    sizes = (tokens, rows, min(columns, all_columns), all_tokens, all_rows, per_row, *strides, block_size)
    blocks = {"BLOCK_T": _TOKENS, "BLOCK_B": _COLUMNS}
    return Launch(_fill, (programs + all_rows + 1,), (*given, *to, *sizes, programs), blocks, warps=4)


def fill(given: Columns, to: Columns, per_row: int, block_size: int) -> None:
    """See reference.fill."""
    plan_fill(given, to, per_row, block_size).run()
