"""Features that forbid: allowed ids, banned sequences, and end ids until min_tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.worker.sampling.feature import Feature
from services.worker.step import Int32, NewRow


class AllowedIds(Feature[torch.Tensor]):
    """Only the ids of a list may be sampled."""

    def prepare(self, new: NewRow) -> torch.Tensor | None:
        """The ids."""
        return self.ids(new.sampling.allowed_ids) if new.sampling.allowed_ids else None

    def edit(self, logits_V: torch.Tensor, state: torch.Tensor, tokens: Int32) -> None:
        """Everything else becomes -inf."""
        del tokens
        kept = logits_V[state]
        logits_V.fill_(-torch.inf)
        logits_V[state] = kept


class BannedSequences(Feature[tuple[tuple[int, ...], ...]]):
    """Sequences of ids that may not be completed, wherever in prompt or output they began."""

    def prepare(self, new: NewRow) -> tuple[tuple[int, ...], ...] | None:
        """The sequences."""
        return new.sampling.banned_sequences or None

    def edit(self, logits_V: torch.Tensor, state: tuple[tuple[int, ...], ...], tokens: Int32) -> None:
        """The last id of a sequence becomes -inf where the others stand before it."""
        for *before, last in state:
            if not before or tokens[-len(before) :].tolist() == before:
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

    def edit(self, logits_V: torch.Tensor, state: _EndIds, tokens: Int32) -> None:
        """End ids become -inf before that position."""
        if len(tokens) < state.until:
            logits_V[state.ids] = -torch.inf
