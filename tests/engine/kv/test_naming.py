"""The names of a request's blocks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.engine.kv.hashing import ExtraKey, KeyKind, block_hash, root
from services.engine.kv.naming import Naming, extra_keys
from services.engine.request import MediaItem, Request, make_family
from tests.engine.harness import make_spec

CAT, DOG = b"c" * 32, b"d" * 32


def make_request(tokens: Sequence[int], **given: Any) -> Request:
    return make_family(make_spec(1, tokens, 100, **given), 1000, 0.0, 0).choices[0]


def image(name: bytes, offset: int, length: int) -> MediaItem:
    return MediaItem(name, "image", offset, length, length)


def names(tokens: Sequence[int], size: int = 4, **given: Any) -> list[bytes]:
    return Naming(size).names(make_request(tokens, **given), len(tokens) // size)


def test_names_are_a_chain_from_the_root() -> None:
    first = block_hash(root(4), array("i", range(4)))
    assert names(range(9)) == [first, block_hash(first, array("i", range(4, 8)))]


@given(st.integers(1, 60), st.lists(st.integers(1, 20), max_size=8))
def test_names_do_not_know_in_which_chunks_the_tokens_came(length: int, chunks: list[int]) -> None:
    naming, request = Naming(4), make_request([7])
    tokens = array("i", [7, *range(length)])
    for chunk in [*chunks, length]:
        request.tokens = tokens[: len(request.tokens) + chunk]
        naming.names(request, len(request.tokens) // 4)
    assert request.block_hashes == names(tokens)


def test_a_name_is_made_once() -> None:
    naming, request = Naming(4), make_request(range(8))
    first = naming.names(request, 1)[0]
    assert len(request.block_hashes) == 1
    assert naming.names(request, 2)[0] is first


def test_the_salt_is_in_every_name_through_the_first() -> None:
    plain, salted = names(range(8)), names(range(8), cache_salt="x")
    assert not set(plain) & set(salted)
    spec = make_spec(1, range(8), cache_salt="x")
    assert extra_keys(spec, 0, 4) == (ExtraKey(KeyKind.SALT, b"x"),)
    assert extra_keys(spec, 4, 8) == ()


def test_media_are_in_the_names_of_the_blocks_they_reach_into() -> None:
    media = (image(CAT, 2, 5), image(DOG, 7, 1), image(CAT, 12, 4))
    spec = make_spec(1, range(20), cache_salt="x", media=media)
    assert extra_keys(spec, 0, 4) == (ExtraKey(KeyKind.SALT, b"x"), ExtraKey(KeyKind.MEDIA, CAT, 2))
    assert extra_keys(spec, 4, 8) == (ExtraKey(KeyKind.MEDIA, CAT, -2), ExtraKey(KeyKind.MEDIA, DOG, 3))
    assert extra_keys(spec, 8, 12) == ()
    assert extra_keys(spec, 12, 16) == (ExtraKey(KeyKind.MEDIA, CAT, 0),)
    assert extra_keys(spec, 16, 20) == ()


def test_the_same_image_elsewhere_in_a_block_is_another_name() -> None:
    """All placeholders are the same token, so that the tokens do not tell where the image begins."""
    tokens = [9] * 8
    first = names(tokens, media=(image(CAT, 1, 3),))
    assert first == names(tokens, media=(image(CAT, 1, 3),))
    assert first[0] != names(tokens, media=(image(CAT, 0, 3),))[0]
    assert first[0] != names(tokens, media=(image(DOG, 1, 3),))[0]
    assert first[0] != names(tokens)[0]


def test_a_block_in_the_middle_of_an_image_is_named_by_where_in_it_it_lies() -> None:
    tokens = [9] * 16
    long, later = names(tokens, media=(image(CAT, 0, 16),)), names(tokens, media=(image(CAT, 4, 12),))
    assert len(set(long)) == 4
    assert not set(long) & set(later)
    parent = bytes(32)
    middle = extra_keys(make_spec(1, tokens, media=(image(CAT, 0, 16),)), 4, 8)
    begin = extra_keys(make_spec(1, tokens, media=(image(CAT, 4, 12),)), 4, 8)
    assert block_hash(parent, array("i", [9] * 4), middle) != block_hash(parent, array("i", [9] * 4), begin)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 6)), max_size=5), st.integers(1, 5))
def test_the_keys_are_those_that_a_look_at_every_item_gives(gaps: list[tuple[int, int]], size: int) -> None:
    media: list[MediaItem] = []
    end = 0
    for gap, length in gaps:
        media.append(image(bytes([len(media)]) * 32, end + gap, length))
        end += gap + length
    spec = make_spec(1, [1] * (end + 9), media=tuple(media))
    for start in range(0, end + 9, size):
        touched = [item for item in media if item.offset < start + size and start < item.offset + item.length]
        right = tuple(ExtraKey(KeyKind.MEDIA, item.hash, item.offset - start) for item in touched)
        assert extra_keys(spec, start, start + size) == right


def test_block_sizes_share_no_name() -> None:
    """Not even where the tokens are the same ones, as in blocks of 4 whose size is halved."""
    assert not set(names(range(16), 4)) & set(names(range(16), 2))
    assert not set(names([5] * 16, 4)) & set(names([5] * 16, 8))
