"""Draws with cutoffs, without ordering the vocabulary: what is kept of a row, and its token.

All cutoffs keep the head of one strict order, which is that of keys: larger scaled logits first, then lower ids.

    min_p   value >= log of min_p
    top_k   the first top_k
    top_p   of those the tokens with less than top_p of the mass before them; the mass is that of all where no other
            cutoff is given, else that of what the others keep

`_draw_kept` reads of a row only the parts whose largest could be kept, and takes what could be kept out of them. Heads
are found by bisection of keys. A row that keeps more than 1,024 tokens (a flat one) is left to `_draw_flat`, which
draws among all, asks how much mass lies before the winner, and where it is too much draws again among what lies there:
each winner is kept with a probability of top_p or more, so that it seldom draws more than twice.

P positions   B parts of a row
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.largest.triton import bits_of, key_of, place_of
from kernels.launch import Launch, power_of_two
from kernels.selection.draws import PART, Draws, cut, drawn, free, scaled
from kernels.selection.noise import UNIT, bits_of_noise, noise, reach, reached

CANDIDATES = 1024
"""Tokens among which a row is decided at once: four for each thread of eight warps."""
_GATHER = 1024
"""Logits that are looked through together for candidates: 8 parts. Twice as many spilled, 8 to 32 bytes of a thread."""
_FLAT = 1024
"""Logits of a flat row that are looked at together: four for each thread of eight warps, whose noise is 64-bit."""
_SLACK = tl.constexpr(1e-3)  # much more than a bound is off
_NOTHING = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # under every key
_BOTTOM = tl.constexpr((-0x7F800001) << 32)  # not above the key of any scaled logit: -inf is its value
_MOST_NOISE = tl.constexpr(37.5)
_STEPS = tl.constexpr(12)  # of the bisection of values, of which a lower bound suffices


@triton.jit
def _middle(low, high):
    """Between two keys whose difference is beyond 64 bits."""
    return (low >> 1) + (high >> 1) + (low & high & 1)


@triton.jit
def _nth(keys, count):
    """A key that exactly `count` of some distinct ones are not under; there are as many, and more."""
    low = tl.full((), _NOTHING, tl.int64)
    high = tl.max(keys, 0) + 1
    found = tl.sum((keys > low).to(tl.int32), 0)
    while found != count:
        middle = _middle(low, high)
        above = tl.sum((keys >= middle).to(tl.int32), 0)
        enough = above >= count
        found = tl.where(enough, above, found)
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _head(keys, weights, limit):
    """The last key that has less than `limit` of the weights before it, or one between it and the next."""
    low = tl.full((), _NOTHING, tl.int64)
    if tl.sum(weights, 0) >= limit:
        high = tl.max(keys, 0) + 1
        between = tl.sum((keys > low).to(tl.int32), 0)
        before = 0
        while between > 1:
            middle = _middle(low, high)
            beyond = keys >= middle
            less = tl.sum(tl.where(beyond, weights, 0.0), 0) < limit
            above = tl.sum(beyond.to(tl.int32), 0)
            between = tl.where(less, between + before - above, above - before)
            before = tl.where(less, above, before)
            high = tl.where(less, middle, high)
            low = tl.where(less, low, middle)
    return low


@triton.jit
def _value_of(key):
    return bits_of(key).to(tl.float32, bitcast=True)


@triton.jit
def _least_value(wholes, parts, row, peak, mass, width, PART: tl.constexpr):
    """No token below it is kept; from the largest value and the mass of each part of a row."""
    low = tl.load(parts + row * 3 + 2)
    least = (low - tl.abs(low) * 1e-6).to(tl.float32)  # not above it when rounded
    if free(wholes, parts, row, width):
        wanted = (tl.load(parts + row * 3 + 1) * 1.0001 * tl.sum(mass, 0)).to(tl.float32)
        of_part = mass.to(tl.float32)
        bottom = tl.maximum(tl.min(tl.where(peak > float("-inf"), peak, 0.0), 0), -100.0)
        top = bottom * 0.0
        for _ in range(_STEPS):
            value = (bottom + top) * 0.5
            # In a part that reaches it, at most PART tokens below it lie beside those above it.
            above = tl.maximum(tl.exp(peak), of_part - PART * tl.exp(value))
            enough = tl.sum(tl.where(peak >= value, above, 0.0), 0) >= wanted
            least = tl.where(enough, value, least)
            bottom = tl.where(enough, value, bottom)
            top = tl.where(enough, top, value)
    return least


@triton.jit
def _draw_kept(
    x, pairs, wholes, parts, peaks, masses, listed, keys, tokens, width, x_row, count,
    PART: tl.constexpr, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    # One program writes one row's token, or -1 where more than BLOCK_C tokens could be kept.
    row = tl.program_id(0).to(tl.int64)
    if not (drawn(pairs, wholes, row) & cut(wholes, parts, row, width)):
        return
    top_k = tl.load(wholes + row * 3 + 2)
    top_p = tl.load(parts + row * 3 + 1)
    low = tl.load(parts + row * 3 + 2)
    unbounded = free(wholes, parts, row, width)

    at_b = tl.arange(0, BLOCK_B)
    in_row = at_b < count
    peak = tl.load(peaks + row * count + at_b, mask=in_row, other=float("-inf"))
    mass = tl.load(masses + row * count + at_b, mask=in_row & unbounded, other=0.0)
    value = _least_value(wholes, parts, row, peak, mass, width, PART)
    least = tl.full((), _NOTHING, tl.int64)
    if top_k < count:  # as many parts hold a token that is not behind the key of their largest with their last id
        least = _nth(tl.where(in_row, key_of(peak, at_b * PART + PART - 1), _NOTHING), top_k)

    reach = in_row & (peak >= value) & (key_of(peak, at_b * PART) >= least)
    tl.store(listed + row * count + tl.cumsum(reach.to(tl.int32), 0) - 1, at_b, mask=reach)
    within = tl.sum(reach.to(tl.int32), 0) * PART
    tl.debug_barrier()
    found = 0
    begin = 0
    while (begin < within) & (found <= BLOCK_C):
        flat = begin + tl.arange(0, BLOCK)
        part = tl.load(listed + row * count + flat // PART, mask=flat < within, other=0)
        at = part * PART + flat % PART
        number = scaled(x, pairs, parts, row, at, x_row, width)
        key = key_of(number, at)
        take = (flat < within) & (at < width) & (number >= value) & (key >= least)
        place = found + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(keys + row * BLOCK_C + place, key, mask=take & (place < BLOCK_C))
        found += tl.sum(take.to(tl.int32), 0)
        begin += BLOCK
    tl.debug_barrier()

    token = -1
    if found <= BLOCK_C:
        at_c = tl.arange(0, BLOCK_C)
        known = tl.load(keys + row * BLOCK_C + at_c, mask=at_c < found, other=_NOTHING)
        number = _value_of(known).to(tl.float64)
        keep = (at_c < found) & (number >= low)
        if top_k < found:
            keep = keep & (known >= _nth(known, top_k))
        weight = tl.where(keep, tl.exp(tl.minimum(number, 0.0)), 0.0)
        if top_p < 1.0:
            limit = top_p * tl.where(unbounded, tl.sum(mass, 0), tl.sum(weight, 0))
            last = _head(tl.where(keep, known, _NOTHING), weight, limit)
            keep = keep & (known >= last)
        ids = place_of(known)
        total = number + noise(bits_of_noise(tl.load(wholes + row * 3 + 1), ids), tl.float64)
        total = tl.where(keep, total, float("-inf"))
        token = tl.min(tl.where(keep & (total == tl.max(total, 0)), ids, 0x7FFFFFFF), 0)
    tl.store(tokens + row, token)


@triton.jit
def _count_from(x, pairs, parts, peaks, row, key, width, x_row, count, PART: tl.constexpr, BLOCK: tl.constexpr):
    """How many keys of a row are not under a key."""
    found = 0
    for begin in range(0, width, BLOCK):
        if _reaches(peaks, row, begin, _value_of(key), count, PART, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            keys = key_of(scaled(x, pairs, parts, row, at, x_row, width), at)
            found += tl.sum(((at < width) & (keys >= key)).to(tl.int32), 0)
    return found


@triton.jit
def _reaches(peaks, row, begin, value, count, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Whether any logit of a block is not below a value."""
    part = begin // PART + tl.arange(0, BLOCK // PART)
    return tl.max(tl.load(peaks + row * count + part, mask=part < count, other=float("-inf")), 0) >= value


@triton.jit
def _mass_from(x, pairs, parts, peaks, row, key, low, width, x_row, count, PART: tl.constexpr, BLOCK: tl.constexpr):
    """The mass of the tokens that are not under a key, nor below a value: float64."""
    mass = tl.full((), 0.0, tl.float64)
    for begin in range(0, width, BLOCK):
        if _reaches(peaks, row, begin, _value_of(key), count, PART, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            value = scaled(x, pairs, parts, row, at, x_row, width)
            number = value.to(tl.float64)
            keep = (at < width) & (key_of(value, at) >= key) & (number >= low)
            mass += tl.sum(tl.where(keep, tl.exp(number), 0.0), 0)
    return mass


@triton.jit
def _winner(
    x, pairs, wholes, parts, peaks, row, key, low, width, x_row, count,
    PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The key of the token that is drawn of those that are not under a key, nor below a value."""
    of_noise = tl.load(wholes + row * 3 + 1)
    best = tl.full((), float("-inf"), tl.float64)
    won = tl.full((), _NOTHING, tl.int64)
    for begin in range(0, width, BLOCK):
        least = tl.maximum(_value_of(key).to(tl.float64), best - _MOST_NOISE).to(tl.float32)
        if _reaches(peaks, row, begin, least, count, PART, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            value = scaled(x, pairs, parts, row, at, x_row, width)
            keys = key_of(value, at)
            number = value.to(tl.float64)
            keep = (at < width) & (keys >= key) & (number >= low)
            most = reached(tl.max(tl.where(keep, reach(value * UNIT, of_noise, at), float("-inf")), 0))
            if most + _SLACK >= best:
                total = tl.where(keep, number + noise(bits_of_noise(of_noise, at), tl.float64), float("-inf"))
                high = tl.max(total, 0)
                first = tl.min(tl.where(keep & (total == high), at, 0x7FFFFFFF), 0)
                same = tl.max(tl.where(at == first, keys, _NOTHING), 0)
                won = tl.where(high > best, same, won)  # of equals the lowest id: blocks come in order
                best = tl.maximum(best, high)
    return won


@triton.jit
def _draw_flat(
    x, pairs, wholes, parts, peaks, masses, tokens, width, x_row, count,
    PART: tl.constexpr, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    # One program writes one row's token if that is not known yet.
    row = tl.program_id(0).to(tl.int64)
    if not (drawn(pairs, wholes, row) & cut(wholes, parts, row, width)):
        return
    if tl.load(tokens + row) >= 0:
        return
    top_k = tl.load(wholes + row * 3 + 2)
    top_p = tl.load(parts + row * 3 + 1)
    low = tl.load(parts + row * 3 + 2)

    key = tl.full((), _BOTTOM, tl.int64)
    if top_k < width:
        high = tl.full((), 1 << 31, tl.int64)  # above the key of a scaled logit of 0, which is the largest
        found = width
        while found != top_k:
            middle = _middle(key, high)
            above = _count_from(x, pairs, parts, peaks, row, middle, width, x_row, count, PART, BLOCK)
            enough = above >= top_k
            found = tl.where(enough, above, found)
            key = tl.where(enough, middle, key)
            high = tl.where(enough, high, middle)
    limit = tl.full((), float("inf"), tl.float64)
    if top_p < 1.0:
        if free(wholes, parts, row, width):
            at_b = tl.arange(0, BLOCK_B)
            limit = top_p * tl.sum(tl.load(masses + row * count + at_b, mask=at_b < count, other=0.0), 0)
        else:
            limit = top_p * _mass_from(x, pairs, parts, peaks, row, key, low, width, x_row, count, PART, BLOCK)

    won = _winner(x, pairs, wholes, parts, peaks, row, key, low, width, x_row, count, PART, BLOCK)
    if top_p < 1.0:
        before = _mass_from(x, pairs, parts, peaks, row, won + 1, low, width, x_row, count, PART, BLOCK)
        while (before >= limit) & (before > 0.0):
            key = won + 1
            won = _winner(x, pairs, wholes, parts, peaks, row, key, low, width, x_row, count, PART, BLOCK)
            before = _mass_from(x, pairs, parts, peaks, row, won + 1, low, width, x_row, count, PART, BLOCK)
    tl.store(tokens + row, place_of(won))


def plan_cutoffs(
    x_PV: torch.Tensor, pairs_P2: torch.Tensor, draws: Draws, tokens_P: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, tuple[Launch, Launch]]:
    """What is to be known of each part before, its largest scaled logit (float32) and its mass (float64), and the
    launches that write the tokens of rows with cutoffs. The mass is read of rows whose only cutoff is top_p."""
    rows, width = x_PV.shape
    count = -(-width // PART)

    def empty(columns: int, kind: torch.dtype) -> torch.Tensor:
        return torch.empty(rows, columns, dtype=kind, device=x_PV.device)

    peaks_PB, masses_PB = empty(count, torch.float32), empty(count, torch.float64)
    room = empty(count, torch.int32), empty(CANDIDATES, torch.int64)
    given, sizes = (x_PV, pairs_P2, *draws, peaks_PB, masses_PB), (width, x_PV.stride(0), count)
    blocks = {"PART": PART, "BLOCK": _GATHER, "BLOCK_B": power_of_two(count), "BLOCK_C": CANDIDATES}
    kept = Launch(_draw_kept, (rows,), (*given, *room, tokens_P, *sizes), blocks, warps=8)
    blocks = {"PART": PART, "BLOCK": _FLAT, "BLOCK_B": power_of_two(count)}
    return peaks_PB, masses_PB, (kept, Launch(_draw_flat, (rows,), (*given, tokens_P, *sizes), blocks, warps=8))
