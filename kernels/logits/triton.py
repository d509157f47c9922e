"""Edits of logits in kernels: see record.Logits. None waits for the device, none reads a length from it.

Each launch has programs for every line of the step; those whose record does not ask end at once. What is rounded is
rounded as the specification does it: no product is fused with a sum.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.launch import Launch, power_of_two
from kernels.logits.record import Edit, Line, Word

_IDS = 128
"""Ids of one turn: one for each thread of four warps, as most requests name a few."""
_WORDS = 64
"""Words of a mask of one program: 2,048 ids, 16 for each thread of four warps."""
_COUNTED = 128
"""New ids of one program: a decode has one. No fewer than threads, so that no two threads count the same id."""
_PLACES = 512
"""Places of one program: 4 for each thread, whose logits lie anywhere, so that many wait for memory together."""

_LINE = tl.constexpr(len(Line._fields))
_POSITION, _ROW, _LENGTH, _KNOWN, _RECORD, _MASK, _SEEN, _FIRST = (tl.constexpr(each) for each in range(8))
_ALLOWED = tl.constexpr(int(Word.ALLOWED))
_BIAS, _BIASES = tl.constexpr(int(Word.BIAS)), tl.constexpr(int(Word.BIASES))
_BANNED, _SEQUENCES = tl.constexpr(int(Word.BANNED)), tl.constexpr(int(Word.SEQUENCES))
_LONGEST = tl.constexpr(int(Word.LONGEST))
_ENDS, _END_IDS, _UNTIL = (tl.constexpr(int(word)) for word in (Word.ENDS, Word.END_IDS, Word.UNTIL))
_FROM, _PROMPT = tl.constexpr(int(Word.FROM)), tl.constexpr(int(Word.PROMPT))
_REPETITION, _FREQUENCY = tl.constexpr(int(Word.REPETITION)), tl.constexpr(int(Word.FREQUENCY))
_PRESENCE = tl.constexpr(int(Word.PRESENCE))


@triton.jit
def _number(word):
    """The float32 of a word of a record."""
    return tl.load(word).to(tl.float32, bitcast=True)


@triton.jit
def _forbid_ends_of(to, record, BLOCK: tl.constexpr):
    """-inf for the end ids of a record."""
    count = tl.load(record + _END_IDS)
    ids = record + tl.load(record + _ENDS)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        token = tl.load(ids + at, mask=at < count, other=0)
        tl.store(to + token, float("-inf"), mask=at < count)


@triton.jit
def _edit_ids(x, tokens, pool, lines, x_row, tokens_row, BLOCK: tl.constexpr):
    # One program edits the ids that one line's record names, BLOCK at a time.
    line = lines + tl.program_id(0) * _LINE
    record = pool + tl.load(line + _RECORD)
    to = x + tl.load(line + _POSITION) * x_row
    before = tokens + tl.load(line + _ROW) * tokens_row
    length = tl.load(line + _LENGTH).to(tl.int32)

    count = tl.load(record + _BIASES)
    ids = record + tl.load(record + _BIAS)
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        token = tl.load(ids + at, mask=at < count, other=0)
        bias = tl.load(ids + count + at, mask=at < count, other=0).to(tl.float32, bitcast=True)
        tl.store(to + token, tl.load(to + token, mask=at < count, other=0.0) + bias, mask=at < count)
    tl.debug_barrier()  # an id that has a bias may be forbidden by another thread

    count = tl.load(record + _SEQUENCES)
    longest = tl.load(record + _LONGEST)
    starts = record + tl.load(record + _BANNED)
    ids = starts + count + 1
    for begin in range(0, count, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        first = tl.load(starts + at, mask=at < count, other=0)
        last = tl.load(starts + at + 1, mask=at < count, other=0) - 1
        completes = (at < count) & (last - first <= length)
        for ahead in range(longest - 1):
            inside = completes & (first + ahead < last)
            wanted = tl.load(ids + first + ahead, mask=inside, other=0)
            found = tl.load(before + (length - last + first + ahead), mask=inside, other=0)
            completes = completes & (wanted == found)
        token = tl.load(ids + last, mask=completes, other=0)
        tl.store(to + token, float("-inf"), mask=completes)

    if (length < tl.load(record + _UNTIL)) & (tl.load(line + _MASK) < 0):
        _forbid_ends_of(to, record, BLOCK)


@triton.jit
def _forbid(x, pool, lines, masks, left, x_row, width, words, blocks, BLOCK: tl.constexpr):
    # One program forbids what BLOCK words of one line's mask and of its allowed ids leave out.
    line = lines + tl.program_id(0) * _LINE
    record = pool + tl.load(line + _RECORD)
    mask = tl.load(line + _MASK)
    allowed = tl.load(record + _ALLOWED)
    if (mask >= 0) | (allowed > 0):
        to = x + tl.load(line + _POSITION) * x_row
        word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        bits = tl.load(masks + mask * words + word, mask=(word < words) & (mask >= 0), other=-1)
        bits = bits & tl.load(record + allowed + word, mask=(word < words) & (allowed > 0), other=-1)
        bit = tl.arange(0, 32)
        at = word[:, None] * 32 + bit[None, :]
        kept = ((bits[:, None] >> bit[None, :]) & 1) != 0
        tl.store(to + at, float("-inf"), mask=(at < width) & (kept == 0))
        if (mask >= 0) & (tl.load(line + _LENGTH) < tl.load(record + _UNTIL)):
            number = tl.load(to + at, mask=(at < width) & kept, other=float("-inf"))
            ids = record + tl.load(record + _ENDS)
            for index in range(tl.load(record + _END_IDS)):
                number = tl.where(at == tl.load(ids + index), float("-inf"), number)
            most = tl.max(tl.max(number, 1), 0)
            tl.store(left + tl.program_id(0) * blocks + tl.program_id(1), most)


@triton.jit
def _forbid_ends(x, pool, lines, left, x_row, blocks, BLOCK: tl.constexpr, BLOCK_P: tl.constexpr):
    # One program forbids the end ids of one line that has a mask, if any of its parts has something else left.
    line = lines + tl.program_id(0) * _LINE
    record = pool + tl.load(line + _RECORD)
    if (tl.load(line + _MASK) >= 0) & (tl.load(line + _LENGTH) < tl.load(record + _UNTIL)):
        at = tl.arange(0, BLOCK_P)
        found = tl.load(left + tl.program_id(0) * blocks + at, mask=at < blocks, other=float("-inf"))
        if tl.max(found, 0) > float("-inf"):
            _forbid_ends_of(x + tl.load(line + _POSITION) * x_row, record, BLOCK)


@triton.jit
def _count(tokens, pool, lines, tokens_row, width, BLOCK: tl.constexpr):
    # One program counts BLOCK new ids of one line's row. Whoever finds an id without a count has its first place.
    line = lines + tl.program_id(0) * _LINE
    seen = tl.load(line + _SEEN)
    known = tl.load(line + _KNOWN).to(tl.int32)
    begin = tl.load(line + _FIRST).to(tl.int32) + tl.program_id(1) * BLOCK
    if (seen >= 0) & (begin < known):
        place = begin + tl.arange(0, BLOCK)
        token = tl.load(tokens + tl.load(line + _ROW) * tokens_row + place, mask=place < known, other=-1)
        new = (token >= 0) & (token < width)
        prompt = place < tl.load(pool + tl.load(line + _RECORD) + _PROMPT)
        counts = pool + seen
        one = tl.zeros_like(token) + 1
        of_prompt = tl.atomic_or(counts + token, one, mask=new & prompt, sem="relaxed")
        of_output = tl.atomic_add(counts + token, one + 1, mask=new & (prompt == 0), sem="relaxed")
        first = new & (tl.where(prompt, of_prompt, of_output) == 0)
        tl.atomic_or(counts + width + (place >> 5), one << (place & 31), mask=first, sem="relaxed")


@triton.jit
def _penalize(x, tokens, pool, lines, x_row, tokens_row, width, BLOCK: tl.constexpr):
    # One program edits the ids that stand first at BLOCK places of one line's row.
    line = lines + tl.program_id(0) * _LINE
    seen = tl.load(line + _SEEN)
    length = tl.load(line + _LENGTH).to(tl.int32)
    record = pool + tl.load(line + _RECORD)
    begin = tl.load(record + _FROM) + tl.program_id(1) * BLOCK
    if (seen >= 0) & (begin < length):
        known = tl.load(line + _KNOWN).to(tl.int32)
        ids = tokens + tl.load(line + _ROW) * tokens_row
        counts = pool + seen
        place = begin + tl.arange(0, BLOCK)
        token = tl.load(ids + place, mask=place < length, other=-1)
        valid = (token >= 0) & (token < width)
        count = tl.load(counts + token, mask=valid, other=0)
        bits = tl.load(counts + width + (place >> 5), mask=place < known, other=0)
        first = tl.where(place < known, ((bits >> (place & 31)) & 1) != 0, count == 0)
        times = count >> 1
        for draft in range(known, length):
            same = token == tl.load(ids + draft)
            times += same.to(tl.int32)
            first = first & ((same & (draft < place)) == 0)  # of equal drafts the first

        to = x + tl.load(line + _POSITION) * x_row + token
        number = tl.load(to, mask=valid & first, other=0.0)
        repetition = tl.zeros_like(number) + _number(record + _REPETITION)
        number = tl.where(number > 0, tl.div_rn(number, repetition), number * repetition)
        number = number - _number(record + _FREQUENCY) * times.to(tl.float32)
        number = number - tl.where(times > 0, _number(record + _PRESENCE), 0.0)
        tl.store(to, number, mask=valid & first)


def plan_edit_ids(edit: Edit) -> Launch:
    """The launch; the rest of these likewise."""
    x_PV, tokens_RL, pool_N, lines_E8, _ = edit
    given = (x_PV, tokens_RL, pool_N, lines_E8, x_PV.stride(0), tokens_RL.stride(0))
    return Launch(_edit_ids, (len(lines_E8),), given, {"BLOCK": _IDS})


def plan_forbid(edit: Edit) -> tuple[Launch, torch.Tensor]:
    """And the largest of each part, [E, parts] float32, where end ids come with a mask; elsewhere it is not written."""
    x_PV, _, pool_N, lines_E8, masks_MW = edit
    words = masks_MW.shape[1]
    blocks = -(-words // _WORDS)
    left_EB = torch.empty(len(lines_E8), blocks, dtype=torch.float32, device=x_PV.device)
    given = (x_PV, pool_N, lines_E8, masks_MW, left_EB, x_PV.stride(0), x_PV.shape[1], words, blocks)
    return Launch(_forbid, (len(lines_E8), blocks), given, {"BLOCK": _WORDS}), left_EB


def plan_forbid_ends(edit: Edit, left_EB: torch.Tensor) -> Launch:
    """`left_EB` is what `plan_forbid` gave."""
    x_PV, _, pool_N, lines_E8, _ = edit
    blocks = left_EB.shape[1]
    given = (x_PV, pool_N, lines_E8, left_EB, x_PV.stride(0), blocks)
    return Launch(_forbid_ends, (len(lines_E8),), given, {"BLOCK": _IDS, "BLOCK_P": power_of_two(blocks)})


def plan_count(edit: Edit, most: int) -> Launch:
    """For `most` new ids of a row at most."""
    x_PV, tokens_RL, pool_N, lines_E8, _ = edit
    given = (tokens_RL, pool_N, lines_E8, tokens_RL.stride(0), x_PV.shape[1])
    return Launch(_count, (len(lines_E8), -(-most // _COUNTED)), given, {"BLOCK": _COUNTED})


def plan_penalize(edit: Edit, longest: int) -> Launch:
    """For lengths of `longest` at most. Rounded like the specification: no product is fused with a sum."""
    x_PV, tokens_RL, pool_N, lines_E8, _ = edit
    given = (x_PV, tokens_RL, pool_N, lines_E8, x_PV.stride(0), tokens_RL.stride(0), x_PV.shape[1])
    return Launch(_penalize, (len(lines_E8), -(-longest // _PLACES)), given, {"BLOCK": _PLACES}, fused=False)


def edit_ids(edit: Edit) -> None:
    """Bias, banned sequences, and end ids of positions without a grammar mask."""
    plan_edit_ids(edit).run()


def forbid(edit: Edit) -> torch.Tensor:
    """Grammar masks and allowed ids."""
    launch, left_EB = plan_forbid(edit)
    launch.run()
    return left_EB


def forbid_ends(edit: Edit, left_EB: torch.Tensor) -> None:
    """End ids of positions with a grammar mask."""
    plan_forbid_ends(edit, left_EB).run()


def count(edit: Edit, most: int) -> None:
    """New ids."""
    plan_count(edit, most).run()


def penalize(edit: Edit, longest: int) -> None:
    """What was counted, and drafts, which are not kept."""
    plan_penalize(edit, longest).run()
