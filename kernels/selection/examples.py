"""Launches of the kernels that choose tokens: see kernels/examples.py."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.launch import Chip, Launch
from kernels.selection import ranks, sampling
from kernels.selection.draws import Draws
from kernels.shapes import Shape


def examples(shape: Shape, chip: Chip, tokens: int) -> Iterator[tuple[str, Launch]]:
    """Each launch and what it is; logits are float32 whatever the model's type."""
    x_PV = torch.empty(tokens, shape.vocabulary, device="meta")
    pairs_P2 = torch.empty(tokens, 2, device="meta")
    draws = Draws(
        torch.empty(tokens, 3, dtype=torch.int64, device="meta"),
        torch.empty(tokens, 3, dtype=torch.float64, device="meta"),
    )
    del chip  # the same blocks for all
    (survey, draw), tokens_P = sampling.plan_sample(x_PV, pairs_P2, draws, cuts=False)
    yield "sample, survey", survey
    yield "sample, draw", draw
    (survey, _, kept, flat), _ = sampling.plan_sample(x_PV, pairs_P2, draws, cuts=True)
    yield "sample, survey of cuts", survey
    yield "sample, kept", kept
    yield "sample, flat", flat
    weighed, total, _ = ranks.plan_weigh(x_PV, tokens_P)
    yield "weigh, parts", weighed
    yield "weigh, row", total
    parts, take, _ = ranks.plan_top(x_PV, 20)
    yield "top, parts", parts
    yield "top, row", take
