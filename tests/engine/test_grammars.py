"""Grammars by the real library: what is sampled under the masks is what was asked for."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from services.common.errors import InvalidArgument, Unimplemented
from services.engine.grammars import LONGEST_TEXT, Compiling, Grammars, Matcher, model_ends, special_tokens

END, START, THINK = 0, 1, 2
SPECIAL = ("<|end|>", "<|start|>", "</think>")
WORDS = ('{"', '":', '", "', '"}', " true", "false", "null", "12", "name", "  ", "\\n", "é"[:1], "},", "[]")
_PATIENCE_S = 30.0


def byte_letters() -> dict[int, str]:
    """The letters that stand for bytes in a byte-level vocabulary (GPT-2's own table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + at) for at, byte in enumerate(others)}


LETTERS = byte_letters()


def tokenizer_json() -> tuple[str, list[bytes]]:
    """A small byte-level tokenizer, and what each id stands for."""
    pieces = [bytes([byte]) for byte in range(256)] + [word.encode() for word in WORDS]
    vocabulary = {name: at for at, name in enumerate(SPECIAL)}
    for piece in pieces:
        vocabulary.setdefault("".join(LETTERS[byte] for byte in piece), len(vocabulary))
    added = [
        {"id": at, "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        | {"special": True}
        for at, name in enumerate(SPECIAL)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": [], "unk_token": None},
    }
    stands_for = [b""] * len(SPECIAL) + pieces
    return json.dumps(tokenizer), stands_for[: len(vocabulary)]


TOKENIZER, STANDS_FOR = tokenizer_json()
VOCABULARY = len(STANDS_FOR) + 5
"""The model's: a few more than the tokenizer has, as models are often padded."""
FILES = {"tokenizer.json": TOKENIZER.encode(), "config.json": b'{"eos_token_id": 0}'}


def text_of(ids: Sequence[int]) -> str:
    return b"".join(STANDS_FOR[token] for token in ids).decode()


def ids_of(text: str) -> list[int]:
    return [STANDS_FOR.index(bytes([byte])) for byte in text.encode()]


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    made = Grammars(FILES, VOCABULARY, threads=2, limit_s=_PATIENCE_S, changed=lambda: None)
    yield made
    made.close()


def finish(compiling: Compiling) -> Compiling:
    until = time.monotonic() + _PATIENCE_S
    while not compiling.done and time.monotonic() < until:
        time.sleep(0.002)
    assert compiling.done
    return compiling


def compile_one(
    grammars: Grammars, kind: str, text: str, starts_after: tuple[int, ...] = (), output: Sequence[int] = ()
) -> Matcher:
    compiling = finish(grammars.start(kind, text, starts_after, [output]))
    assert compiling.error is None
    return compiling.matchers[0]


def error_of(grammars: Grammars, kind: str, text: str, output: Sequence[int] = ()) -> str | None:
    return finish(grammars.start(kind, text, (), [output])).error


def allowed(mask: bytearray) -> list[int]:
    assert len(mask) == -(-VOCABULARY // 32) * 4
    return [token for token in range(VOCABULARY) if mask[token >> 3] >> (token & 7) & 1]


def sample(matcher: Matcher, draw: random.Random, most: int = 400) -> list[int]:
    """Random allowed tokens until the output ends; the way to an end is kept short."""
    output: list[int] = []
    while len(output) < most:
        choices = allowed(matcher.mask())
        if not choices or (matcher.may_end and draw.random() < 0.5):
            assert matcher.may_end
            return output
        closing = [token for token in choices if STANDS_FOR[token] in {b'"', b"}", b"]", b'"}'}]
        token = draw.choice(closing if closing and draw.random() < 0.4 else choices)
        assert matcher.take((token,)) == 1
        output.append(token)
    raise AssertionError("no end in sight")


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
        "alive": {"type": "boolean"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(12))
def test_random_tokens_under_a_schema_are_json_that_fits_it(grammars: Grammars, seed: int) -> None:
    matcher = compile_one(grammars, "json_schema", json.dumps(PERSON))
    text = text_of(sample(matcher, random.Random(seed)))
    jsonschema.validate(json.loads(text), PERSON)


@pytest.mark.parametrize("seed", range(6))
def test_random_tokens_of_a_json_object_are_one(grammars: Grammars, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(20):
        try:
            text = text_of(sample(compile_one(grammars, "json_object", ""), draw))
        except AssertionError:
            continue  # a random walk may go deeper and deeper
        assert isinstance(json.loads(text), dict)
        return
    raise AssertionError("no walk came to an end")


@pytest.mark.parametrize("pattern", ["[0-9]{3}-[a-f]+", "(true|false|null)", "a?b{0,3}", "é+x"])
@pytest.mark.parametrize("seed", range(4))
def test_random_tokens_match_the_expression_as_a_whole(grammars: Grammars, pattern: str, seed: int) -> None:
    text = text_of(sample(compile_one(grammars, "regex", pattern), random.Random(seed)))
    assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("seed", range(4))
def test_random_tokens_follow_a_lark_grammar(grammars: Grammars, seed: int) -> None:
    grammar = 'start: sum\nsum: NUMBER ("+" NUMBER)*\nNUMBER: /[1-9][0-9]{0,2}/'
    text = text_of(sample(compile_one(grammars, "lark", grammar), random.Random(seed)))
    assert re.fullmatch(r"[1-9][0-9]{0,2}(\+[1-9][0-9]{0,2})*", text)


def test_ends_of_text_are_never_in_a_mask(grammars: Grammars) -> None:
    matcher = compile_one(grammars, "regex", "[0-9]*")
    assert matcher.may_end
    assert not {END, START, THINK} & set(allowed(matcher.mask()))
    done = compile_one(grammars, "regex", "a", output=ids_of("a"))
    assert done.may_end
    assert allowed(done.mask()) == []


def test_a_matcher_rebuilt_from_tokens_goes_on_alike(grammars: Grammars) -> None:
    schema = json.dumps(PERSON)
    first = compile_one(grammars, "json_schema", schema)
    output = sample(first, random.Random(5))
    going = compile_one(grammars, "json_schema", schema)
    for length in range(len(output)):
        rebuilt = compile_one(grammars, "json_schema", schema, output=output[:length])
        assert (rebuilt.mask(), rebuilt.may_end) == (going.mask(), going.may_end)
        going.take(output[length : length + 1])


def test_what_is_given_back_never_was(grammars: Grammars) -> None:
    schema = json.dumps(PERSON)
    output = sample(compile_one(grammars, "json_schema", schema), random.Random(7))
    draw = random.Random(1)
    matcher = compile_one(grammars, "json_schema", schema, (THINK, START))
    ids = [*ids_of("thinking"), THINK, START, *output]
    masks = []
    for token in ids:
        masks.append((matcher.mask(), matcher.may_end))
        assert matcher.take((token,)) == 1
    at = len(ids)
    for _ in range(200):
        if draw.random() < 0.5:
            back = draw.randint(0, at)
            matcher.give_back(back)
            at -= back
        else:
            ahead = draw.randint(0, len(ids) - at)
            assert matcher.take(ids[at : at + ahead]) == ahead
            at += ahead
        if at < len(ids):
            assert (matcher.mask(), matcher.may_end) == masks[at]
    assert matcher.error is None


def test_only_what_is_allowed_is_taken(grammars: Grammars) -> None:
    matcher = compile_one(grammars, "regex", "ab+c")
    assert matcher.take(ids_of("abxc")) == 2
    assert matcher.take(ids_of("bc")) == 2
    assert matcher.take(ids_of("c")) == 0
    assert matcher.error is None
    assert matcher.may_end


def test_it_is_free_until_its_ids_have_come_in_their_order(grammars: Grammars) -> None:
    matcher = compile_one(grammars, "regex", "[0-9]+", (THINK, START))
    for token in [*ids_of("any"), START, THINK, END, THINK]:
        assert len(allowed(matcher.mask())) == VOCABULARY
        assert matcher.may_end
        assert matcher.take((token,)) == 1
    assert matcher.take((START,)) == 1
    assert not matcher.may_end
    assert {text_of([token]) for token in allowed(matcher.mask())} == {*"0123456789", "12"}


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("json_schema", "no json", "expected"),
        ("json_schema", "[]", "object schema"),
        ("json_schema", "false", "object schema"),
        ("json_schema", '{"not": {"type": "string"}}', "Unimplemented keys"),
        ("json_schema", '{"type": "string", "format": "of my own"}', "Unknown format"),
        ("json_schema", '{"$ref": "#"}', "no output can follow"),
        ("json_schema", '{"$ref": "http://example.com/other.json"}', "not present"),
        ("json_schema", '{"type":"array","items":' * 5000 + "{}" + "}" * 5000, "recursion limit"),
        ("regex", "(", "unclosed"),
        ("regex", "(?=a)b", "look-around"),
        ("lark", "start: start", "no output can follow"),
        ("lark", "nonsense", "Expected"),
        ("lark", "start: " + "(" * 3000 + '"a"' + ")" * 3000, "deeply nested"),
        ("ebnf", "a", "not known"),
    ],
)
def test_what_cannot_be_used_says_why_in_a_line(grammars: Grammars, kind: str, text: str, words: str) -> None:
    error = error_of(grammars, kind, text)
    assert error is not None
    assert words in error
    assert "\n" not in error
    assert len(error) <= 300
    assert error_of(grammars, "regex", "a") is None, "the next one is none the worse for it"


def test_the_schema_that_allows_everything_is_one(grammars: Grammars) -> None:
    assert compile_one(grammars, "json_schema", " true ").take(ids_of('[1, "a"]')) == 8


def test_an_output_outside_the_grammar_is_refused(grammars: Grammars) -> None:
    error = error_of(grammars, "regex", "abc", ids_of("abx"))
    assert error is not None
    assert "token 2" in error


def test_a_schema_without_end_makes_masks_all_the_same(grammars: Grammars) -> None:
    schema = {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"], "additionalProperties": False}
    matcher = compile_one(grammars, "json_schema", json.dumps(schema))
    for _ in range(30):
        assert matcher.take(ids_of('{"x":')) == 5
        assert allowed(matcher.mask())
    assert not matcher.may_end


def test_a_grammar_too_long_is_refused_at_once(grammars: Grammars) -> None:
    with pytest.raises(InvalidArgument, match="characters") as refused:
        grammars.start("regex", "a" * (LONGEST_TEXT + 1), (), [[]])
    assert refused.value.field == "constraint"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_grammar_of_a_few_hostile_characters_takes_little_memory(grammars: Grammars) -> None:
    before = resident_bytes()
    for count in range(900, 904):
        finish(grammars.start("regex", f"(((a{{1000}}){{1000}}){{{count}}}){{1000}}", (), [[]]))
    assert resident_bytes() - before < 200 << 20


def test_ten_thousand_words_are_not_too_many(grammars: Grammars) -> None:
    words = "|".join(f"word{number:05}" for number in range(10_000))
    assert error_of(grammars, "regex", words) is None


def test_without_a_tokenizer_grammars_are_refused() -> None:
    bare = Grammars({}, 50, threads=1, limit_s=1.0, changed=lambda: None)
    with pytest.raises(Unimplemented, match="tokenizer"):
        bare.start("regex", "a", (), [[]])
    bare.close()


def test_a_tokenizer_that_is_none_fails_the_request_only() -> None:
    broken = Grammars({"tokenizer.json": b"{}"}, 50, threads=1, limit_s=_PATIENCE_S, changed=lambda: None)
    assert error_of(broken, "regex", "a") is not None
    broken.close()


def test_a_grammar_that_takes_too_long_is_given_up() -> None:
    """The thread is busy with something else until the end of the test."""
    slow = Grammars(FILES, VOCABULARY, threads=1, limit_s=0.05, changed=lambda: None)
    gate = threading.Event()
    slow._pool.submit(gate.wait)
    compiling = finish(slow.start("regex", "a", (), [[]]))
    assert compiling.error == "the grammar took longer than 0.05 s to compile"
    gate.set()
    slow.close()


def test_whoever_waits_is_told_that_something_is_done() -> None:
    told = threading.Event()
    made = Grammars(FILES, VOCABULARY, threads=1, limit_s=_PATIENCE_S, changed=told.set)
    compiling = made.start("regex", "a", (), [[], []])
    assert told.wait(_PATIENCE_S)
    assert compiling.done
    assert len(compiling.matchers) == 2
    made.close()


def test_many_at_once_are_each_their_own(grammars: Grammars) -> None:
    started = [grammars.start("regex", f"{at}[0-9]", (), [[]]) for at in range(40)]
    for at, compiling in enumerate(started):
        assert finish(compiling).error is None
        text = text_of(sample(compiling.matchers[0], random.Random(at)))
        assert re.fullmatch(f"{at}[0-9]", text)


@pytest.mark.parametrize(
    ("kind", "text", "written"),
    [
        ("json_schema", '{"const": "</think>"}', '"</think>"'),
        ("json_schema", '{"enum": ["a<|end|>b"]}', '"a<|end|>b"'),
        ("json_schema", '{"properties": {"<|start|>": {"const": 1}}, "required": ["<|start|>"]}', '{"<|start|>":1}'),
        ("regex", r"x<\|end\|>", "x<|end|>"),
        ("lark", 'start: "<|end|>" "</think>"', "<|end|></think>"),
    ],
)
def test_a_text_that_is_written_like_a_special_token_is_a_text(
    grammars: Grammars, kind: str, text: str, written: str
) -> None:
    """The library would force what is forced to be the tokens that it is in a prompt."""
    matcher = compile_one(grammars, kind, text)
    for token in ids_of(written):
        assert token in allowed(matcher.mask())
        assert not {END, START, THINK} & set(allowed(matcher.mask()))
        assert matcher.take((token,)) == 1
    assert matcher.may_end


def test_special_tokens_stand_where_a_grammar_names_them(grammars: Grammars) -> None:
    matcher = compile_one(grammars, "lark", f'start: "a" <[{THINK}]> "b"', output=ids_of("a"))
    assert allowed(matcher.mask()) == [THINK]
    assert matcher.take((THINK, *ids_of("b"))) == 2
    assert matcher.may_end


def test_a_grammar_that_leaves_no_token_is_an_error(grammars: Grammars) -> None:
    """This expression hides from us that it forces a special token."""
    matcher = compile_one(grammars, "regex", "x<[|]end[|]>", output=ids_of("x"))
    assert not allowed(matcher.mask())
    assert matcher.error is not None
    assert "no token" in matcher.error


def test_the_special_tokens_of_a_tokenizer() -> None:
    assert special_tokens(TOKENIZER, VOCABULARY) == {"<|end|>": END, "<|start|>": START, "</think>": THINK}
    assert special_tokens(TOKENIZER, 1) == {"<|end|>": END}
    assert special_tokens("{}", 9) == {}
    plain = '{"added_tokens" : [{"id": 1, "content": "x"}, {"id": 2, "content": "y", "special": false}]}'
    assert special_tokens(plain, 9) == {}


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, []),
        ({"config.json": b'{"eos_token_id": 3}'}, [3]),
        ({"config.json": b'{"eos_token_id": 3}', "generation_config.json": b'{"eos_token_id": [4, 5]}'}, [4, 5]),
        ({"config.json": b'{"eos_token_id": 3}', "generation_config.json": b'{"eos_token_id": null}'}, [3]),
        ({"config.json": b'{"eos_token_id": 99}'}, []),
    ],
)
def test_the_ends_of_text_are_those_of_the_models_own_files(files: dict[str, bytes], ends: list[int]) -> None:
    assert model_ends(files, 50) == ends


def test_no_numpy_and_no_torch_are_needed() -> None:
    code = "import sys; sys.modules['numpy'] = None; sys.modules['torch'] = None; import services.engine.grammars"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
