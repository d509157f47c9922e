"""Text to token ids and back, off the event loop. Knows one model's tokenizer; nothing of requests.

Two traps shape it: a tokenizer object must not be used by two threads at once, so each thread has
its own; and of the library's calls only the batch ones release the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import tokenizers

from services.common.errors import FailedPrecondition, InvalidArgument, TriptychError, Unavailable
from services.gateway.limits import check_text
from services.gateway.text_files import read_text
from services.gateway.vocabulary import Vocabulary, read_joining

T = TypeVar("T")

_SHORT = 16384  # characters that take a few milliseconds


class Tokenizer:
    """One tokenizer object, for one thread at a time."""

    __slots__ = ("_inner",)

    def __init__(self, tokenizer_json: str) -> None:
        self._inner = tokenizers.Tokenizer.from_str(tokenizer_json)
        self._inner.no_truncation()
        self._inner.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text; the lock is free meanwhile."""
        return self._inner.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ids; ids that the vocabulary lacks stand for nothing."""
        return self._inner.decode(ids, skip_special_tokens=skip_special_tokens)

    def pieces(self) -> list[str | None]:
        """What decoding starts from, per id. An added token may differ from its content: it is normalized."""
        last = max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1)
        return [self._inner.id_to_token(token_id) for token_id in range(last + 1)]

    def id_of(self, token: str) -> int | None:
        """The id of a token, by its content."""
        return self._inner.token_to_id(token)

    def special_ids(self) -> list[int]:
        """Ids that text with special tokens skipped leaves out."""
        added = self._inner.get_added_tokens_decoder()
        special = {token.content for token in added.values() if token.special}
        return [token_id for token_id in added if self._inner.id_to_token(token_id) in special]

    def added(self) -> dict[str, int]:
        """Tokens that are cut out of a text before anything else, by their text; special ones are among them."""
        return {token.content: token_id for token_id, token in self._inner.get_added_tokens_decoder().items()}


class TokenizerPool:
    """Threads with a tokenizer each: one lane for short texts, one for long ones, so that none waits for a book."""

    def __init__(self, tokenizer_json: bytes, *, threads: int = 2) -> None:
        # The pool is the parallelism; a second one inside the library would let a long text hold up short ones.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self._json = read_text({"tokenizer.json": tokenizer_json}, "tokenizer.json")
        self._local = threading.local()
        self._closed = False
        self._short = ThreadPoolExecutor(max(1, threads - 1), thread_name_prefix="text-short")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="text-long")
        self.vocabulary = self._first_read()
        self._long.submit(self._tokenizer)  # so that the first long text does not wait for it

    def id_of(self, token: str) -> int | None:
        """The id of a token, by its content. Waits for a thread: for start-up only."""
        return self._short.submit(lambda: self._tokenizer().id_of(token)).result()

    async def run(self, work: Callable[[Tokenizer], T], *, size: int = 0) -> T:
        """Runs work on a thread that has a tokenizer; `size` in characters chooses the lane."""
        lane = self._short if size <= _SHORT else self._long
        if self._closed:
            raise Unavailable("the model is being replaced", reason="NOT_READY", retry_after_ms=1000)
        return await asyncio.get_running_loop().run_in_executor(lane, lambda: work(self._tokenizer()))

    async def encode(
        self, text: str, *, add_special_tokens: bool = True, max_ids: int | None = None, field: str = "prompt"
    ) -> tuple[int, ...]:
        """The ids of a text; a text that can't fit into `max_ids` is refused, if possible before it is read."""
        check_text(text, field)
        if max_ids is not None:
            self.refuse_hopeless(text, max_ids, field)
        return tuple(await self.run(lambda t: t.encode(text, add_special_tokens=add_special_tokens), size=len(text)))

    async def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """The text of ids."""
        return await self.run(lambda t: t.decode(ids, skip_special_tokens=skip_special_tokens), size=len(ids) * 4)

    def refuse_hopeless(self, text: str, max_ids: int, field: str) -> None:
        """Raises for a text so long that even the longest tokens would be too many."""
        least = -(-len(text) // self.vocabulary.longest_token)
        if least > max_ids:
            raise InvalidArgument(
                f"{field}: {len(text)} characters are at least {least} tokens, more than the context of {max_ids}",
                field=field,
                reason="CONTEXT_LENGTH_EXCEEDED",
            )

    def close(self) -> None:
        """Lets the threads end once they have done what they were given."""
        self._closed = True
        self._short.shutdown(wait=False)
        self._long.shutdown(wait=False)

    def _tokenizer(self) -> Tokenizer:
        try:
            tokenizer: Tokenizer = self._local.tokenizer
        except AttributeError:
            tokenizer = self._local.tokenizer = Tokenizer(self._json)
        return tokenizer

    def _first_read(self) -> Vocabulary:
        reading = self._short.submit(self._read_vocabulary)
        error = reading.exception()
        if error is None:
            return reading.result()
        self.close()
        if isinstance(error, TriptychError):
            raise error
        raise FailedPrecondition(f"tokenizer.json: {error}", field="tokenizer.json") from error

    def _read_vocabulary(self) -> Vocabulary:
        tokenizer = self._tokenizer()
        decoder = json.loads(self._json).get("decoder")
        joining = read_joining(decoder)
        return Vocabulary(tokenizer.pieces(), tokenizer.special_ids(), joining, added=tokenizer.added())
