"""What is chosen from logits, on a GPU: kernels.ops.Selection.

A draw without cutoffs reads the logits once, with rough noise, and once more those few parts whose best could win, with
exact noise. A draw with cutoffs goes through the likeliest in order until its cutoffs end: torch.topk orders keys that
hold value and place (kernels/largest), of 256 candidates first, then 4,096, then all.

C cuts   P parts of a row   K likeliest candidates
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.largest.triton import bits_of, key_of, pairs, place_of
from kernels.launch import Launch, power_of_two, rows_of
from kernels.ops import Cut
from kernels.selection.noise import bits_of_noise, noise

_BLOCK = 2048
"""Logits of one program: 16 for each thread of four warps, with the registers that 64-bit noise takes."""
_SORTED_BLOCK = 256
"""Candidates that one program looks at together: most cutoffs end within them."""
_HEADS = (256, 4096)
_ROUGH = tl.constexpr(0.125)  # much more than rough noise is off


@triton.jit
def _scaled(x, wholes, parts, cut, at, x_row, width):
    """(x - best) / temperature of some places of a cut's row; -inf behind its end."""
    row = tl.load(wholes + cut * 3)
    best = tl.load(parts + cut * 4).to(tl.float32)
    temperature = tl.load(parts + cut * 4 + 1).to(tl.float32)
    number = tl.load(x + row * x_row + at, mask=at < width, other=float("-inf"))
    return tl.div_rn(number - best, tl.zeros_like(number) + temperature)


@triton.jit
def _order(x, wholes, parts, keys, width, x_row, SCALE: tl.constexpr, BLOCK: tl.constexpr):
    # One program writes the keys of BLOCK numbers of one row, or of one cut's scaled row.
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if SCALE:
        number = _scaled(x, wholes, parts, row, at, x_row, width)
    else:
        number = tl.load(x + row * x_row + at, mask=at < width, other=0.0)
    tl.store(keys + row * width + at, key_of(number, at), mask=at < width)


@triton.jit
def _weigh(x, tokens, peaks, sums, counts, width, x_row, blocks, BLOCK: tl.constexpr):
    # One program takes the largest of BLOCK logits of one row, their mass beside it, and how many are above a token's.
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(x + row * x_row + at, mask=at < width, other=float("-inf"))
    chosen = tl.load(x + row * x_row + tl.load(tokens + row))
    peak = tl.max(number, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    to = row * blocks + tl.program_id(1)
    tl.store(peaks + to, base)
    tl.store(sums + to, tl.sum(tl.exp(number - base), 0))
    tl.store(counts + to, tl.sum((number > chosen).to(tl.int32), 0))


@triton.jit
def _mass(x, wholes, parts, sums, width, x_row, blocks, BLOCK: tl.constexpr):
    # One program sums the float64 exponentials of BLOCK scaled logits of one cut.
    cut = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scaled = _scaled(x, wholes, parts, cut, at, x_row, width)
    tl.store(sums + cut * blocks + tl.program_id(1), tl.sum(tl.exp(scaled.to(tl.float64)), 0))


@triton.jit
def _draw_roughly(x, wholes, parts, peaks, width, x_row, blocks, BLOCK: tl.constexpr):
    # One program finds the largest sum of scaled logit and rough noise in BLOCK logits of one cut.
    cut = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scaled = _scaled(x, wholes, parts, cut, at, x_row, width)
    rough = noise(bits_of_noise(tl.load(wholes + cut * 3 + 1), at), tl.float32)
    tl.store(peaks + cut * blocks + tl.program_id(1), tl.max(scaled + rough, 0))


@triton.jit
def _draw_exactly(x, wholes, parts, peaks, tokens, width, x_row, blocks, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr):
    # One program draws one cut's token: it looks again where the best could be, at few blocks of many.
    cut = tl.program_id(0).to(tl.int64)
    key = tl.load(wholes + cut * 3 + 1)
    at_p = tl.arange(0, BLOCK_P)
    all_peaks = tl.load(peaks + cut * blocks + at_p, mask=at_p < blocks, other=float("-inf"))
    least = tl.max(all_peaks, 0) - _ROUGH
    best = tl.full((), float("-inf"), tl.float64)
    token = tl.full((), 0x7FFFFFFF, tl.int32)
    for block in range(blocks):
        if tl.load(peaks + cut * blocks + block) >= least:
            at = block * BLOCK + tl.arange(0, BLOCK)
            scaled = _scaled(x, wholes, parts, cut, at, x_row, width).to(tl.float64)
            total = scaled + noise(bits_of_noise(key, at), tl.float64)
            most = tl.max(total, 0)
            first = tl.min(tl.where(total == most, at, 0x7FFFFFFF), 0)
            token = tl.where(most > best, first, token)  # of equals the first: blocks come in order
            best = tl.maximum(best, most)
    tl.store(tokens + cut, token)


@triton.jit
def _draw_sorted(keys, wholes, parts, masses, tokens, count, vocabulary, BLOCK: tl.constexpr):
    # One program draws one cut's token from its `count` likeliest in order, or writes -1 where more must be seen.
    cut = tl.program_id(0).to(tl.int64)
    key = tl.load(wholes + cut * 3 + 1)
    top_k = tl.load(wholes + cut * 3 + 2)
    top_p = tl.load(parts + cut * 4 + 2)
    low = tl.load(parts + cut * 4 + 3)
    mass = tl.load(masses + cut)
    bounded = (top_k < vocabulary) | (low > float("-inf"))

    most = 0
    whole = tl.full((), 0.0, tl.float64)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        known = tl.load(keys + cut * count + at, mask=at < count, other=-0x7FFFFFFFFFFFFFFF)
        value = bits_of(known).to(tl.float32, bitcast=True).to(tl.float64)
        keep = (at < count) & (at < top_k) & (value >= low)
        most += tl.sum(keep.to(tl.int32), 0)
        whole += tl.sum(tl.where(keep, tl.exp(tl.minimum(value, 0.0)), 0.0), 0)
    complete = (most < count) | (top_k <= count) | (count == vocabulary)
    limit = tl.where(top_p >= 1.0, float("inf"), top_p * tl.where(bounded, whole, mass))

    before = tl.full((), 0.0, tl.float64)
    kept = 0
    best = tl.full((), float("-inf"), tl.float64)
    token = tl.full((), 0x7FFFFFFF, tl.int32)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        known = tl.load(keys + cut * count + at, mask=at < count, other=-0x7FFFFFFFFFFFFFFF)
        value = bits_of(known).to(tl.float32, bitcast=True).to(tl.float64)
        keep = (at < count) & (at < top_k) & (value >= low)
        weight = tl.where(keep, tl.exp(tl.minimum(value, 0.0)), 0.0)
        sums = before + tl.cumsum(weight, 0)
        headed = (keep & (sums - weight < limit)) | (at == 0)
        kept += tl.sum(headed.to(tl.int32), 0)
        before += tl.sum(weight, 0)
        ids = place_of(known)
        total = tl.where(headed, value + noise(bits_of_noise(key, ids), tl.float64), float("-inf"))
        high = tl.max(total, 0)
        first = tl.min(tl.where(headed & (total == high), ids, 0x7FFFFFFF), 0)
        token = tl.where(high > best, first, tl.where(high == best, tl.minimum(first, token), token))
        best = tl.maximum(best, high)
    # The mass of all tokens is known from the start where no other cutoff comes before top_p.
    free = (top_k >= vocabulary) & (low == float("-inf"))
    settled = complete | ((top_p < 1.0) & free & (kept < count))
    tl.store(tokens + cut, tl.where(settled, token, -1))


class Columns(NamedTuple):
    """Cuts as the kernels read them."""

    wholes_C3: torch.Tensor  # int64: row, key, top_k
    parts_C4: torch.Tensor  # float64: best, temperature, top_p, log of min_p


def columns(cuts: Sequence[Cut], vocabulary: int, device: torch.device) -> Columns:
    """Two copies to the device."""
    wholes = [(cut.row, cut.key, cut.top_k or vocabulary) for cut in cuts]
    parts = [
        (cut.best, cut.temperature, cut.top_p, math.log(cut.min_p) if cut.min_p > 0 else -math.inf) for cut in cuts
    ]
    return Columns(
        torch.tensor(wholes, dtype=torch.int64).to(device, non_blocking=True),
        torch.tensor(parts, dtype=torch.float64).to(device, non_blocking=True),
    )


def plan_order(x_NV: torch.Tensor, cuts: Columns | None) -> tuple[Launch, torch.Tensor]:
    """The launch, and keys of all rows, or of the scaled rows of cuts: int64."""
    width = x_NV.shape[1]
    count = len(x_NV) if cuts is None else len(cuts.wholes_C3)
    keys = torch.empty(count, width, dtype=torch.int64, device=x_NV.device)
    given = (x_NV, *(cuts or (None, None)), keys, width, x_NV.stride(0))
    return Launch(_order, (count, -(-width // _BLOCK)), given, {"SCALE": cuts is not None, "BLOCK": _BLOCK}), keys


def plan_weigh(x_NV: torch.Tensor, tokens_N: torch.Tensor) -> tuple[Launch, tuple[torch.Tensor, ...]]:
    """The launch; of each part its largest, the mass beside it, and how many are above the token's."""
    count, width = x_NV.shape
    blocks = -(-width // _BLOCK)
    out = tuple(
        torch.empty(count, blocks, dtype=dtype, device=x_NV.device)
        for dtype in (torch.float32, torch.float32, torch.int32)
    )
    given = (x_NV, tokens_N, *out, width, x_NV.stride(0), blocks)
    return Launch(_weigh, (count, blocks), given, {"BLOCK": _BLOCK}), out


def plan_mass(x_NV: torch.Tensor, cuts: Columns) -> tuple[Launch, torch.Tensor]:
    """The launch, and the mass of each part: float64."""
    count, width = len(cuts.wholes_C3), x_NV.shape[1]
    blocks = -(-width // _BLOCK)
    sums_CP = torch.empty(count, blocks, dtype=torch.float64, device=x_NV.device)
    given = (x_NV, *cuts, sums_CP, width, x_NV.stride(0), blocks)
    return Launch(_mass, (count, blocks), given, {"BLOCK": _BLOCK}), sums_CP


def plan_draw(x_NV: torch.Tensor, cuts: Columns) -> tuple[Launch, Launch, torch.Tensor]:
    """The launches of a draw without cutoffs, and the tokens."""
    count, width = len(cuts.wholes_C3), x_NV.shape[1]
    blocks = -(-width // _BLOCK)
    peaks_CP = torch.empty(count, blocks, dtype=torch.float32, device=x_NV.device)
    tokens_C = torch.empty(count, dtype=torch.int32, device=x_NV.device)
    sizes = (width, x_NV.stride(0), blocks)
    rough = Launch(_draw_roughly, (count, blocks), (x_NV, *cuts, peaks_CP, *sizes), {"BLOCK": _BLOCK})
    constants = {"BLOCK": _BLOCK, "BLOCK_P": power_of_two(blocks)}
    exact = Launch(_draw_exactly, (count,), (x_NV, *cuts, peaks_CP, tokens_C, *sizes), constants, warps=8)
    return rough, exact, tokens_C


def plan_draw_sorted(
    keys_CK: torch.Tensor, cuts: Columns, mass_C: torch.Tensor, vocabulary: int
) -> tuple[Launch, torch.Tensor]:
    """The launch, and the tokens; -1 where K candidates do not settle it."""
    count, width = keys_CK.shape
    tokens_C = torch.empty(count, dtype=torch.int32, device=keys_CK.device)
    given = (keys_CK, *cuts, mass_C, tokens_C, width, vocabulary)
    return Launch(_draw_sorted, (count,), given, {"BLOCK": _SORTED_BLOCK}, warps=2), tokens_C


class Selection:
    """See kernels.ops.Selection. Logits are float32."""

    def largest(self, x_NV: torch.Tensor) -> tuple[list[int], list[float]]:
        """The first of the largest of each row, and its value."""
        found_N2 = pairs(x_NV).cpu()
        return found_N2.view(torch.int32)[:, 0].tolist(), found_N2[:, 1].tolist()

    def top(self, x_NV: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and ids of the `count` first of each row."""
        launch, keys_NV = plan_order(rows_of(x_NV), None)
        launch.run()
        ids_NK = 0x7FFFFFFF - (torch.topk(keys_NV, min(count, x_NV.shape[1])).values & 0x7FFFFFFF)
        return x_NV.gather(-1, ids_NK), ids_NK

    def weigh(self, x_NV: torch.Tensor, tokens: Sequence[int]) -> tuple[list[float], list[int]]:
        """Each row's log of the sum of exponentials, and its token's rank."""
        tokens_N = torch.tensor(tokens, dtype=torch.int64).to(x_NV.device, non_blocking=True)
        launch, (peaks_NP, sums_NP, counts_NP) = plan_weigh(rows_of(x_NV), tokens_N)
        launch.run()
        totals_N = torch.logsumexp(peaks_NP + sums_NP.log(), -1)
        return totals_N.tolist(), (counts_NP.sum(-1) + 1).tolist()

    def draw(self, x_NV: torch.Tensor, cuts: Sequence[Cut]) -> list[int]:
        """One token for each cut."""
        x_NV = rows_of(x_NV)
        tokens = [0] * len(cuts)
        for among, wanted in ((self._among_sorted, True), (self._among_all, False)):
            some = [index for index, cut in enumerate(cuts) if cut.cuts is wanted]
            if some:
                for index, token in zip(some, among(x_NV, [cuts[index] for index in some]), strict=True):
                    tokens[index] = token
        return tokens

    def _among_all(self, x_NV: torch.Tensor, cuts: Sequence[Cut]) -> list[int]:
        rough, exact, tokens_C = plan_draw(x_NV, columns(cuts, x_NV.shape[1], x_NV.device))
        rough.run()
        exact.run()
        found: list[int] = tokens_C.tolist()
        return found

    def _among_sorted(self, x_NV: torch.Tensor, cuts: Sequence[Cut]) -> list[int]:
        vocabulary = x_NV.shape[1]
        tokens = [-1] * len(cuts)
        for head in self._heads(cuts, vocabulary):
            left = [index for index, token in enumerate(tokens) if token < 0]
            if not left:
                break
            of_cuts = columns([cuts[index] for index in left], vocabulary, x_NV.device)
            order, keys_CV = plan_order(x_NV, of_cuts)
            order.run()
            mass, sums_CP = plan_mass(x_NV, of_cuts)
            mass.run()
            head_keys_CK = torch.topk(keys_CV, head).values
            sorted_draw, tokens_C = plan_draw_sorted(head_keys_CK, of_cuts, sums_CP.sum(-1), vocabulary)
            sorted_draw.run()
            for index, token in zip(left, tokens_C.tolist(), strict=True):
                tokens[index] = token
        return tokens

    def _heads(self, cuts: Sequence[Cut], vocabulary: int) -> list[int]:
        """How many of the likeliest are looked at, round by round."""
        if all(0 < cut.top_k <= min(_HEADS[0], vocabulary) for cut in cuts):
            return [max(cut.top_k for cut in cuts)]
        return [*(head for head in _HEADS if head < vocabulary), vocabulary]
