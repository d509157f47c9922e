"""The table of requests on the device: the specification.

A request keeps one row of two tables, one of its token ids and one of its KV blocks, and nothing of them comes back to
the host. A step changes and reads them in three moves, whose numbers come up in one copy:

    writes ──stage──▶ tokens_RL, blocks_RB ──gather──▶ flat batch ── forward, sample ──append──▶ tokens_RL

The host knows how many ids a row has and which step wrote each; what a sampled id is, the device alone knows when the
next step reads it.

R rows of the tables   L ids of a row   B blocks of a row   W writes   S spans: what one row computes in a step
T tokens of the step   P positions that were sampled   C spans that sample
"""

from __future__ import annotations

from typing import NamedTuple

import torch

TOKENS, BLOCKS = 0, 1
"""Which table a write is to."""


class Tables(NamedTuple):
    """The tables of all rows."""

    tokens_RL: torch.Tensor  # int32
    blocks_RB: torch.Tensor  # int32
    block_size: int  # tokens


class Chosen(NamedTuple):
    """What was sampled at each position. A pair is a place and a value: the largest logit (see kernels/largest)."""

    tokens_P: torch.Tensor  # int32
    raw_P2: torch.Tensor  # pairs of the logits as they came
    edited_P2: torch.Tensor  # and as masks and other edits left them


class Gathered(NamedTuple):
    """What a forward pass reads of the tables. Each may be larger than the step; what lies behind is not written."""

    ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64, as the rotary embedding counts
    slots_T: torch.Tensor  # int64; -1 where keys and values are not written
    starts_S1: torch.Tensor  # int32: where each span begins on the flat axis; one more for the end
    contexts_S: torch.Tensor  # int32: ids of the row up to the span's end
    table_SB: torch.Tensor  # int32; entries past a context are not written


def stage(writes_W5: torch.Tensor, values_N: torch.Tensor, tables: Tables, longest: int) -> None:
    """Writes new ids, drafts and block numbers. A write is (table, row, where it begins, count, first of its values).

    All are int32. No two writes of a call may meet, and none is longer than `longest`.
    """
    del longest  # what the number of programs follows
    of_kind = {TOKENS: tables.tokens_RL, BLOCKS: tables.blocks_RB}
    for table, row, begin, count, first in writes_W5.tolist():
        of_kind[table][row, begin : begin + count] = values_N[first : first + count]


def gather(
    spans_S6: torch.Tensor,
    tables: Tables,
    out: Gathered,
    longest: int,
) -> None:
    """A span is (row, where it begins, count, its first flat token, first position that may be written, shift).

    All are int32; the flat tokens of a span follow on those of the span before. `shift` is what the rotary embedding
    counts more than the place in the row. No span has more tokens, and no row of one more blocks, than `longest`.
    """
    del longest  # what the number of programs follows
    tokens_RL, blocks_RB, block_size = tables
    for span, (row, begin, count, flat, writable, shift) in enumerate(spans_S6.tolist()):
        at = torch.arange(begin, begin + count, device=tokens_RL.device)
        flat_tokens = slice(flat, flat + count)
        out.ids_T[flat_tokens] = tokens_RL[row, at].long()
        out.positions_T[flat_tokens] = at + shift
        slots = blocks_RB[row, at // block_size].long() * block_size + at % block_size
        out.slots_T[flat_tokens] = torch.where(at < writable, -1, slots)
        out.starts_S1[span : span + 2] = torch.tensor([flat, flat + count], dtype=torch.int32)
        out.contexts_S[span] = begin + count
        blocks = -(-(begin + count) // block_size)
        out.table_SB[span, :blocks] = blocks_RB[row, :blocks]


def append(
    spans_C4: torch.Tensor,
    chosen: Chosen,
    tokens_RL: torch.Tensor,
    counted_C: torch.Tensor,
    drafts: int,
) -> None:
    """Takes the sampled tokens that count into their rows, as far as these have room, and says how many count.

    A span is (row, ids known, drafts, its first position), int32; a row of -1 takes nothing in. Its drafts stand behind
    the known ids already, and it has one position more than drafts:

        known ids   p p o | a b c     drafts a b c
        sampled             a b x y   counted 3: left to right while the sampled token is the draft, and the one after

    A position without a token ends what counts before it: one whose largest logit is not finite, or of whose logits
    the edits left none. No span has more drafts than `drafts`.
    """
    del drafts  # what the width of a program follows
    for span, (row, known, ahead, first) in enumerate(spans_C4.tolist()):
        count = 0
        if row >= 0:
            drafted = tokens_RL[row, known : known + ahead].tolist()
            for place in range(ahead + 1):
                if not _sampled(chosen.raw_P2[first + place, 1], chosen.edited_P2[first + place, 1]):
                    break
                token = int(chosen.tokens_P[first + place])
                if known + place < tokens_RL.shape[1]:
                    tokens_RL[row, known + place] = token
                count += 1
                if place < ahead and token != drafted[place]:
                    break
        counted_C[span] = count


def _sampled(raw: torch.Tensor, edited: torch.Tensor) -> bool:
    return bool(torch.isfinite(raw)) and bool(edited > -torch.inf)
