"""Edits of logits in plain torch, one position after the other: see record.Logits. It waits for the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import torch

from kernels.logits.record import Edit, Line, Word


def edit_ids(edit: Edit) -> None:
    """Bias, banned sequences, and end ids of positions without a grammar mask."""
    for line, header in _lines(edit):
        x_V = edit.x_PV[line.position]
        bias = line.record + header[Word.BIAS]
        ids, numbers = edit.pool_N[bias:][: 2 * header[Word.BIASES]].view(2, header[Word.BIASES])
        x_V[ids] += numbers.view(torch.float32)
        tokens = edit.tokens_RL[line.row, : line.length].tolist()
        for *before, last in _sequences(edit, line, header):
            if not before or tokens[-len(before) :] == before:
                x_V[last] = -math.inf
        if line.mask < 0 and line.length < header[Word.UNTIL]:
            x_V[_ends(edit, line, header)] = -math.inf


def forbid(edit: Edit) -> torch.Tensor:
    """Grammar masks and allowed ids. Returns [E, 1]."""
    left_E1 = torch.empty(len(edit.lines_E8), 1, dtype=torch.float32, device=edit.x_PV.device)
    for index, (line, header) in enumerate(_lines(edit)):
        x_V = edit.x_PV[line.position]
        if line.mask >= 0:
            x_V[~_unpacked(edit.masks_MW[line.mask])[: len(x_V)]] = -math.inf
        if header[Word.ALLOWED]:
            words = edit.pool_N[line.record + header[Word.ALLOWED] :][: edit.masks_MW.shape[1]]
            x_V[~_unpacked(words)[: len(x_V)]] = -math.inf
        if line.mask >= 0 and line.length < header[Word.UNTIL]:
            others_V = x_V.clone()
            others_V[_ends(edit, line, header)] = -math.inf
            left_E1[index] = others_V.max()
    return left_E1


def forbid_ends(edit: Edit, left_EB: torch.Tensor) -> None:
    """End ids of positions with a grammar mask."""
    for (line, header), left_B in zip(_lines(edit), left_EB, strict=True):
        if line.mask >= 0 and line.length < header[Word.UNTIL] and bool((left_B > -math.inf).any()):
            edit.x_PV[line.position, _ends(edit, line, header)] = -math.inf


def count(edit: Edit, most: int) -> None:
    """New ids, one after the other."""
    del most
    for line, header in _lines(edit):
        if line.seen < 0:
            continue
        counts_V, places = _seen(edit, line)
        for place in range(line.counted, line.known):
            token = int(edit.tokens_RL[line.row, place])
            if not 0 <= token < len(counts_V):
                continue
            if counts_V[token] == 0:
                bit = place % 32
                places[place // 32] |= 1 << bit if bit < 31 else -(2**31)
            if place < header[Word.PROMPT]:
                counts_V[token] |= 1
            else:
                counts_V[token] += 2


def penalize(edit: Edit, longest: int) -> None:
    """What was counted, and drafts, which are not kept."""
    del longest
    for line, _ in _lines(edit):
        if line.seen < 0:
            continue
        counts_V, _ = _seen(edit, line)
        drafts = edit.tokens_RL[line.row, line.known : line.length].long()
        drafts = drafts[(drafts >= 0) & (drafts < len(counts_V))]
        times_V = (counts_V >> 1) + torch.bincount(drafts, minlength=len(counts_V))
        known_V = (counts_V != 0) | (times_V > 0)
        repetition, frequency, presence = edit.pool_N[line.record + Word.REPETITION :][:3].view(torch.float32)
        x = edit.x_PV[line.position, known_V]
        if repetition != 1:
            x = torch.where(x > 0, x / repetition, x * repetition)
        times = times_V[known_V].float()
        edit.x_PV[line.position, known_V] = x - frequency * times - presence * (times > 0)


def _lines(edit: Edit) -> Iterator[tuple[Line, list[int]]]:
    for values in edit.lines_E8.tolist():
        line = Line(*values)
        yield line, edit.pool_N[line.record :][: Word.SIZE].tolist()


def _sequences(edit: Edit, line: Line, header: list[int]) -> list[list[int]]:
    starts_at, count = line.record + header[Word.BANNED], header[Word.SEQUENCES]
    if not count:
        return []
    starts = edit.pool_N[starts_at:][: count + 1].tolist()
    ids = edit.pool_N[starts_at + count + 1 :][: starts[-1]].tolist()
    return [ids[begin:end] for begin, end in pairwise(starts)]


def _ends(edit: Edit, line: Line, header: list[int]) -> torch.Tensor:
    return edit.pool_N[line.record + header[Word.ENDS] :][: header[Word.END_IDS]].long()


def _seen(edit: Edit, line: Line) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each id occurs, and the bits of first places: views of the pool."""
    vocabulary = edit.x_PV.shape[1]
    seen = edit.pool_N[line.seen :]
    return seen[:vocabulary], seen[vocabulary:]


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """Bits as bools, lowest first."""
    return ((words[:, None] >> torch.arange(32, device=words.device)) & 1).flatten().bool()
