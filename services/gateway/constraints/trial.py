"""A grammar tried on the library, without the model's vocabulary: what it refuses here it refuses in the engine."""

from __future__ import annotations

import json
import math
import re
from fractions import Fraction
from functools import cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from services.gateway.constraints.lark import with_one_token
from services.gateway.constraints.schemas.writing import MOST_REMAINDERS, remainders
from services.gateway.request import Constraint

LEXER_FUEL = 100_000
"""As the engine has it: what the library may spend on the states of one grammar."""
_EXCERPT = re.compile(r"\n\s*\d+ \|")
"""Where the library begins to show the grammar, which no client wrote in this form."""
_MULTIPLE = re.compile(r'(?<!\\)"multipleOf":(\d[\d.e+-]*)')
_END, _TOKEN = 256, 257


def complaint(constraint: Constraint) -> str | None:
    """Why no output can follow a constraint, in a line; None if some can."""
    if math.lcm(*(remainders(Fraction(found[1])) for found in _MULTIPLE.finditer(constraint.text))) > MOST_REMAINDERS:
        return f"what must be a multiple in its schemas has more than {MOST_REMAINDERS} remainders to tell apart"
    limits = LLParserLimits(initial_lexer_fuel=LEXER_FUEL, verbose_errors=False)
    matcher = LLMatcher(_bytewise(), _grammar(constraint), log_level=0, limits=limits)
    matcher.compute_bitmask()
    if matcher.is_error() or (matcher.is_stopped() and not matcher.is_accepting()):
        said = " ".join(_EXCERPT.split(matcher.get_error().replace("<non-verbose/>", ""))[0].split())
        return "no output can follow it" if said.startswith("NoExtension") else said[:300]
    return None


def _grammar(constraint: Constraint) -> str:
    match constraint.kind:
        case "json_schema":
            return str(LLMatcher.grammar_from_json_schema(constraint.text))
        case "json_object":
            return str(LLMatcher.grammar_from_json_schema('{"type": "object"}'))
        case "regex":
            return str(LLMatcher.grammar_from_regex(constraint.text))
        case "lark":
            return str(LLMatcher.grammar_from_lark(with_one_token(constraint.text, f"<[{_TOKEN}]>")))


@cache
def _bytewise() -> LLTokenizer:
    """A vocabulary of the 256 bytes, an end, and a token that stands for all others."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = [*map(chr, plain), *(chr(256 + at) for at in range(len(others)))]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    added = [
        {"id": at, "content": content, "special": True, "normalized": False}
        | {"single_word": False, "lstrip": False, "rstrip": False}
        for at, content in ((_END, "<end>"), (_TOKEN, "<token>"))
    ]
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": {letter: at for at, letter in enumerate(letters)}, "merges": []},
    }
    return LLTokenizer(json.dumps(tokenizer), eos_token=_END)
