"""Outputs drawn at random under a constraint, byte by byte: what a model could say that means no good."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from functools import cache
from typing import Any

import jsonschema

from services.engine.grammars import Grammars, Matcher
from services.gateway.request import Constraint
from tests.engine.test_grammars import byte_letters

FORMATS = ("ipv4", "ipv6", "uuid", "email")
"""Those that are a matter of letters alone: which years have a 29th of February is not."""
CLOSERS = b'"}]'
SPECIAL = ("<|end|>", "</think>", "[TOOL_CALLS]")
"""Special tokens behind the 256 bytes."""
END, THINK, CALLS = 256, 257, 258


def _tokenizer() -> str:
    """The 256 bytes and some special tokens."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [
        {"id": 256 + at, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": True}
        for at, name in enumerate(SPECIAL)
    ]
    made = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {letter: byte for byte, letter in byte_letters().items()}, "merges": []},
    }
    return json.dumps(made)


@cache
def grammars() -> Grammars:
    """The engine's, for this vocabulary."""
    files = {"tokenizer.json": _tokenizer().encode(), "config.json": b'{"eos_token_id": 256}'}
    return Grammars(files, 256 + len(SPECIAL), threads=1, limit_s=60.0, changed=lambda: None)


def matcher(constraint: Constraint) -> Matcher:
    """As the engine makes it. Raises ValueError where it makes none."""
    compiling = grammars().start(constraint.kind, constraint.text, constraint.starts_after, [()])
    return compiling.matchers[0]


def accepts(constraint: Constraint, text: str | Sequence[int]) -> bool:
    """Whether this is a whole output."""
    ids = list(text.encode()) if isinstance(text, str) else list(text)
    made = matcher(constraint)
    return made.take(ids) == len(ids) and made.may_end


def begins(constraint: Constraint, text: str) -> int:
    """How many of these bytes an output may begin with."""
    return matcher(constraint).take(list(text.encode()))


def walk(made: Matcher, draw: random.Random, hints: Sequence[bytes] = (), most: int = 600) -> bytes | None:
    """Allowed bytes until the output ends; None where it became too long. `hints` are tried where they fit."""
    out = bytearray()
    while len(out) < most:
        if hints and draw.random() < 0.25:
            piece = draw.choice(hints)
            out += piece[: made.take(list(piece))]
        mask = made.mask()
        assert made.error is None, made.error
        choices = [token for token in range(256 + len(SPECIAL)) if mask[token >> 3] >> (token & 7) & 1]
        if not choices or (made.may_end and draw.random() < 0.6):
            assert made.may_end, f"no way on from {bytes(out)!r}"
            return bytes(out)
        assert max(choices) < 256, f"a special token may follow {bytes(out)!r}"
        closing = [byte for byte in choices if byte in CLOSERS]
        eager = 0.35 + 0.6 * len(out) / most
        plain = [byte for byte in choices if 32 <= byte < 127]
        if closing and draw.random() < eager:
            byte = draw.choice(closing)
        else:
            byte = draw.choice(plain if plain and draw.random() < 0.9 else choices)
        assert made.take([byte]) == 1
        out.append(byte)
    return None


def hints_of(schema: object) -> list[bytes]:
    """What may be said amiss under a schema: its own words, spelled in other ways, and numbers of all kinds."""
    words: set[str] = set()
    level: list[Any] = [schema]
    while level and len(words) < 60:
        value = level.pop()
        if isinstance(value, dict):
            words.update(value)
            level += value.values()
        elif isinstance(value, list):
            level += value
        elif isinstance(value, str):
            words.add(value)
        elif isinstance(value, int | float):
            words.add(str(value))
    said = ["1", "-1", "0.5", "1.0", "1e3", "true", "null", '"', '":', "{}", "[]", ',"', "\\", "é", "   "]
    for word in sorted(words):
        said += [word, f'"{word}":', f'"{word}"', f',"{word}":']
        if word:
            said.append(f',"\\u{ord(word[0]) % 65536:04x}{word[1:]}":')
    return [piece.encode(errors="replace") for piece in said]


def validator(schema: Any) -> Any:
    """The judge: jsonschema, with numbers as they are written."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    kind = jsonschema.validators.validator_for(exact, default=jsonschema.Draft202012Validator)
    return kind(exact, format_checker=jsonschema.FormatChecker(FORMATS))


def read(text: bytes) -> Any:
    """A JSON text, with numbers as they are written."""
    return json.loads(text.decode(), parse_float=_number)


def _number(text: str) -> Decimal | float:
    try:
        return Decimal(text)
    except InvalidOperation:  # an exponent of hundreds of digits
        return float(text)
