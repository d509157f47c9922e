"""The feature that discourages: repetition, frequency and presence penalties.

repetition   of a token in prompt or output: a positive logit is divided, a negative one multiplied
frequency    subtracted once per occurrence in the output
presence     subtracted if the token occurs in the output
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.sampling.feature import Feature, Position
from services.worker.step import Int32, NewRow


@dataclass(slots=True)
class _Seen:
    """The tokens of a row that weigh, counted as far as `counted`."""

    repetition: float
    frequency: float
    presence: float
    prompt_len: int
    counts: Int32  # occurrences in the output, by token id
    known: NDArray[np.bool_]  # by token id
    ids: NDArray[np.int64]  # of the known tokens
    counted: int

    def count(self, tokens: Int32) -> None:
        """Counts what is new. Tokens are only ever added, so that a step counts one."""
        fresh = tokens[self.counted :]
        np.add.at(self.counts, tokens[max(self.counted, self.prompt_len) :], 1)
        self.counted = len(tokens)
        unknown = np.unique(fresh[~self.known[fresh]])
        if len(unknown):
            self.known[unknown] = True
            self.ids = np.concatenate((self.ids, unknown.astype(np.int64)))

    def weigh(self, position: Position) -> tuple[NDArray[np.int64], Int32]:
        """The ids that weigh at a position and how often each stands in the output. Drafts weigh, and are not kept."""
        known = len(position.tokens) - position.drafts
        self.count(position.tokens[:known])
        if not position.drafts:
            return self.ids, self.counts[self.ids]
        drafts = position.tokens[known:]
        unknown = np.unique(drafts[~self.known[drafts]]).astype(np.int64)
        ids = np.concatenate((self.ids, unknown))
        return ids, self.counts[ids] + (ids[:, None] == drafts).sum(-1, dtype=np.int32)


class Penalties(Feature[_Seen]):
    """All three, because they look at the same tokens."""

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        super().__init__(device)
        self._vocab_size = vocab_size

    def prepare(self, new: NewRow) -> _Seen | None:
        """Empty counts; the prompt weighs for the repetition penalty only."""
        params = new.sampling
        if params.repetition_penalty == 1 and not params.frequency_penalty and not params.presence_penalty:
            return None
        return _Seen(
            repetition=params.repetition_penalty,
            frequency=params.frequency_penalty,
            presence=params.presence_penalty,
            prompt_len=new.prompt_len,
            counts=np.zeros(self._vocab_size, np.int32),
            known=np.zeros(self._vocab_size, np.bool_),
            ids=np.zeros(0, np.int64),
            counted=0 if params.repetition_penalty != 1 else new.prompt_len,
        )

    def edit(self, logits_V: torch.Tensor, state: _Seen, position: Position) -> None:
        """Counts, then lowers the logits of what was seen."""
        seen, occurrences = state.weigh(position)
        ids = torch.from_numpy(seen).to(self._device)
        counts = torch.from_numpy(occurrences).to(self._device, torch.float32)
        logits = logits_V[ids]
        if state.repetition != 1:
            logits = torch.where(logits > 0, logits / state.repetition, logits * state.repetition)
        logits_V[ids] = logits - state.frequency * counts - state.presence * (counts > 0)
