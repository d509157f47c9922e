"""The feature that adds: logit bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from services.worker.sampling.feature import Feature, Position
from services.worker.step import NewRow


@dataclass(slots=True, frozen=True)
class _Bias:
    ids: torch.Tensor
    values: torch.Tensor


class LogitBias(Feature[_Bias]):
    """A number added to the logit of some tokens."""

    def prepare(self, new: NewRow) -> _Bias | None:
        """Ids and numbers; of two for one id the last counts."""
        bias = dict(new.sampling.logit_bias)
        if not bias:
            return None
        ids = torch.tensor(list(bias), dtype=torch.int64, device=self._device)
        return _Bias(ids, torch.tensor(list(bias.values()), dtype=torch.float32, device=self._device))

    def edit(self, logits_V: torch.Tensor, state: _Bias, position: Position) -> None:
        """Adds."""
        del position
        logits_V[state.ids] += state.values
