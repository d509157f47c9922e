"""Log probabilities and ranks from the raw float32 logits, before any mask or penalty.

The rank of a token is 1 + the number of tokens with a strictly larger logit, so that equals share one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.ops import Selection
from services.worker.step import Candidate


def candidates(
    logits_NV: torch.Tensor, tokens: Sequence[int], tops: Sequence[int], selection: Selection
) -> list[tuple[Candidate, ...]]:
    """Per row: its token, then as many of the likeliest as `tops` says, likeliest first."""
    if not tokens:
        return []
    ids_N1 = torch.tensor(tokens, dtype=torch.int64, device=logits_NV.device).unsqueeze(-1)
    chosen = logits_NV.gather(-1, ids_N1).flatten().tolist()
    totals, ranks = selection.weigh(logits_NV, tokens)
    lists: list[tuple[Candidate, ...]] = [
        (Candidate(token, logit - total, rank),)
        for token, logit, total, rank in zip(tokens, chosen, totals, ranks, strict=True)
    ]
    most = max(tops)
    if not most:
        return lists
    values_NK, top_ids_NK = selection.top(logits_NV, most)
    values, top_ids = values_NK.tolist(), top_ids_NK.tolist()
    return [
        first + ranked(top_ids[row][:top], values[row], totals[row])
        for row, (first, top) in enumerate(zip(lists, tops, strict=True))
    ]


def ranked(ids: list[int], values: list[float], total: float) -> tuple[Candidate, ...]:
    """The likeliest of a row in order, of which equals share a rank; `total` is the log of the sum of exponentials."""
    entries: list[Candidate] = []
    for place, token in enumerate(ids):
        equal = place > 0 and values[place] == values[place - 1]
        entries.append(Candidate(token, values[place] - total, entries[-1].rank if equal else place + 1))
    return tuple(entries)
