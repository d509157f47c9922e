"""Grammars at work, by llguidance: compiled in threads, held to limits, kept for the next request.

    start ──▶ thread: tokenizer (once) ─▶ compile, or from the cache ─▶ a matcher per output, brought to its end

The core asks the matchers of requests that run; it waits for no thread.
"""

from __future__ import annotations

import json
import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.common.errors import InvalidArgument, Unimplemented
from services.common.logs import Log

LONGEST_TEXT = 256 * 1024
"""Characters of a schema, an expression or a grammar."""
KEPT = 32
"""Compiled grammars that are kept, those used last."""
LEXER_FUEL = 100_000
"""What the library may spend on the states of one grammar. A tenth of its own limit: with that, 30 hostile
characters cost 200 MB and seconds of every mask; with this some 10 MB, and 10,000 words still compile."""
_WHITESPACE = r"[ \t\r\n]{1,64}"
_log = Log("engine.grammars")


class Matcher:
    """One output in its grammar. Free until the ids of `starts_after` have come one after another."""

    __slots__ = ("_bytes", "_ends", "_matcher", "_since", "_starts_after", "_tail", "error")

    def __init__(self, matcher: LLMatcher, starts_after: Sequence[int], ends: Sequence[int], vocab_size: int) -> None:
        """`ends` are the tokenizer's own ends of text, which are left to the core."""
        self._matcher = matcher
        self._starts_after = array("i", starts_after)
        self._tail = array("i")  # the last ids taken, while it is free
        self._since = None if starts_after else 0  # ids taken since it is in force
        self._ends = tuple(ends)
        self._bytes = -(-vocab_size // 32) * 4
        self.error: str | None = None

    @property
    def may_end(self) -> bool:
        """Whether the output is complete if nothing follows. What is free may end."""
        return self._since is None or self._matcher.is_accepting()

    def take(self, ids: Sequence[int]) -> int:
        """Goes on by these ids; how many of them the grammar allows."""
        free = 0
        if self._since is None:
            while free < len(ids) and self._tail[-len(self._starts_after) :] != self._starts_after:
                self._tail.append(ids[free])
                free += 1
            if self._tail[-len(self._starts_after) :] != self._starts_after:
                return free
            self._since = 0
        taken: int = self._matcher.try_consume_tokens(list(ids[free:]))
        self._check()
        self._since += taken
        return free + taken

    def give_back(self, count: int) -> None:
        """Undoes the last ids taken, into the part that was free if need be."""
        held = 0 if self._since is None else min(count, self._since)
        if held:
            self._matcher.rollback(held)
            self._check()
            assert self._since is not None
            self._since -= held
        if count > held:
            self._since = None
            del self._tail[len(self._tail) - (count - held) :]

    def mask(self) -> bytearray:
        """Which ids may come next, without the ends of the text."""
        if self._since is None:
            return bytearray(b"\xff") * self._bytes
        mask = bytearray(self._matcher.compute_bitmask())[: self._bytes]
        self._check()
        for end in self._ends:
            mask[end >> 3] &= ~(1 << (end & 7)) & 0xFF
        return mask

    def _check(self) -> None:
        if self.error is None and self._matcher.is_error():
            self.error = _one_line(self._matcher.get_error())


class Compiling:
    """A grammar on its way."""

    def __init__(self, future: Future[tuple[Matcher, ...]], limit_s: float) -> None:
        self._future = future
        self._limit_s = limit_s
        self._until = time.monotonic() + limit_s

    @property
    def done(self) -> bool:
        """It is usable, or there is an error."""
        return self._future.done() or time.monotonic() >= self._until

    @property
    def error(self) -> str | None:
        """Why it will never be usable."""
        if not self._future.done():
            return f"the grammar took longer than {self._limit_s:g} s to compile"
        error = self._future.exception()
        return None if error is None else str(error)

    @property
    def matchers(self) -> tuple[Matcher, ...]:
        """One per output."""
        return self._future.result()

    def cancel(self) -> None:
        """A thread that is at it goes on to its end, which the limits of the library bound."""
        self._future.cancel()


class Grammars:
    """Compiles for one model. `changed` is called in a thread of the pool whenever something is done."""

    def __init__(
        self,
        files: Mapping[str, bytes],
        vocab_size: int,
        *,
        threads: int,
        limit_s: float,
        changed: Callable[[], object],
    ) -> None:
        self._files = files
        self._vocab_size = vocab_size
        self._limit_s = limit_s
        self._changed = changed
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="grammar")
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[tuple[str, str], LLMatcher] = OrderedDict()

    def start(self, kind: str, text: str, starts_after: tuple[int, ...], outputs: Sequence[Sequence[int]]) -> Compiling:
        """Begins to compile. Raises InvalidArgument and Unimplemented for what is refused at once."""
        if len(text) > LONGEST_TEXT:
            raise InvalidArgument(
                f"constraint.{kind} has {len(text)} characters, above {LONGEST_TEXT}", field="constraint"
            )
        if "tokenizer.json" not in self._files:
            raise Unimplemented("grammars need a tokenizer.json, which the model does not have", field="constraint")
        future = self._pool.submit(self._make, kind, text, starts_after, [list(output) for output in outputs])
        future.add_done_callback(lambda _: self._changed())
        return Compiling(future, self._limit_s)

    def close(self) -> None:
        """Ends the threads once they are done with what they are at."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _make(
        self, kind: str, text: str, starts_after: tuple[int, ...], outputs: list[list[int]]
    ) -> tuple[Matcher, ...]:
        compiled = self._compile(kind, text)
        ends = self._tokenizer.eos_tokens if self._tokenizer is not None else []
        matchers = []
        for output in outputs:
            matcher = Matcher(compiled.deep_copy(), starts_after, ends, self._vocab_size)
            taken = matcher.take(output)
            if taken < len(output):
                raise ValueError(f"the output received so far leaves the grammar at token {taken}")
            matchers.append(matcher)
        return tuple(matchers)

    def _compile(self, kind: str, text: str) -> LLMatcher:
        """A matcher at the beginning, to be copied only. Raises ValueError where the grammar is no good."""
        key = (kind, text)
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return found
        limits = LLParserLimits(initial_lexer_fuel=LEXER_FUEL, verbose_errors=False)
        matcher = LLMatcher(self._tokenizer, _grammar(kind, text), log_level=0, limits=limits)
        matcher.compute_bitmask()  # builds what is built lazily, and finds out that nothing can be said
        if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
            raise ValueError(_one_line(matcher.get_error()))
        with self._lock:
            self._compiled[key] = matcher
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return matcher

    def _make_tokenizer(self) -> LLTokenizer:
        began = time.monotonic()
        text = self._files["tokenizer.json"].decode()
        ends = model_ends(self._files, self._vocab_size)
        tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=ends or None)
        _log.info("tokenizer for grammars made", seconds=round(time.monotonic() - began, 3))
        return tokenizer


def model_ends(files: Mapping[str, bytes], vocab_size: int) -> list[int]:
    """The ends of text that the model's own files name; none where they name none."""
    for name in ("generation_config.json", "config.json"):
        if name in files:
            named = json.loads(files[name]).get("eos_token_id")
            ends = named if isinstance(named, list) else [named]
            ends = [end for end in ends if isinstance(end, int) and 0 <= end < vocab_size]
            if ends:
                return ends
    return []


def _grammar(kind: str, text: str) -> str:
    """As llguidance takes it. Whitespace between the parts of a JSON text is bounded: a model may never stop it."""
    grammar: str
    if kind in {"json_schema", "json_object"}:
        schema = text if kind == "json_schema" else '{"type": "object"}'
        schema = "{}" if schema.strip() == "true" else schema  # options are for objects only
        grammar = LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE})
    elif kind == "regex":
        grammar = LLMatcher.grammar_from_regex(text)
    elif kind == "lark":
        grammar = LLMatcher.grammar_from_lark(text)
    else:
        raise ValueError(f"constraints of kind {kind!r} are not known")
    return grammar


def _one_line(text: str) -> str:
    """What the library says, for a client: cut, and without its remarks about itself."""
    said = " ".join(text.replace("<non-verbose/>", "").split())
    return "no output can follow it" if said.startswith("NoExtension") else said[:300]
