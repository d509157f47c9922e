from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import FailedPrecondition, InvalidArgument, Unavailable
from services.gateway.tokenize import Tokenizer, TokenizerPool
from tests.gateway import toys


@pytest.fixture(scope="module")
def pool() -> TokenizerPool:
    return TokenizerPool(toys.tokenizer("byte_level").to_str().encode(), threads=3)


@pytest.mark.parametrize("kind", toys.KINDS)
@settings(max_examples=40, deadline=None)
@given(text=st.text(max_size=40))
def test_ids_and_pieces_are_the_librarys(kind: str, text: str) -> None:
    made = toys.tokenizer(kind)
    tokenizer = Tokenizer(made.to_str())
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == made.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == made.decode(ids, skip_special_tokens=False)
    assert list(toys.vocabulary(kind).pieces) == tokenizer.pieces()
    assert toys.vocabulary(kind).special_ids == frozenset(tokenizer.special_ids())


async def test_the_pool(pool: TokenizerPool) -> None:
    ids = await pool.encode("the fox <|im_end|>🔥")
    assert 1 in ids
    assert await pool.decode(ids) == "the fox <|im_end|>🔥"
    assert await pool.decode(ids, skip_special_tokens=True) == "the fox 🔥"
    assert pool.id_of("<|im_end|>") == 1
    assert pool.id_of("nothing") is None


async def test_each_thread_has_its_own_tokenizer(pool: TokenizerPool) -> None:
    seen: dict[int, set[int]] = {}

    def note(tokenizer: Tokenizer) -> None:
        seen.setdefault(threading.get_ident(), set()).add(id(tokenizer))

    texts = [pool.encode("the quick brown fox " * 100) for _ in range(40)]
    await asyncio.gather(*(pool.run(note, size=size) for size in [0, 10**6] * 20), *texts)
    assert threading.get_ident() not in seen
    assert all(len(tokenizers) == 1 for tokenizers in seen.values())
    assert len(set().union(*seen.values())) == len(seen)


async def test_a_long_text_does_not_hold_up_short_ones(pool: TokenizerPool) -> None:
    started, release = threading.Event(), threading.Event()

    def book(_: Tokenizer) -> None:
        started.set()
        release.wait()

    long = asyncio.create_task(pool.run(book, size=10**6))
    await asyncio.to_thread(started.wait)
    assert await pool.encode("fox")
    release.set()
    await long


async def test_the_loop_runs_on_while_a_text_is_read(pool: TokenizerPool) -> None:
    task = asyncio.create_task(pool.encode("the quick brown fox " * 20_000))
    turns = 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 100, "the library gives the lock back while it works"


async def test_hopeless_texts_are_refused_unread(pool: TokenizerPool) -> None:
    longest = pool.vocabulary.longest_token
    with pytest.raises(InvalidArgument, match="at least 11 tokens, more than the context of 10") as caught:
        await pool.encode("a" * (longest * 10 + 1), max_ids=10, field="messages")
    assert (caught.value.field, caught.value.reason) == ("messages", "CONTEXT_LENGTH_EXCEEDED")
    assert len(await pool.encode("a" * (longest * 10), max_ids=10)) > 10


async def test_what_is_no_text_is_refused(pool: TokenizerPool) -> None:
    with pytest.raises(InvalidArgument, match="surrogate") as caught:
        await pool.encode("a\ud800")
    assert caught.value.field == "prompt"


async def test_a_closed_pool_says_try_again() -> None:
    pool = TokenizerPool(toys.tokenizer("words").to_str().encode())
    pending = asyncio.create_task(pool.encode("fox"))
    await asyncio.sleep(0)
    pool.close()
    assert await pending == (2,)
    with pytest.raises(Unavailable):
        await pool.encode("a fox")


def test_a_broken_file_is_named() -> None:
    for content in (b"\xff", b"{}", b"no json"):
        with pytest.raises(FailedPrecondition) as caught:
            TokenizerPool(content)
        assert caught.value.field == "tokenizer.json"
