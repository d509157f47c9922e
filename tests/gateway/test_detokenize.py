"""The oracle is the tokenizers library: all ids decoded at once."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.common.errors import FailedPrecondition
from services.gateway.detokenize import new_detokenizer
from services.gateway.vocabulary import read_joining, strip_left
from tests.gateway import toys

BROKEN = "\N{REPLACEMENT CHARACTER}"


def stream(kind: str, ids: list[int], *, skip: bool) -> list[str]:
    """The text that each id completed."""
    detokenizer = new_detokenizer(toys.vocabulary(kind), skip_special_tokens=skip)
    texts = [text for token_id in ids for text in detokenizer.push(token_id)]
    return [*texts, *detokenizer.finish()]


def random_ids(kind: str) -> st.SearchStrategy[list[int]]:
    top = len(toys.vocabulary(kind)) + 2
    any_id = st.integers(0, top)
    emoji = st.sampled_from(["🔥", "é", "日本", "👩‍🚀", " x", "\n"]).map(lambda text: list(toys.ids(kind, text)))
    return st.lists(st.one_of(any_id.map(lambda i: [i]), emoji), max_size=20).map(
        lambda runs: [i for run in runs for i in run]
    )


@pytest.mark.parametrize("kind", toys.KINDS)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pushes_joined_are_the_decoding_of_all_ids(kind: str, skip: bool, data: st.DataObject) -> None:
    ids = data.draw(random_ids(kind))
    texts = stream(kind, ids, skip=skip)
    assert "".join(texts) == toys.tokenizer(kind).decode(ids, skip_special_tokens=skip)
    assert len(texts) == len(ids)


@pytest.mark.parametrize("kind", ["llama2", "byte_level"])
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_random_bytes(kind: str, data: st.DataObject) -> None:
    """Wrong and cut-off UTF-8 of every kind, with a word or a skipped token in between."""
    vocabulary = toys.vocabulary(kind)
    of_byte = {vocabulary.token_bytes(i): i for i in range(len(vocabulary)) if len(vocabulary.token_bytes(i)) == 1}
    byte = st.sampled_from([0xF0, 0x9F, 0x94, 0xA5, 0xE2, 0x82, 0xAC, 0xED, 0xA0, 0xC0, 0x80, 0xFF, 0x20, 0x41])
    ids = data.draw(st.lists(st.one_of(byte.map(lambda b: of_byte.get(bytes((b,)), 0)), st.sampled_from([1, 5]))))
    texts = stream(kind, ids, skip=True)
    assert "".join(texts) == toys.tokenizer(kind).decode(ids, skip_special_tokens=True)


def test_a_character_in_four_tokens_comes_with_the_last() -> None:
    ids = [i for byte in "🔥".encode() for i in range(len(toys.vocabulary("byte_level"))) if one_byte(i) == byte]
    assert len(ids) == 4
    assert stream("byte_level", ids, skip=True) == ["", "", "", "🔥"]
    assert stream("byte_level", ids[:3], skip=True) == ["", "", BROKEN]
    detokenizer = new_detokenizer(toys.vocabulary("byte_level"), skip_special_tokens=True)
    assert [len(detokenizer.push(i)) for i in ids] == [0, 0, 0, 4], "ids stay with their text"


def one_byte(token_id: int) -> int | None:
    data = toys.vocabulary("byte_level").token_bytes(token_id)
    return data[0] if len(data) == 1 else None


def test_partial_bytes_then_a_space() -> None:
    ids = [i for byte in b"\xf0\x9f" for i in range(len(toys.vocabulary("byte_level"))) if one_byte(i) == byte]
    ids += toys.ids("byte_level", " fox")
    texts = stream("byte_level", ids, skip=True)
    assert "".join(texts) == f"{BROKEN} fox"


@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=70, deadline=None)
@given(data=st.data())
def test_the_text_of_an_id_begins_where_that_of_the_ids_before_it_ends(skip: bool, data: st.DataObject) -> None:
    """Inside a character of several ids it begins where the character does, after a broken one behind it."""
    byte = st.sampled_from([0xF0, 0x9F, 0x94, 0xA5, 0xE2, 0x82, 0xED, 0xA0, 0xEF, 0xBF, 0xBD, 0xC0, 0xFF, 0x41])
    of_byte = {one_byte(i): i for i in range(len(toys.vocabulary("byte_level")))}
    ids = data.draw(st.lists(st.one_of(byte.map(lambda b: of_byte[b]), st.sampled_from([1, 100_000])), max_size=16))
    ids += data.draw(random_ids("byte_level"))

    def decode(some: list[int]) -> str:
        return toys.tokenizer("byte_level").decode(some, skip_special_tokens=skip)

    at = 0
    for i, text in enumerate(stream("byte_level", ids, skip=skip)):
        before = decode(ids[:i])
        goes_on = before + decode(ids[i:]) != decode(ids)  # the character at the end of what is before it
        assert at == len(before) - goes_on
        at += len(text)


def test_a_broken_character_belongs_to_the_last_id_that_has_bytes_of_it() -> None:
    of_byte = {one_byte(i): i for i in range(len(toys.vocabulary("byte_level")))}
    f0, x9f, a = of_byte[0xF0], of_byte[0x9F], of_byte[0x41]
    assert stream("byte_level", [a, f0, x9f, a], skip=True) == ["A", "", BROKEN, "A"]
    assert stream("byte_level", [f0, 1, a], skip=True) == [BROKEN, "", "A"]
    assert stream("byte_level", [f0, 1], skip=True) == [BROKEN, ""]
    detokenizer = new_detokenizer(toys.vocabulary("byte_level"), skip_special_tokens=True)
    assert [list(detokenizer.push(i)) for i in (f0, f0, x9f, a)] == [[], [BROKEN], [], ["", BROKEN, "A"]]
    assert stream("byte_level", [of_byte[0xED], of_byte[0xA0], a], skip=True) == [BROKEN, BROKEN, "A"]


def test_byte_pieces_belong_to_the_id_that_completes_the_character() -> None:
    vocabulary = toys.vocabulary("llama2")
    ids = [vocabulary.pieces.index(f"<0x{byte:02X}>") for byte in "🔥é".encode()]
    assert stream("llama2", ids, skip=True) == ["", "", "", "🔥", "", "é"]
    detokenizer = new_detokenizer(vocabulary, skip_special_tokens=True)
    assert [len(detokenizer.push(i)) for i in ids] == [0] * 6, "a run is held until it ends"
    assert detokenizer.push(vocabulary.pieces.index("▁a")) == ["", "", "", "🔥", "", "é", " a"]


def test_first_space_is_dropped_as_the_reference_does() -> None:
    vocabulary = toys.vocabulary("llama2")
    ids = [vocabulary.pieces.index("▁Hello"), vocabulary.pieces.index("▁a")]
    assert stream("llama2", ids, skip=True) == ["Hello", " a"]
    assert stream("llama2", [vocabulary.pieces.index("▁▁")], skip=True) == [" "]


def test_a_long_stream_takes_linear_time() -> None:
    """A million bytes of an endless run: with a rescan per token this would not end."""
    vocabulary = toys.vocabulary("llama2")
    ids = [vocabulary.pieces.index(f"<0x{byte:02X}>") for byte in "🔥".encode()] * 50_000
    texts = stream("llama2", ids, skip=True)
    assert "".join(texts) == "🔥" * 50_000


@pytest.mark.parametrize(
    "decoder",
    [
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "Sequence", "decoders": [{"type": "ByteLevel"}, {"type": "Replace"}]},
        {"type": "Strip", "content": " ", "start": 0, "stop": 1},
    ],
)
def test_decoders_that_cant_be_streamed_are_refused(decoder: dict[str, object]) -> None:
    with pytest.raises(FailedPrecondition, match="decoder step"):
        read_joining(decoder)


def test_strip_left_goes_on_only_while_nothing_else_came() -> None:
    assert strip_left("  a", " ", 1) == (" a", 0)
    assert strip_left(" ", " ", 3) == ("", 2)
    assert strip_left("a ", " ", 3) == ("a ", 0)
