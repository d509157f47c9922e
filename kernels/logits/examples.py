"""Launches that edit logits, on tensors without memory: to be compiled."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from kernels.launch import Chip, Launch
from kernels.logits import triton as logits
from kernels.logits.record import Edit, mask_words
from kernels.shapes import Shape

_LONGEST = 8192


def examples(shape: Shape, chip: Chip, tokens: int) -> Iterator[tuple[str, Launch]]:
    """One for each kernel: none has blocks that depend on anything but the vocabulary."""
    del chip
    lines, words = torch.empty(tokens, 8, dtype=torch.int64, device="meta"), mask_words(shape.vocabulary)
    ids, pool, masks = (
        torch.empty(size, dtype=torch.int32, device="meta")
        for size in ((256, _LONGEST), (2**20,), (tokens, words))
    )  # fmt: skip
    edit = Edit(torch.empty(tokens, shape.vocabulary, device="meta"), ids, pool, lines, masks)
    yield "logits, ids", logits.plan_edit_ids(edit)
    forbid, left = logits.plan_forbid(edit)
    yield "logits, masks", forbid
    yield "logits, ends", logits.plan_forbid_ends(edit, left)
    yield "logits, count", logits.plan_count(edit, tokens)
    yield "logits, penalties", logits.plan_penalize(edit, _LONGEST)
