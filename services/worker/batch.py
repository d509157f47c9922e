"""The flat input of one forward pass: rows one after another, no padding.

T tokens of the step   R rows   S positions that give logits   B blocks of the longest row
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kernels.attention.rows import Placed, Rows
from kernels.ops import MediaTensors


@dataclass(slots=True, frozen=True)
class Batch:
    """What the model reads. Row r owns tokens row_starts[r] to row_starts[r + 1] of the flat axis."""

    input_ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64, as the rotary embedding counts: behind media they are not those in the prompt
    slots_T: torch.Tensor  # int64, block * block_size + offset; -1 where KV is not written
    row_starts: tuple[int, ...]  # R + 1 offsets into T
    context_lens: tuple[int, ...]  # per row: tokens in KV once this step is written
    block_table_RB: torch.Tensor  # int32
    logits_at_S: torch.Tensor | None  # int64, flat positions whose hidden states are turned into logits; None: all
    media: MediaTensors | None = None  # what its tokens read of media; None: none does
    placed: Placed | None = None  # row_starts and context_lens where they lie on the device already
    prompts: tuple[int, ...] | None = None  # per row: its new tokens, the first ones, that are of its prompt

    def on(self, device: torch.device) -> Batch:
        """The same on a device; itself where it lies there."""
        if self.input_ids_T.device == device:
            return self
        logits_at_S = None if self.logits_at_S is None else self.logits_at_S.to(device)
        media = None if self.media is None else _media_on(self.media, device)
        return replace(
            self,
            input_ids_T=self.input_ids_T.to(device),
            positions_T=self.positions_T.to(device),
            slots_T=self.slots_T.to(device),
            block_table_RB=self.block_table_RB.to(device),
            logits_at_S=logits_at_S,
            media=media,
        )

    def rows(self, block_size: int) -> Rows:
        """What attention reads of it."""
        return Rows(self.row_starts, self.context_lens, self.block_table_RB, block_size, self.placed, self.prompts)

    def sampled(self, hidden_TD: torch.Tensor) -> torch.Tensor:
        """The hidden states [S, D] of the positions that give logits."""
        return hidden_TD if self.logits_at_S is None else hidden_TD[self.logits_at_S]


def _media_on(media: MediaTensors, device: torch.device) -> MediaTensors:
    return MediaTensors(media.positions_3T.to(device), media.places_M.to(device), media.rows_MPD.to(device))
