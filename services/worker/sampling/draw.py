"""Temperature, min-p, top-k, top-p and Gumbel-max for many rows at once.

    scaled = (logits - best) / temperature                              the best is 0
    survivors: exp(scaled) >= min_p, then the first top_k, then the smallest head with top_p of their mass
    token = argmax of scaled + noise(seed, position, id) over the survivors

A row with cutoffs is decided among its likeliest few; where those do not settle it, among more, and
only then among all. A row without cutoffs looks at all tokens with rough noise, and at the best with exact noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from kernels.largest import reference as largest_reference
from kernels.ops import Cut
from services.worker.sampling.noise import counters, gumbel, nearly
from services.worker.sampling.order import largest

_HEADS = (256, 4096)  # likeliest tokens that are looked at first, and then
_ROUGH = 0.125  # more than twice what rough noise may be off
_AT_ONCE = 1 << 19  # logits of rows that are not settled at once, and are looked at again: some 60 bytes each
_TILE = 1 << 17  # elements of rough noise at once: few enough to stay in the cache


class Drawing:
    """What is chosen from logits, in torch (kernels.ops.Selection). Holds nothing but tables."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._counters_V = counters(torch.arange(vocab_size, device=device))

    def largest(self, x_NV: torch.Tensor) -> tuple[list[int], list[float]]:
        """The first of the largest of each row, and its value."""
        return largest_reference.largest(x_NV)

    def top(self, x_NV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and ids of the `count` first of each row."""
        return largest(x_NV, count)

    def weigh(self, x_NV: torch.Tensor, tokens: Sequence[int]) -> tuple[list[float], list[int]]:
        """Each row's log of the sum of exponentials, and its token's rank."""
        chosen_N1 = x_NV.gather(-1, torch.tensor(tokens, dtype=torch.int64, device=self._device).unsqueeze(-1))
        return torch.logsumexp(x_NV, -1).tolist(), ((x_NV > chosen_N1).sum(-1) + 1).tolist()

    def draw(self, x_NV: torch.Tensor, cuts: Sequence[Cut]) -> list[int]:
        """One token for each cut."""
        rows_NV = x_NV[[cut.row for cut in cuts]]
        best_N1 = self._column([cut.best for cut in cuts], x_NV.dtype)
        scaled_NV = rows_NV.sub_(best_N1).div_(self._column([cut.temperature for cut in cuts], x_NV.dtype))
        tokens = [0] * len(cuts)
        for among, wanted in ((self._among_head, True), (self._among_all, False)):
            some = [index for index, cut in enumerate(cuts) if cut.cuts is wanted]
            if some:
                rows_NV = scaled_NV if len(some) == len(cuts) else scaled_NV[some]
                for index, token in zip(some, among(rows_NV, [cuts[i] for i in some]), strict=True):
                    tokens[index] = token
        return tokens

    def _column(self, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self._device).unsqueeze(-1)

    def _among_all(self, scaled_NV: torch.Tensor, cuts: Sequence[Cut]) -> list[int]:
        keys_N1 = self._keys(cuts)
        tokens: list[int] = []
        tile = max(1, _TILE // self._vocab_size)
        for first in range(0, len(cuts), tile):
            rows_NV, keys_T1 = scaled_NV[first : first + tile], keys_N1[first : first + tile]
            total_NV = rows_NV + nearly(keys_T1, self._counters_V)
            near_NV = total_NV >= total_NV.amax(-1, keepdim=True) - _ROUGH
            rows, ids = near_NV.nonzero().unbind(-1)
            totals = rows_NV[rows, ids].double() + gumbel(keys_T1[rows, 0], ids)
            best: dict[int, tuple[float, int]] = {}
            for row, total, token in zip(rows.tolist(), totals.tolist(), ids.tolist(), strict=True):
                best[row] = max(best.get(row, (-math.inf, 0)), (total, -token))
            tokens += [-best[row][1] for row in range(len(rows_NV))]
        return tokens

    def _among_head(self, scaled_NV: torch.Tensor, cuts: Sequence[Cut]) -> list[int]:
        tokens = [0] * len(cuts)
        mass_N1 = self._mass(scaled_NV, cuts)
        left = list(range(len(cuts)))
        most = len(left)
        for head in self._heads(cuts):
            unsettled: list[int] = []
            for first in range(0, len(left), most):
                part = left[first : first + most]
                some = [cuts[index] for index in part]
                rows_NV, mass_L1 = (scaled_NV, mass_N1) if len(part) == len(cuts) else (scaled_NV[part], mass_N1[part])
                values_NK, ids_NK = largest(rows_NV, head)
                kept_N, settled_N = self._survivors(values_NK, mass_L1, some)
                width = int(kept_N.max())
                drawn = self._best(self._first(values_NK, kept_N, width), ids_NK[:, :width], some)
                for index, token, done in zip(part, drawn, settled_N.tolist(), strict=True):
                    tokens[index] = token  # of a row that is not settled, until the next round
                    if not done:
                        unsettled.append(index)
            left, most = unsettled, max(1, _AT_ONCE // self._vocab_size)
            if not left:
                break
        return tokens

    def _heads(self, cuts: Sequence[Cut]) -> list[int]:
        """How many of the likeliest are looked at, round by round."""
        if all(0 < cut.top_k <= _HEADS[0] for cut in cuts):
            return [max(cut.top_k for cut in cuts)]
        return [*(head for head in _HEADS if head < self._vocab_size), self._vocab_size]

    def _mass(self, scaled_NV: torch.Tensor, cuts: Sequence[Cut]) -> torch.Tensor:
        """What top_p is a part of where no other cutoff comes before it: the mass of all tokens."""
        mass = [0.0] * len(cuts)
        for index, cut in enumerate(cuts):
            if cut.top_p < 1 and cut.min_p == 0 and cut.top_k == 0:
                mass[index] = float(scaled_NV[index].double().exp_().sum())
        return self._column(mass, torch.float64)

    def _survivors(
        self, values_NK: torch.Tensor, mass_N1: torch.Tensor, cuts: Sequence[Cut]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """How many of the K likeliest survive, and whether that is settled by looking at K alone."""
        width, vocab = values_NK.shape[-1], self._vocab_size
        values = values_NK.double()
        top_k = torch.tensor([cut.top_k or vocab for cut in cuts], device=self._device).unsqueeze(-1)
        top_p = self._column([cut.top_p for cut in cuts], torch.float64)
        low = torch.log(self._column([cut.min_p for cut in cuts], torch.float64))
        keep = (values >= low) & (torch.arange(width, device=self._device) < top_k)
        count = keep.sum(-1, keepdim=True)
        complete = (count < width) | (top_k <= width)
        if width == vocab:
            complete = torch.ones_like(complete)
        weights = values.exp() * keep
        sums = weights.cumsum(-1)
        whole = torch.where(complete & ((top_k < vocab) | (low > -torch.inf)), sums[:, -1:], mass_N1)
        headed = keep & ((sums - weights < top_p * whole) | (top_p >= 1))
        headed[:, 0] = True
        kept = headed.sum(-1, keepdim=True)
        settled = complete | ((top_p < 1) & (mass_N1 > 0) & (kept < width))
        return kept.squeeze(-1), settled.squeeze(-1)

    def _first(self, values_NK: torch.Tensor, kept_N: torch.Tensor, width: int) -> torch.Tensor:
        """The `width` first values, those behind the survivors of each row at -inf."""
        places = torch.arange(width, device=self._device)
        return values_NK[:, :width].masked_fill(places >= kept_N.unsqueeze(-1), -torch.inf)

    def _best(self, values_NK: torch.Tensor, ids_NK: torch.Tensor, cuts: Sequence[Cut]) -> list[int]:
        """Gumbel-max: the candidate whose value plus noise is the largest; the lowest id among equals."""
        totals = values_NK.double() + gumbel(self._keys(cuts), ids_NK)
        ids = ids_NK.masked_fill(totals < totals.max(-1, keepdim=True).values, self._vocab_size)
        tokens: list[int] = ids.min(-1).values.tolist()
        return tokens

    def _keys(self, cuts: Sequence[Cut]) -> torch.Tensor:
        return torch.tensor([cut.key for cut in cuts], dtype=torch.int64, device=self._device).unsqueeze(-1)
