"""Grammars at work, by llguidance: compiled in threads, held to limits, kept for the next request.

    start ──▶ thread: tokenizer (once) ─▶ compile, or from the cache ─▶ a matcher per output, brought to its end

The core asks the matchers of requests that run; it waits for no thread.
"""

from __future__ import annotations

import json
import re
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
_WHITESPACE = r" |\r?\n[ \t]{0,32}"
_NAMES_TOKEN = re.compile(r"<[^<>\s\"]+>")
"""Where a Lark grammar may name a token, <[17]> or <|name|>."""
_log = Log("engine.grammars")


class Matcher:
    """One output in its grammar. Free until the ids of `starts_after` have come one after another."""

    __slots__ = ("_bytes", "_matcher", "_never", "_since", "_starts_after", "_tail", "error")

    def __init__(self, matcher: LLMatcher, starts_after: Sequence[int], never: int, vocab_size: int) -> None:
        """`never` has a bit for each id that no mask may have."""
        self._matcher = matcher
        self._starts_after = array("i", starts_after)
        self._tail = array("i")  # the last ids taken, while it is free
        self._since = None if starts_after else 0  # ids taken since it is in force
        self._never = never
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
        computed = self._matcher.compute_bitmask()[: self._bytes]
        allowed = int.from_bytes(computed, "little") & ~self._never
        self._check()
        if not allowed and self.error is None and not self._matcher.is_accepting():
            self.error = "no token of the vocabulary can follow what it has begun"
        return bytearray(allowed.to_bytes(self._bytes, "little"))

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
        self._special: Mapping[str, int] = {}
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
        never = set(self._tokenizer.eos_tokens if self._tokenizer is not None else ())
        if kind != "lark" or not _NAMES_TOKEN.search(text):
            never.update(self._special.values())
        bits = sum(1 << token for token in never)
        matchers = []
        for output in outputs:
            matcher = Matcher(compiled.deep_copy(), starts_after, bits, self._vocab_size)
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
        grammar = _grammar(kind, text)
        if any(special in text.replace("\\", "") for special in self._special):
            grammar = _unforced(grammar)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
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
        self._special = special_tokens(text, self._vocab_size)
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


def _unforced(grammar: str) -> str:
    """The same grammar, in which no text is forced to be the tokens that it would be in a prompt.

    A text that is also a special token's would be forced to be that token, which is no text.
    """
    if grammar.lstrip().startswith("{"):
        [inner] = json.loads(grammar)["grammars"]
        schema = inner["json_schema"]
        grammar = inner["lark_grammar"] if schema is None else f"start: %json {json.dumps(schema)}"
    return f'%llguidance {{"no_forcing": true}}\n{grammar}'


def special_tokens(tokenizer: str, vocab_size: int) -> dict[str, int]:
    """The special tokens of a tokenizer.json: what each is written as, and its id."""
    found = re.search(r'"added_tokens"\s*:\s*(?=\[)', tokenizer)
    added = json.JSONDecoder().raw_decode(tokenizer, found.end())[0] if found else []
    return {token["content"]: token["id"] for token in added if token.get("special") and token["id"] < vocab_size}


def _one_line(text: str) -> str:
    """What the library says, for a client: cut, and without its remarks about itself."""
    said = " ".join(text.replace("<non-verbose/>", "").split())
    return "no output can follow it" if said.startswith("NoExtension") else said[:300]
