"""What is chosen from logits, on a GPU: kernels.ops.Selection, and below it what waits for nothing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from kernels.largest.triton import pairs
from kernels.launch import rows_of
from kernels.ops import Cut
from kernels.selection.draws import Draws
from kernels.selection.ranks import top, weigh
from kernels.selection.sampling import sample

__all__ = ["Draws", "Selection", "sample", "top", "weigh"]


def _uploaded(numbers: Sequence[Any], kind: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(numbers, dtype=kind).to(device, non_blocking=True)


class Selection:
    """See kernels.ops.Selection. Logits are float32."""

    def largest(self, x_NV: torch.Tensor) -> tuple[list[int], list[float]]:
        """The first of the largest of each row, and its value."""
        found_N2 = pairs(x_NV).cpu()
        return found_N2.view(torch.int32)[:, 0].tolist(), found_N2[:, 1].tolist()

    def top(self, x_NV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and ids of the `count` first of each row."""
        return top(x_NV, count)

    def weigh(self, x_NV: torch.Tensor, tokens: Sequence[int]) -> tuple[list[float], list[int]]:
        """Each row's log of the sum of exponentials, and its token's rank."""
        totals_N, ranks_N = weigh(x_NV, _uploaded(tokens, torch.int32, x_NV.device))
        return totals_N.tolist(), ranks_N.tolist()

    def draw(self, x_NV: torch.Tensor, cuts: Sequence[Cut]) -> list[int]:
        """One token for each cut, which are of different rows."""
        x_NV = rows_of(x_NV)
        rows, vocabulary = x_NV.shape
        wholes = [(0, 0, vocabulary)] * rows
        parts = [(1.0, 1.0, -math.inf)] * rows
        best = [0.0] * rows
        for cut in cuts:
            wholes[cut.row] = (1, cut.key, cut.top_k or vocabulary)
            parts[cut.row] = (cut.temperature, cut.top_p, math.log(cut.min_p) if cut.min_p > 0 else -math.inf)
            best[cut.row] = cut.best
        draws = Draws(_uploaded(wholes, torch.int64, x_NV.device), _uploaded(parts, torch.float64, x_NV.device))
        best_N = _uploaded(best, torch.float32, x_NV.device)
        pairs_N2 = torch.stack((torch.zeros_like(best_N), best_N), 1)
        tokens = sample(x_NV, pairs_N2, draws, any(cut.cuts for cut in cuts)).tolist()
        return [tokens[cut.row] for cut in cuts]
