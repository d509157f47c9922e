"""How the queries of a step become tiles: which blocks a GPU gets, and how many programs share a tile's keys.

A tile is some consecutive queries of one row with all heads that share a key head. Rows with few queries and rows with
many get tiles of their own and a launch each: a decode beside a prefill would else be multiplied as if it had as many
queries. Where every row is one tile, tiles are not even listed: that is a decode, and what a captured graph holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from kernels.attention.rows import Rows
from kernels.launch import Chip, power_of_two

_FEW = 32
"""Queries times heads of a row up to which it waits for memory rather than computes."""
_MOST_QUERIES = 128
_SPLIT_KEYS = 256
"""A split has at least this many keys, or joining costs more than it saves."""
_MOST_SPLITS = 64
_PROGRAMS_PER_CORE = 2
"""Programs that one multiprocessor holds at once, about; with fewer in all, some of it waits."""


class Blocks(NamedTuple):
    """Queries times heads of a tile, keys that go by at once, and how a program runs."""

    queries: int
    keys: int
    warps: int
    stages: int


class Kind(NamedTuple):
    """What blocks are chosen for besides the number of queries."""

    size: int  # D
    itemsize: int  # bytes of what is multiplied
    stored: int  # bytes of what the cache holds of it
    window: bool


def blocks_for(queries: int, kind: Kind, capability: int) -> Blocks:
    """The blocks for tiles of about this many queries times heads.

    A tile of a decode waits for memory: while a block of 64 keys is multiplied the next is on its way, 32 KB with a
    head of 128. Two stages suffice for that; a third would only ask for page numbers earlier, which are near anyway,
    and takes registers: with two, a multiprocessor holds four such programs or more, so that all of 64 rows with 8 key
    heads run at once. A tile of a prefill computes: 128 queries use each key often, 8 warps hold their sums in
    registers, and the more keys go by at once, the fewer times the sums are scaled. On Hopper the products read shared
    memory, so that 128 keys fit, and before it 64; beside the masks of a window or what widens float8, half of that.
    Wide heads take fewer queries or keys for the same room (what widens float8 on Hopper the fewest), and float32,
    which is multiplied without tensor cores, fewer still. All of these spill nothing (kernels/README.md).
    """
    if kind.itemsize > 2:
        return Blocks(16 if kind.size > 128 else min(queries, 32), 16, 8, 1)
    if queries <= _FEW:
        return Blocks(queries, 64, 4, 2) if kind.size <= 128 else Blocks(queries, 32, 8, 2)
    plain = not kind.window and kind.stored == kind.itemsize
    if kind.size > 128:
        return Blocks(32 if capability >= 90 and kind.stored < kind.itemsize else 64, 32, 8, 2)
    if capability >= 90:
        return Blocks(queries, 128, 8, 2) if plain and queries > 64 else Blocks(queries, 64, 8, 3)
    return Blocks(queries, 64 if plain or queries <= 64 else 32, 8, 3)


@dataclass(slots=True, frozen=True)
class Work:
    """The tiles of one launch."""

    blocks: Blocks
    count: int
    queries: int  # of a tile, at most
    splits: int  # programs that share the keys of a tile
    tiles_X2: torch.Tensor | None  # int32: row, first query within it; None: tile x is the whole of row x


class Heads(NamedTuple):
    """How many of queries use one of keys, and how many of keys there are."""

    group: int
    keys: int


def lay_out(
    rows: Rows, heads: Heads, kind: Kind, chip: Chip, device: torch.device, *, window: int | None, splits: int | None
) -> list[Work]:
    """The launches of a step. `splits`: as many programs for each tile; None chooses."""
    few: list[int] = []
    many: list[int] = []
    for row in range(rows.count):
        (few if heads.group * rows.new_tokens(row) <= max(_FEW, heads.group) else many).append(row)
    found = []
    for chosen in (few, many):
        if chosen:
            most = max(map(rows.new_tokens, chosen))
            blocks = _blocks(heads.group * most, heads, kind, chip)
            whole = len(chosen) == rows.count and most <= blocks.queries // heads.group
            found.append(_work(rows, None if whole else chosen, blocks, heads, device))
    longest = max(rows.context_lens, default=1)
    keys = longest if window is None else min(longest, window)
    return [replace(work, splits=splits or _choose_splits(work.count * heads.keys, keys, chip.cores)) for work in found]


def lay_out_alike(rows: Rows, heads: Heads, kind: Kind, chip: Chip, device: torch.device) -> list[Work]:
    """Tiles of one size whatever is in the step, so that a query's sums never depend on what is beside it."""
    return [_work(rows, list(range(rows.count)), _blocks(64, heads, kind, chip), heads, device)]


def _blocks(queries: int, heads: Heads, kind: Kind, chip: Chip) -> Blocks:
    least = power_of_two(heads.group, 16)
    blocks = blocks_for(max(least, min(_MOST_QUERIES, power_of_two(queries))), kind, chip.capability)
    return blocks._replace(queries=max(least, blocks.queries))


def _work(rows: Rows, chosen: list[int] | None, blocks: Blocks, heads: Heads, device: torch.device) -> Work:
    """Tiles of the chosen rows, those with most keys first so that none of them is the last to run; None: of all."""
    step = blocks.queries // heads.group
    if chosen is None:
        most = max(map(rows.new_tokens, range(rows.count)))
        return Work(blocks, rows.count, most, 1, None)
    tiles = [(row, first) for row in chosen for first in range(0, rows.new_tokens(row), step)]
    tiles.sort(key=lambda tile: rows.new_tokens(tile[0]) - rows.context_lens[tile[0]] - tile[1])
    queries = min(step, max((rows.new_tokens(row) for row in chosen), default=1))
    return Work(blocks, len(tiles), queries, 1, _placed(rows, tiles, step, device))


def _placed(rows: Rows, tiles: list[tuple[int, int]], step: int, device: torch.device) -> torch.Tensor:
    """The tiles on the device. What was made for placed rows is taken again: a captured graph has no copies."""
    made, key = rows.placed.made if rows.placed else {}, (__name__, rows.row_starts, step, len(tiles))
    if key not in made:
        pinned = torch.tensor(tiles, dtype=torch.int32, pin_memory=device.type == "cuda").reshape(-1, 2)
        made[key] = pinned.to(device, non_blocking=True)
    tensor: torch.Tensor = made[key]
    return tensor


def _choose_splits(programs: int, keys: int, cores: int) -> int:
    """As many as fill the GPU, while each has enough keys. Placed contexts never exceed the tuple's."""
    return max(1, min(cores * _PROGRAMS_PER_CORE // max(1, programs), keys // _SPLIT_KEYS, _MOST_SPLITS))
