"""Prompts of an exact number of tokens, cut from real English text that every Python has with it.

Random ids would be easier, but decode into text that no model has seen, and prefix caches and
tokenizers behave unlike they do on text.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import aiohttp

_TRIES = 50
_SLACK = (0, -1, 1, -2, 2)
_PIECE = 20_000


class Tokenizer(Protocol):
    """Text to ids and back, without special tokens."""

    async def encode(self, text: str) -> Sequence[int]:
        """The ids of a text."""
        ...

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        ...


class LocalTokenizer:
    """From a tokenizer.json, so that any server can be measured."""

    def __init__(self, path: Path) -> None:
        """`path` is the file or a folder that holds it."""
        from tokenizers import Tokenizer as Rust

        self._rust = Rust.from_file(str(path / "tokenizer.json" if path.is_dir() else path))

    async def encode(self, text: str) -> Sequence[int]:
        """The ids of a text."""
        ids: list[int] = self._rust.encode(text, add_special_tokens=False).ids
        return ids

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        text: str = self._rust.decode(list(ids), skip_special_tokens=False)
        return text


class ServerTokenizer:
    """Through /tokenize and /detokenize of the server that is measured."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, model: str) -> None:
        self._session, self._url, self._model = session, base_url, model

    async def encode(self, text: str) -> Sequence[int]:
        """The ids of a text."""
        body = {"model": self._model, "prompt": text, "add_special_tokens": False}
        async with self._session.post(f"{self._url}/tokenize", json=body) as answer:
            answer.raise_for_status()
            ids: list[int] = (await answer.json())["tokens"]
        return ids

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        body = {"model": self._model, "tokens": list(ids)}
        async with self._session.post(f"{self._url}/detokenize", json=body) as answer:
            answer.raise_for_status()
            text: str = (await answer.json())["prompt"]
        return text


class Prompts:
    """Windows of the text. Equal seeds give equal prompts; other seeds share no prefix."""

    def __init__(self, tokenizer: Tokenizer, ids: Sequence[int]) -> None:
        self._tokenizer, self._ids = tokenizer, ids

    @classmethod
    async def load(cls, tokenizer: Tokenizer) -> Prompts:
        """Tokenizes the text once, in pieces that any server takes."""
        text = reference_text()
        ids: list[int] = []
        for start in range(0, len(text), _PIECE):
            ids += await tokenizer.encode(text[start : start + _PIECE])
        return cls(tokenizer, ids)

    async def make(self, seed: int, count: int, tokens: int, shared: int) -> list[str]:
        """`count` prompts of `tokens` tokens, of which the first `shared` are the same in all."""
        rng = random.Random(seed)
        if not shared:
            return [await self._window(rng, tokens) for _ in range(count)]
        prefix = await self._window(rng, shared) + "\n\n"
        return [await self._fit(prefix, await self._window(rng, tokens - shared), tokens) for _ in range(count)]

    async def _window(self, rng: random.Random, tokens: int) -> str:
        """Cut anywhere; where the cut changes how the edges tokenize, another place is tried."""
        for _ in range(_TRIES):
            start = rng.randrange(0, len(self._ids) - tokens - _SLACK[-1])
            for slack in _SLACK:
                text = await self._tokenizer.decode(self._ids[start : start + tokens + slack])
                if len(await self._tokenizer.encode(text)) == tokens:
                    return text
        raise ValueError(f"no text of exactly {tokens} tokens was found")

    async def _fit(self, prefix: str, rest: str, tokens: int) -> str:
        """Two texts joined may have a token more or less than the sum; the end is cut to fit."""
        ids = await self._tokenizer.encode(prefix + rest)
        return prefix + rest if len(ids) <= tokens else await self._tokenizer.decode(ids[:tokens])


def reference_text() -> str:
    """The Python language reference as this interpreter carries it, about 650 kB."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    text = text.encode("ascii", "ignore").decode()
    for pattern, replacement in ((r"[*=\-]{4,}", ""), (r"[ \t]+", " "), (r"\n{3,}", "\n\n")):
        text = re.sub(pattern, replacement, text)
    return text
