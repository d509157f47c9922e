"""Scripts of a simulated worker: what it answers to which request, and where it fails.

    {"requests": [ENTRY, …], "otherwise": ENTRY}

A request takes the first entry whose `prompt` or `contains` fits; entries with neither are taken in
the order in which requests arrive, each once; then comes `otherwise`; then random text. An entry:

    prompt        the prompt begins with this: text, or a list of token ids
    contains      the prompt contains this text (chat templates put their own text first)
    text          the answer as text, encoded with the model's tokenizer
    tokens        the answer as a list of token ids
    prefer        per position a ranked list of ids or one-token texts; the first that may be sampled
                  is taken. One flat list holds for every position
    random        true: random printable tokens
    then          after the answer's end: "eos" (the default), "random" or "repeat"
    delay_ms      each step that samples or pools for the request takes this much longer
    first_delay_ms  the same, for the first token only
    hang_at       the step that would sample this output token (counted from 0; or pool) never ends,
    hang_ms       or only after so many milliseconds
    die_at        the process exits there
    fail_at       the step fails there, as a whole
    pooled        the vector of a request that pools: a list of numbers; unset means one that the prompt fixes
    nan_at        the row answers there that its logits are not finite
    times         how often in this process the entry's hang, fail or nan happens; unset means always

A request that comes with `hang_at` or `die_at` outputs already (a replay) passes that point, unless
it is 0. A token that masks, banned ids or min_tokens forbid is replaced by a random one that may be
sampled. An unknown key is an error.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from services.common.errors import InvalidArgument

Encode = Callable[[str], list[int]]
Decode = Callable[[Iterable[int]], str]
_FAULTS = ("hang_at", "die_at", "fail_at", "nan_at", "times")


@dataclass(slots=True, eq=False)
class Entry:
    """One answer. `ranked(i)` gives the ids wanted for output token i, best first."""

    prompt: list[int] | None = None
    prompt_text: str | None = None
    contains: str | None = None
    answer: list[list[int]] = field(default_factory=list)
    every: list[int] = field(default_factory=list)
    random: bool = False
    then: str = "eos"
    delay_ms: float = 0.0
    first_delay_ms: float = 0.0
    pooled: list[float] | None = None
    hang_ms: float | None = None
    hang_at: int | None = None
    die_at: int | None = None
    fail_at: int | None = None
    nan_at: int | None = None
    times: int | None = None

    @property
    def by_order(self) -> bool:
        """Whether the entry is taken by the order of arrival."""
        return self.prompt is None and self.prompt_text is None and self.contains is None

    @property
    def plain(self) -> bool:
        """Random ids and nothing else: no delay, no fault."""
        faults = (self.hang_at, self.die_at, self.fail_at, self.nan_at)
        delays = self.delay_ms or self.first_delay_ms
        answers = self.every or self.answer or not (self.random or self.then == "random")
        return not answers and not delays and all(fault is None for fault in faults)

    def fits(self, prompt: list[int], text: Callable[[], str]) -> bool:
        """Whether the entry names this prompt."""
        if self.prompt is not None:
            return prompt[: len(self.prompt)] == self.prompt
        if self.prompt_text is not None:
            return text().startswith(self.prompt_text)
        return self.contains is not None and self.contains in text()

    def ranked(self, index: int, eos_ids: tuple[int, ...]) -> list[int]:
        """The ids wanted for output token `index`, best first; empty means random."""
        if self.every:
            return self.every
        if index < len(self.answer):
            return self.answer[index]
        if self.random or self.then == "random":
            return []
        if self.then == "repeat" and self.answer:
            return self.answer[index % len(self.answer)]
        return list(eos_ids)

    def delay_s(self, index: int) -> float:
        """Seconds that the step which samples output token `index` takes longer."""
        return (self.delay_ms + (self.first_delay_ms if index == 0 else 0.0)) / 1000

    def faults_at(self, index: int) -> bool:
        """Whether something is scripted to go wrong where output token `index` is sampled."""
        return index in (self.hang_at, self.die_at, self.fail_at, self.nan_at)

    def fires(self, at: int | None) -> bool:
        """Counts one failure down; False once all `times` are used up or there is none here."""
        if at is None or self.times == 0:
            return False
        if self.times is not None:
            self.times -= 1
        return True


class Script:
    """Gives each request its entry, and the same one when it comes again."""

    def __init__(self, entries: list[Entry], otherwise: Entry) -> None:
        self._named = [entry for entry in entries if not entry.by_order]
        self._in_order = [entry for entry in entries if entry.by_order]
        self._otherwise = otherwise
        self._given: dict[tuple[str, int, tuple[int, ...]], Entry] = {}

    def entry_for(self, request_id: str, seed: int, prompt: list[int], decode: Decode) -> Entry:
        """The entry of a request; (id, seed, prompt) tells whether it came before."""
        for entry in self._named:
            if entry.fits(prompt, lambda: decode(prompt)):
                return entry
        key = (request_id, seed, tuple(prompt))
        if key not in self._given:
            self._given[key] = self._in_order.pop(0) if self._in_order else self._otherwise
        return self._given[key]


def no_script() -> Script:
    """Random text for every request."""
    return Script([], Entry(random=True))


def read_script(path: str, encode: Encode, vocab_size: int) -> Script:
    """The script in a file. Raises InvalidArgument saying what is wrong with it, and where."""
    try:
        document = json.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise _wrong(f"cannot read {path}: {error}") from None
    return parse_script(document, encode, vocab_size)


def parse_script(document: Any, encode: Encode, vocab_size: int) -> Script:
    """The script in a JSON document."""
    _check_keys(document, ("requests", "otherwise"), "the script")
    entries = document.get("requests", [])
    if not isinstance(entries, list):
        raise _wrong("requests must be a list")
    parsed = [_entry(entry, f"requests[{index}]", encode) for index, entry in enumerate(entries)]
    otherwise = _entry(document.get("otherwise", {"random": True}), "otherwise", encode)
    for entry in (*parsed, otherwise):
        for token in (*entry.every, *(token for ranked in entry.answer for token in ranked)):
            if token >= vocab_size:
                raise _wrong(f"token id {token} is outside the vocabulary of {vocab_size}")
    return Script(parsed, otherwise)


_ANSWERS = ("text", "tokens", "prefer", "random")
_KEYS = tuple(
    sorted({item.name for item in fields(Entry)} - {"prompt_text", "answer", "every"} | set(_ANSWERS) | {"prompt"})
)


def _entry(source: Any, where: str, encode: Encode) -> Entry:
    _check_keys(source, _KEYS, where)
    entry = Entry(contains=_typed(source, "contains", str, where), random=source.get("random") is True)
    given = [name for name in _ANSWERS if name in source]
    if len(given) > 1:
        raise _wrong(f"{where} has both {given[0]!r} and {given[1]!r}: one answer is enough")
    prompt = source.get("prompt")
    if isinstance(prompt, str):
        entry.prompt_text = prompt
    elif prompt is not None:
        entry.prompt = _ids(prompt, f"{where}.prompt")
    if "text" in source:
        entry.answer = [[token] for token in encode(_typed(source, "text", str, where))]
    elif "tokens" in source:
        entry.answer = [[token] for token in _ids(source["tokens"], f"{where}.tokens")]
    elif "prefer" in source:
        _prefer(entry, source["prefer"], f"{where}.prefer", encode)
    entry.then = source.get("then", "eos")
    if entry.then not in ("eos", "random", "repeat"):
        raise _wrong(f"{where}.then is {entry.then!r}, not 'eos', 'random' or 'repeat'")
    if not given:
        entry.random = True
    entry.pooled = _vector(source.get("pooled"), f"{where}.pooled")
    for name in ("delay_ms", "first_delay_ms", "hang_ms"):
        value = _typed(source, name, (int, float), where)
        if value is not None:
            setattr(entry, name, float(value))
    for name in _FAULTS:
        setattr(entry, name, _typed(source, name, int, where))
    return entry


def _prefer(entry: Entry, value: Any, where: str, encode: Encode) -> None:
    if not isinstance(value, list) or not value:
        raise _wrong(f"{where} must be a list that is not empty")
    if all(isinstance(item, list) for item in value):
        entry.answer = [[_token(item, where, encode) for item in ranked] for ranked in value]
    else:
        entry.every = [_token(item, where, encode) for item in value]


def _token(value: Any, where: str, encode: Encode) -> int:
    if isinstance(value, str):
        ids = encode(value)
        if len(ids) != 1:
            raise _wrong(f"{where}: {value!r} is {len(ids)} tokens, not one")
        return ids[0]
    return _ids([value], where)[0]


def _ids(value: Any, where: str) -> list[int]:
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise _wrong(f"{where} must be a list of token ids")
    return value


def _vector(value: Any, where: str) -> list[float] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value or not all(type(item) in (int, float) for item in value):
        raise _wrong(f"{where} must be a list of numbers that is not empty")
    return [float(item) for item in value]


def _typed(source: dict[str, Any], name: str, kind: type | tuple[type, ...], where: str) -> Any:
    value = source.get(name)
    if value is None:
        return None
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, (int, float)) and value < 0):
        raise _wrong(f"{where}.{name} is {value!r}, which it does not take")
    return value


def _check_keys(source: Any, known: tuple[str, ...], where: str) -> None:
    if not isinstance(source, dict):
        raise _wrong(f"{where} must be an object")
    for name in source:
        if name not in known:
            match = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {match[0]!r}?" if match else f"; it knows {', '.join(known)}"
            raise _wrong(f"unknown key {name!r} in {where}{hint}")


def _wrong(message: str) -> InvalidArgument:
    return InvalidArgument(f"script: {message}", field="script")
