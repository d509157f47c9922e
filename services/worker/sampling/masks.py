"""What forbids: grammar masks, allowed ids, banned sequences, and end ids until min_tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from services.worker.sampling.feature import Feature, Position
from services.worker.step import NewRow


def forbid(logits_NV: torch.Tensor, positions: Sequence[Position]) -> None:
    """What a position's grammar mask does not allow becomes -inf. A mask comes with its step, not with its row."""
    for index, position in enumerate(positions):
        if position.mask is not None:
            allowed = np.unpackbits(position.mask, count=logits_NV.shape[-1], bitorder="little")
            forbidden = torch.from_numpy(allowed == 0).to(logits_NV.device)
            logits_NV[index].masked_fill_(forbidden, -torch.inf)


class AllowedIds(Feature[torch.Tensor]):
    """Only the ids of a list may be sampled."""

    def prepare(self, new: NewRow) -> torch.Tensor | None:
        """The ids."""
        return self.ids(new.sampling.allowed_ids) if new.sampling.allowed_ids else None

    def edit(self, logits_V: torch.Tensor, state: torch.Tensor, position: Position) -> None:
        """Everything else becomes -inf."""
        del position
        kept = logits_V[state]
        logits_V.fill_(-torch.inf)
        logits_V[state] = kept


class BannedSequences(Feature[tuple[tuple[int, ...], ...]]):
    """Sequences of ids that may not be completed, wherever in prompt or output they began."""

    def prepare(self, new: NewRow) -> tuple[tuple[int, ...], ...] | None:
        """The sequences."""
        return new.sampling.banned_sequences or None

    def edit(self, logits_V: torch.Tensor, state: tuple[tuple[int, ...], ...], position: Position) -> None:
        """The last id of a sequence becomes -inf where the others stand before it."""
        for *before, last in state:
            if not before or position.tokens[-len(before) :].tolist() == before:
                logits_V[last] = -torch.inf


@dataclass(slots=True, frozen=True)
class _EndIds:
    ids: torch.Tensor
    until: int  # position


class MinTokens(Feature[_EndIds]):
    """EOS and stop ids wait until min_tokens output tokens exist."""

    def prepare(self, new: NewRow) -> _EndIds | None:
        """The end ids, and the first position that may hold one."""
        params = new.sampling
        ends = (*params.eos_ids, *params.stop_ids)
        if not params.min_tokens or not ends:
            return None
        return _EndIds(self.ids(ends), new.prompt_len + params.min_tokens)

    def edit(self, logits_V: torch.Tensor, state: _EndIds, position: Position) -> None:
        """End ids become -inf before that position, unless a grammar allows nothing else: then the text has ended."""
        if len(position.tokens) >= state.until:
            return
        kept = logits_V[state.ids]
        logits_V[state.ids] = -torch.inf
        if position.mask is not None and not bool((logits_V > -torch.inf).any()):
            logits_V[state.ids] = kept
