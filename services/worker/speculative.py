"""Drafts: what a row with drafts asks of the sampler, and which of its tokens count.

    known ids   p p p o            the forward pass computes o and the drafts
    drafts              a b c
    sampled             a b x y    after each of o a b c, by the target's own sampler
    answer              a b x      left to right while the sampled token is the draft, and the one after

Each position is sampled as it would be without drafts, from the ids that stand before it. So drafts change
how many tokens a step gives, and never which.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from services.worker.sampling.feature import Position
from services.worker.sampling.sampler import Sampled
from services.worker.states import Span, States


def positions(states: States, span: Span, masks: NDArray[np.uint8] | None) -> list[Position]:
    """The positions that a span samples: one, and one more per draft; `masks` has a row for each."""
    row, drafts, known = span.row, span.drafts, span.end - span.drafts
    if masks is None:
        return [Position(row, states.tokens(row, known + ahead), ahead) for ahead in range(drafts + 1)]
    return [Position(row, states.tokens(row, known + ahead), ahead, masks[ahead]) for ahead in range(drafts + 1)]


def accept(drafts: Sequence[int], sampled: Sequence[Sampled]) -> list[Sampled]:
    """The results that count; one without a token stands alone or not at all: its turn comes again."""
    for place, draft in enumerate(drafts):
        if sampled[place].token != draft or sampled[place + 1].token is None:
            return list(sampled[: place + 1])
    return list(sampled)
