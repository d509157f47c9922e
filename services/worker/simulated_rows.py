"""The rows of a simulated worker: a request's ids, KV blocks and media, and whether a step may compute them."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from services.worker.sampling.counter import GOLDEN, mix
from services.worker.script import Entry
from services.worker.step import SAMPLES, MediaItem, NewRow, SamplingParams


@dataclass(slots=True)
class Row:
    """A request on its row. Output token i stands at prompt_len + i."""

    epoch: int
    tokens: list[int]
    prompt_len: int
    arrived_with: int
    params: SamplingParams
    media: tuple[MediaItem, ...]
    entry: Entry
    blocks: list[int]  # held, by KV group
    noise: int  # of its random ids: the part that no position changes
    plain: bool  # whether nothing but the position says which id comes next

    @property
    def outputs(self) -> int:
        """How many output tokens exist."""
        return len(self.tokens) - self.prompt_len

    def meets(self, at: int | None) -> bool:
        """Whether the next output token is number `at`, and the request did not come with that many."""
        return at is not None and self.outputs == at and (at == 0 or self.arrived_with < at)

    def may_sample(self, token: int, mask: NDArray[np.uint8] | None, *, may_end: bool = False) -> bool:
        """Whether the grammar mask, allowed ids, banned sequences and min_tokens let the token stand here.

        With `may_end`, min_tokens is left out: the grammar allows nothing but an end.
        """
        params = self.params
        if mask is not None and not mask[token >> 3] >> (token & 7) & 1:
            return False
        if params.allowed_ids and token not in params.allowed_ids:
            return False
        if not may_end and self.outputs < params.min_tokens and (token in params.eos_ids or token in params.stop_ids):
            return False
        for sequence in params.banned_sequences:
            *before, last = sequence
            if token == last and (not before or self.tokens[-len(before) :] == before):
                return False
        return True


def put(new: NewRow, entry: Entry, kv_groups: int) -> Row:
    """A request as it comes onto its row."""
    tokens = new.tokens.tolist()
    arrived_with = len(tokens) - new.prompt_len
    params = new.sampling
    greedy = params.temperature == 0
    seed = zlib.crc32(repr(tokens[: new.prompt_len]).encode()) if greedy else params.seed
    masks = params.allowed_ids or params.banned_sequences or params.min_tokens
    return Row(
        epoch=new.epoch,
        tokens=tokens,
        prompt_len=new.prompt_len,
        arrived_with=arrived_with,
        params=params,
        media=new.media,
        entry=entry,
        blocks=[0] * kv_groups,
        noise=mix(seed + GOLDEN),
        plain=entry.plain and not masks and params.logprobs is None and not new.media,
    )


@dataclass(slots=True)
class Work:
    """What one row is to compute in a step: the ids at [start, end), drafts last."""

    number: int
    start: int
    end: int
    flags: int
    drafts: list[int] = field(default_factory=list)


def fault(work: Work, row: Row, encoded: set[bytes], block_size: int) -> str | None:
    """Why the row cannot compute that, for the log; None where it can."""
    known = len(row.tokens)
    if work.end - len(work.drafts) > known or (work.flags & SAMPLES and work.end - len(work.drafts) != known):
        return f"tokens up to {work.end} with {len(work.drafts)} drafts do not fit {known} known ids"
    for group, held in enumerate(row.blocks):
        if held * block_size < work.end:
            return f"tokens up to {work.end} do not fit into {held} blocks of KV group {group}"
    for item in row.media:
        read = item.offset < work.end and work.start < item.offset + item.length
        if read and item.hash not in encoded:
            return f"{item.modality} {item.hash.hex()} at position {item.offset} is not encoded on this worker"
    return None
