"""Tokens that stand for themselves, by their text."""

from __future__ import annotations

from tests.gateway import toys


def test_a_special_token_is_found_by_its_text() -> None:
    vocabulary = toys.vocabulary("byte_level")
    assert vocabulary.special_id("<|im_end|>") == toys.ids("byte_level", "<|im_end|>")[0]
    assert vocabulary.special_id("<tool>") is None, "added, but part of the text"
    assert vocabulary.special_id("t") is None
    assert vocabulary.special_id("") is None


def test_an_added_token_is_found_by_its_text() -> None:
    for kind in ("byte_level", "llama2"):
        vocabulary = toys.vocabulary(kind)
        assert (vocabulary.added_id("<tool>"),) == toys.ids(kind, "<tool>")
        assert vocabulary.added_id("t") is None, "an ordinary piece"
    assert toys.vocabulary("byte_level").added_id("<|im_end|>") == toys.vocabulary("byte_level").special_id(
        "<|im_end|>"
    )
