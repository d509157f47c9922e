from __future__ import annotations

import json

import pytest

from services.common.errors import FailedPrecondition
from services.gateway.text_files import read_files


def files(**contents: object) -> dict[str, bytes]:
    named = {name.replace("__", "."): json.dumps(value).encode() for name, value in contents.items()}
    return {"tokenizer.json": b"{}", **named}


def test_only_the_tokenizer_is_needed() -> None:
    read = read_files(files())
    assert (read.eos_tokens, read.sampling_defaults, read.chat_template) == ((), {}, None)
    with pytest.raises(FailedPrecondition, match=r"no tokenizer\.json"):
        read_files({})


@pytest.mark.parametrize(
    ("generation", "config", "token", "eos"),
    [
        ([5, 6], 7, None, (5, 6)),
        (5, None, None, (5,)),
        (None, 7, "</s>", (7, "</s>")),
        (None, [7, 8], {"content": "</s>"}, (7, 8, "</s>")),
        (None, None, "</s>", ("</s>",)),
    ],
)
def test_end_of_sequence(generation: object, config: object, token: object, eos: tuple[object, ...]) -> None:
    read = read_files(
        files(
            generation_config__json={"eos_token_id": generation},
            config__json={"eos_token_id": config},
            tokenizer_config__json={"eos_token": token},
        )
    )
    assert read.eos_tokens == eos


def test_special_tokens_for_templates() -> None:
    read = read_files(
        files(
            special_tokens_map__json={"bos_token": "<old>", "pad_token": "<pad>"},
            tokenizer_config__json={"bos_token": {"content": "<s>"}, "add_bos_token": True, "unk_token": None},
        )
    )
    assert read.special_tokens == {"bos_token": "<s>", "pad_token": "<pad>"}


def test_sampling_defaults_have_our_names() -> None:
    generation = {"temperature": 0.5, "top_k": 20, "do_sample": True, "max_new_tokens": 9, "top_p": None}
    assert read_files(files(generation_config__json=generation)).sampling_defaults == {
        "temperature": 0.5,
        "top_k": 20,
        "max_tokens": 9,
    }
    with pytest.raises(FailedPrecondition, match="temperature"):
        read_files(files(generation_config__json={"temperature": "hot"}))


def test_where_a_chat_template_may_stand() -> None:
    config = {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}
    assert read_files(files(tokenizer_config__json=config)).chat_template == "D"
    assert read_files(files(tokenizer_config__json={"chat_template": "C"})).chat_template == "C"
    assert (
        read_files(files(chat_template__json={"chat_template": "J"}, tokenizer_config__json=config)).chat_template
        == "J"
    )
    assert read_files({**files(tokenizer_config__json=config), "chat_template.jinja": b"X"}).chat_template == "X"


@pytest.mark.parametrize("content", [b"\xff", b"{", b"[]"])
def test_broken_files_are_named(content: bytes) -> None:
    with pytest.raises(FailedPrecondition) as caught:
        read_files({**files(), "generation_config.json": content})
    assert caught.value.field == "generation_config.json"
