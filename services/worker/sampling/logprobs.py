"""Log probabilities and ranks from the raw float32 logits, before any mask or penalty.

The rank of a token is 1 + the number of tokens with a strictly larger logit, so that equals share one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.worker.sampling.order import largest
from services.worker.step import Candidate


def candidates(logits_NV: torch.Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[tuple[Candidate, ...]]:
    """Per row: its token, then as many of the likeliest as `tops` says, likeliest first."""
    if not tokens:
        return []
    ids_N1 = torch.tensor(tokens, dtype=torch.int64, device=logits_NV.device).unsqueeze(-1)
    total_N1 = torch.logsumexp(logits_NV, -1, keepdim=True)
    chosen_N1 = logits_NV.gather(-1, ids_N1)
    ranks = ((logits_NV > chosen_N1).sum(-1) + 1).tolist()
    chosen = (chosen_N1 - total_N1).flatten().tolist()
    lists: list[tuple[Candidate, ...]] = [(Candidate(*entry),) for entry in zip(tokens, chosen, ranks, strict=True)]
    most = max(tops)
    if not most:
        return lists
    values_NK, top_ids_NK = largest(logits_NV, most)
    logprobs = (values_NK - total_N1).tolist()
    values, top_ids = values_NK.tolist(), top_ids_NK.tolist()
    return [
        first + _ranked(top_ids[row][:top], logprobs[row], values[row])
        for row, (first, top) in enumerate(zip(lists, tops, strict=True))
    ]


def _ranked(ids: list[int], logprobs: list[float], values: list[float]) -> tuple[Candidate, ...]:
    entries: list[Candidate] = []
    for place, token in enumerate(ids):
        equal = place > 0 and values[place] == values[place - 1]
        entries.append(Candidate(token, logprobs[place], entries[-1].rank if equal else place + 1))
    return tuple(entries)
