"""Prompts of an exact number of tokens, with a tokenizer whose cuts are easy to see through."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from services.cli.prompts import Prompts, reference_text


class Pieces:
    """Words with the space before them, at most 5 characters each: joining two texts may merge tokens."""

    def __init__(self) -> None:
        self.words: list[str] = []
        self.ids: dict[str, int] = {}

    async def encode(self, text: str) -> Sequence[int]:
        found = re.findall(r"\s*\S{1,5}|\s+$", text)
        return [self.ids.setdefault(word, len(self.ids)) for word in found]

    async def decode(self, ids: Sequence[int]) -> str:
        words = {number: word for word, number in self.ids.items()}
        return "".join(words[number] for number in ids)


@pytest.fixture
async def prompts() -> tuple[Prompts, Pieces]:
    tokenizer = Pieces()
    text = reference_text()[:60_000]
    return Prompts(tokenizer, await tokenizer.encode(text)), tokenizer


async def test_prompts_have_the_asked_length(prompts) -> None:
    made, tokenizer = prompts
    texts = await made.make(seed=3, count=5, tokens=40, shared=0)
    assert [len(await tokenizer.encode(text)) for text in texts] == [40] * 5
    assert len(set(texts)) == 5


async def test_equal_seeds_give_equal_prompts(prompts) -> None:
    made, _ = prompts
    assert await made.make(7, 3, 20, 0) == await made.make(7, 3, 20, 0)
    assert await made.make(7, 3, 20, 0) != await made.make(8, 3, 20, 0)


async def test_a_shared_prefix_is_shared(prompts) -> None:
    made, tokenizer = prompts
    texts = await made.make(seed=1, count=4, tokens=60, shared=40)
    ids = [list(await tokenizer.encode(text)) for text in texts]
    assert len({tuple(row[:40]) for row in ids}) == 1
    assert len({tuple(row) for row in ids}) == 4
    assert all(abs(len(row) - 60) <= 2 for row in ids)


async def test_no_text_of_that_length(prompts) -> None:
    _, tokenizer = prompts
    made = Prompts(tokenizer, await tokenizer.encode("one two three four"))
    with pytest.raises(ValueError, match="empty range"):
        await made.make(0, 1, 100, 0)
