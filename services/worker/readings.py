"""What is read off hidden states besides samples: log probabilities of prompts, and pooled vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from services.worker.pooling import Pooler
from services.worker.prompt_logprobs import PromptScores
from services.worker.states import Span, ends
from services.worker.step import PROMPT_LOGPROBS, NewRow, Pooled, PromptLogprobs, RowResult


@dataclass(slots=True)
class Read:
    """Of one step. `results` are those of rows that failed over it or that pooled: they sample nothing."""

    results: dict[int, RowResult] = field(default_factory=dict)
    prompts: list[PromptLogprobs] = field(default_factory=list)
    pooled: list[Pooled] = field(default_factory=list)


def read(
    scores: PromptScores,
    pooler: Pooler,
    request_of: Callable[[int], NewRow | None],
    spans: Sequence[Span],
    hidden_TD: torch.Tensor,
) -> Read:
    """What the spans ask for; waits for it where it is made on a device."""
    found = Read()
    if any(span.flags & PROMPT_LOGPROBS for span in spans):
        for each in scores.of(request_of, spans, hidden_TD):
            if isinstance(each, RowResult):
                found.results[each.row] = each
            else:
                found.prompts.append(each)
    for result, vector in pooler.pool(request_of, spans, ends(spans), hidden_TD):
        found.results[result.row] = result
        found.pooled += [] if vector is None else [vector]
    return found
