"""The names of a request's blocks: a chain, made once, link by link, as the tokens come to be known.

Names depend on positions in the whole sequence alone, so the chunks in which it was computed leave
no trace in them.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from services.engine.kv.hashing import ExtraKey, KeyKind, block_hash, root

if TYPE_CHECKING:
    from services.engine.request import MediaItem, Request, RequestSpec


class Naming:
    """Names the full blocks of requests, and keeps the names with each."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._root = root(block_size)

    def names(self, request: Request, count: int) -> list[bytes]:
        """At least the first `count` names of a request. The tokens of so many blocks are known for good."""
        names, size, spec = request.block_hashes, self._size, request.family.spec
        while len(names) < count:
            start = len(names) * size
            tokens = request.tokens[start : start + size]
            names.append(block_hash(names[-1] if names else self._root, tokens, extra_keys(spec, start, start + size)))
        return names


def extra_keys(spec: RequestSpec, start: int, end: int) -> tuple[ExtraKey, ...]:
    """What the KV of positions [start, end) depends on beside tokens and what lies before.

    The salt is in the first block, and through the chain in all. An item of media is in each block
    that it reaches into, with the place in the block where it begins:

        block             |  start ─────────── end  |
        item          |───────────|   |─────────────────|
        its place    < 0               > 0
    """
    keys = []
    if start == 0 and spec.cache_salt:
        keys.append(ExtraKey(KeyKind.SALT, spec.cache_salt.encode()))
    if spec.media:
        first = bisect_right(spec.media, start, key=_end)
        for item in spec.media[first:]:
            if item.offset >= end:
                break
            keys.append(ExtraKey(KeyKind.MEDIA, item.hash, item.offset - start))
    return tuple(keys)


def _end(item: MediaItem) -> int:
    return item.offset + item.length
