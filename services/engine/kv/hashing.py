"""Content names of KV blocks: a chain of hashes, the same in every process.

    name(block) = sha256(name(parent) | tokens | extra keys)
    tokens      = int32, little-endian, as many as a block has
    extra key   = kind, 1 byte | offset, int64 | length of the value, uint32 | value

A block's KV depends on everything before it, so its name does too. What else it depends on goes in
as typed extra keys, so that two kinds with the same text never collide.
"""

from __future__ import annotations

import enum
import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import NamedTuple


class KeyKind(enum.IntEnum):
    """What an extra key says. The numbers are part of the names."""

    SALT = 1
    ADAPTER = 2
    MEDIA = 3


class ExtraKey(NamedTuple):
    """Something besides the tokens that a block's KV depends on.

    `offset` is for media alone: where the item begins, in tokens from the first of the block; negative
    where it begins in an earlier block. The same image elsewhere in a block is another key.
    """

    kind: KeyKind
    value: bytes
    offset: int = 0


def root(block_size: int) -> bytes:
    """The parent of first blocks. Blocks of different sizes never share names."""
    return hashlib.sha256(b"triptych kv block" + struct.pack("<I", block_size)).digest()


def block_hash(parent: bytes, tokens: array[int], extra: Sequence[ExtraKey] = ()) -> bytes:
    """The name of a full block, 32 bytes."""
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    digest = hashlib.sha256(parent)
    digest.update(tokens)
    for key in extra:
        digest.update(struct.pack("<BqI", key.kind, key.offset, len(key.value)))
        digest.update(key.value)
    return digest.digest()
