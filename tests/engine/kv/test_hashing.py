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
    salted = hashlib.sha256(parent + struct.pack("<4i", 1, 2, 3, 4) + struct.pack("<BqI", 1, 0, 1) + b"x").digest()
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
            [ExtraKey(KeyKind.MEDIA, b"x", offset=-1)],
            [ExtraKey(KeyKind.SALT, b"xx")],
            [ExtraKey(KeyKind.SALT, b"x"), ExtraKey(KeyKind.SALT, b"x")],
            [ExtraKey(KeyKind.SALT, b"")],
        )
    }
    assert len(names) == 9


def test_block_sizes_share_no_name() -> None:
    assert block_hash(root(2), ids(1, 2)) != block_hash(root(4), ids(1, 2))


def test_names_are_the_same_in_every_process_and_release() -> None:
    """Routers compare names of different engines, so the values are part of the contract."""
    first = block_hash(root(4), ids(1, 2, 3, 4), [ExtraKey(KeyKind.SALT, b"tenant")])
    second = block_hash(first, ids(5, 6, 7, 151643), [ExtraKey(KeyKind.MEDIA, bytes(range(32)), offset=-2)])
    assert first.hex() == "0e33bd40f4ed4e839c9ccc07db7f11cea4e3362ab4e6fde2e5a189968be0b469"
    assert second.hex() == "55f1421f8d364960518909bd7ba62b98c87936eb5de65e5f801a49006564eac0"
