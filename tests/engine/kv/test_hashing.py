"""Names of block content."""

from __future__ import annotations

import hashlib
import struct
from array import array

from services.engine.kv.hashing import ExtraKey, KeyKind, block_hash, root


def ids(*tokens: int) -> array[int]:
    return array("i", tokens)


def test_a_name_is_the_hash_that_the_formula_says() -> None:
    parent = hashlib.sha256(b"triptych kv block" + struct.pack("<I", 4)).digest()
    assert root(4) == parent
    plain = hashlib.sha256(parent + struct.pack("<4i", 1, 2, 3, 70000)).digest()
    assert block_hash(root(4), ids(1, 2, 3, 70000)) == plain
    salted = hashlib.sha256(parent + struct.pack("<4i", 1, 2, 3, 4) + struct.pack("<BQI", 1, 0, 1) + b"x").digest()
    assert block_hash(root(4), ids(1, 2, 3, 4), [ExtraKey(KeyKind.SALT, b"x")]) == salted


def test_a_name_says_everything_before_the_block() -> None:
    first, other = block_hash(root(2), ids(1, 2)), block_hash(root(2), ids(1, 3))
    assert block_hash(first, ids(5, 6)) != block_hash(other, ids(5, 6))


def test_extra_keys_of_different_kinds_never_meet() -> None:
    names = {
        block_hash(root(1), ids(1), extra)
        for extra in (
            [],
            [ExtraKey(KeyKind.SALT, b"x")],
            [ExtraKey(KeyKind.ADAPTER, b"x")],
            [ExtraKey(KeyKind.MEDIA, b"x")],
            [ExtraKey(KeyKind.MEDIA, b"x", offset=1)],
            [ExtraKey(KeyKind.SALT, b"xx")],
            [ExtraKey(KeyKind.SALT, b"x"), ExtraKey(KeyKind.SALT, b"x")],
            [ExtraKey(KeyKind.SALT, b"")],
        )
    }
    assert len(names) == 8


def test_block_sizes_share_no_name() -> None:
    assert block_hash(root(2), ids(1, 2)) != block_hash(root(4), ids(1, 2))
