"""Edits of logits on the device, for rows whose ids lie there: what masks, bias and penalties are on the host.

    add      what a row asks ── one upload ──▶ its record in the pool
    apply    a line for each position that is edited, and grammar masks ── one upload ──▶ kernels, in this order:
             ids ▶ masks ▶ ends ▶ counts ▶ penalties; those that no line asks for are not started

The host knows how many ids stand before a position, not which: the kernels read them from the table of ids. Nothing
here waits for the device.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.logits import triton
from kernels.logits.record import Asked, Edit, Line, Logits, mask_words, pack, seen_words
from services.worker.sampling.pool import Pool
from services.worker.step import NewRow

_WIDTH = len(Line._fields)
_OF_RECORD = 128
"""Words of most records beside allowed ids, with what is lost between pieces."""


class DevicePosition(NamedTuple):
    """One position to be sampled. A row with drafts has several in one step, one behind the other."""

    row: int
    length: int  # ids that stand before it, drafts included, all in tokens_RL[row, :length]
    drafts: int = 0  # how many of the last of them are drafts: they may yet turn out wrong
    mask: NDArray[np.uint8] | None = None  # grammar mask, lowest bit first; None allows every token


@dataclass(slots=True)
class _Row:
    record: int  # first word in the pool
    ids: bool = False  # whether it has bias or banned sequences
    allowed: bool = False
    until: int = 0  # end ids wait for this position; 0: it has none
    weighs_from: int | None = None  # the first place that counts for penalties; None: it has none
    seen: int | None = None  # first word in the pool of what was counted
    counted: int = 0  # ids that were


@dataclass(slots=True)
class _Order:
    """The lines of one step, flat, and which kernels they need."""

    lines: array[int]
    masks: list[NDArray[np.uint8]]
    ids: bool = False
    bits: bool = False
    ends: bool = False
    most: int = 0  # new ids of one row
    longest: int = 0  # ids before a position with penalties


class DeviceFeatures:
    """Owns what its rows need; a row that asks for nothing costs nothing.

    A row with penalties takes 4 bytes for each id of the vocabulary while it lives, and a bit for each of its places:
    `reserve` takes them before serving, so that a step asks for no memory.
    """

    def __init__(self, vocab_size: int, device: torch.device, kernels: Logits = triton) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._kernels = kernels
        self._pinned = device.type == "cuda"
        self._pool = Pool(device)
        self._rows: dict[int, _Row] = {}
        self._nothing = _Row(self._upload(pack(Asked(prompt_len=0), vocab_size)))

    @property
    def nbytes(self) -> int:
        """Device memory that is held."""
        return self._pool.nbytes

    def add(self, new: NewRow) -> None:
        """Uploads what the request on this row asks, once. Raises ValueError naming a field with an unknown id."""
        self.free(new.row)
        params = new.sampling
        ends = (*params.eos_ids, *params.stop_ids)
        waits = bool(params.min_tokens and ends)
        weighs = params.repetition_penalty != 1 or bool(params.frequency_penalty or params.presence_penalty)
        ids = bool(params.logit_bias or params.banned_sequences)
        if not (waits or weighs or ids or params.allowed_ids):
            return
        asked = Asked(
            prompt_len=new.prompt_len,
            allowed_ids=params.allowed_ids,
            banned_sequences=params.banned_sequences,
            end_ids=ends if waits else (),
            until=new.prompt_len + params.min_tokens if waits else 0,
            bias=params.logit_bias,
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
        )
        row = _Row(self._upload(pack(asked, self._vocab_size)), ids, bool(params.allowed_ids), asked.until)
        if weighs:
            row.weighs_from = 0 if params.repetition_penalty != 1 else new.prompt_len
        self._rows[new.row] = row

    def free(self, row: int) -> None:
        """Forgets the row. What was started for it before still reads its record: later writes come behind it."""
        gone = self._rows.pop(row, None)
        if gone is not None:
            self._pool.give(gone.record)
            if gone.seen is not None:
                self._pool.give(gone.seen)

    def edits(self, row: int) -> bool:
        """Whether the request on this row asks for anything but a grammar mask."""
        return row in self._rows

    def recount(self, row: int) -> None:
        """The ids of the row are counted anew at its next position: call it where an id that was counted is replaced.

        A position with fewer known ids than were counted does so by itself.
        """
        if row in self._rows:
            self._forget_seen(self._rows[row])

    def reserve(self, rows: int, max_len: int) -> None:
        """Holds memory for as many rows with penalties and allowed ids, of `max_len` ids.

        More, or very large wishes, make it grow later.
        """
        of_row = seen_words(self._vocab_size, max_len) + mask_words(self._vocab_size) + _OF_RECORD
        self._pool.reserve(rows * of_row)

    def apply(self, x_PV: torch.Tensor, positions: Sequence[DevicePosition], tokens_RL: torch.Tensor) -> None:
        """Edits float32 logits in place. `tokens_RL` is the int32 table of ids, on the same device.

        Raises ValueError for logits of another vocabulary, a position outside the table, or a mask of another size.
        """
        if x_PV.shape != (len(positions), self._vocab_size) or x_PV.stride(1) != 1 or x_PV.dtype != torch.float32:
            raise ValueError(
                f"x_PV is {x_PV.dtype} of {tuple(x_PV.shape)}, not float32 of ({len(positions)}, {self._vocab_size})"
            )
        order = self._order(positions, tokens_RL)
        if not order.lines:
            return
        edit = self._edit(order, x_PV, tokens_RL)
        if order.ids:
            self._kernels.edit_ids(edit)
        if order.bits:
            left_EB = self._kernels.forbid(edit)
            if order.ends:
                self._kernels.forbid_ends(edit, left_EB)
        if order.most:
            self._kernels.count(edit, order.most)
        if order.longest:
            self._kernels.penalize(edit, order.longest)

    def _order(self, positions: Sequence[DevicePosition], tokens_RL: torch.Tensor) -> _Order:
        """What the step needs. Gives rows that are new to it room for their counts."""
        rows, max_len = tokens_RL.shape
        size = 4 * mask_words(self._vocab_size)
        edited: list[tuple[int, DevicePosition, _Row]] = []
        for index, position in enumerate(positions):
            row = self._rows.get(position.row)
            if row is None:
                if position.mask is None:
                    continue
                row = self._nothing
            if not (0 <= position.row < rows and 0 <= position.drafts <= position.length <= max_len):
                raise ValueError(f"positions[{index}] is outside the table of {rows} rows of {max_len} ids: {position}")
            if position.mask is not None and len(position.mask) != size:
                raise ValueError(f"positions[{index}].mask has {len(position.mask)} bytes, not {size}")
            edited.append((index, position, row))
        order = _Order(array("q"), [])
        for index, position, row in edited:
            self._add_line(order, index, position, row, max_len)
        return order

    def _add_line(self, order: _Order, index: int, position: DevicePosition, row: _Row, max_len: int) -> None:
        _, length, drafts, mask = position
        known = length - drafts
        waits = length < row.until
        order.ids |= row.ids or (waits and mask is None)
        order.bits |= row.allowed or mask is not None
        order.ends |= waits and mask is not None
        seen, counted = -1, known
        if row.weighs_from is not None:
            seen, counted = self._seen(row, row.weighs_from, known, max_len)
            order.most = max(order.most, known - counted)
            order.longest = max(order.longest, length)
        place = -1 if mask is None else len(order.masks)
        order.lines.extend((index, position.row, length, known, row.record, place, seen, counted))
        if mask is not None:
            order.masks.append(mask)

    def _seen(self, row: _Row, weighs_from: int, known: int, max_len: int) -> tuple[int, int]:
        """Where a row's counts are, and the first place that is new to them."""
        if known < row.counted:
            self._forget_seen(row)
        if row.seen is None:
            words = seen_words(self._vocab_size, max_len)
            row.seen, row.counted = self._pool.take(words), weighs_from
            self._pool.words_N[row.seen : row.seen + words].zero_()
        counted = min(row.counted, known)
        row.counted = max(row.counted, known)
        return row.seen, counted

    def _forget_seen(self, row: _Row) -> None:
        if row.seen is not None:
            self._pool.give(row.seen)
            row.seen, row.counted = None, 0

    def _edit(self, order: _Order, x_PV: torch.Tensor, tokens_RL: torch.Tensor) -> Edit:
        """One upload: the lines, then the masks. Pinned memory is torch's, which waits with it until it was read."""
        words, lines = mask_words(self._vocab_size), len(order.lines)
        size = lines + -(-len(order.masks) * words // 2)
        sent = torch.empty(size, dtype=torch.int64, pin_memory=self._pinned)
        numbers = sent.numpy()
        numbers[:lines] = np.frombuffer(order.lines, np.int64)
        masks_MB = numbers[lines:].view(np.uint8)[: len(order.masks) * words * 4].reshape(-1, words * 4)
        for index, mask in enumerate(order.masks):
            masks_MB[index] = mask
        there = sent.to(self._device, non_blocking=True)
        masks_MW = there[lines:].view(torch.int32)[: len(order.masks) * words].view(-1, words)
        return Edit(x_PV, tokens_RL, self._pool.words_N, there[:lines].view(-1, _WIDTH), masks_MW)

    def _upload(self, record: torch.Tensor) -> int:
        at = self._pool.take(len(record))
        sent = record.pin_memory() if self._pinned else record
        self._pool.words_N[at : at + len(record)].copy_(sent, non_blocking=True)
        return at
