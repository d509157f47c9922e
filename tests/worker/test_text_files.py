from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from services.common.errors import InvalidArgument, NotFound
from services.worker.gguf_file import GgufFile
from services.worker.text_files import build_tokenizer, config_json, files_of_folder, files_of_gguf
from tests.e2e import oracle

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "In 2024 there were 1234567 of them, 3.14159 each; 0x1F 1e-5 007",
    "def f(x):\n    return x ** 2  # squares\n\n\tif x: pass\n",
    "naïve café — “quoted” … 日本語のテキスト Ελληνικά עברית 🤗👩‍🚀 ½ ² ٣",
    "it's we'll I'M THEY'RE   many   spaces \r\n and\ttabs ",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|><file_sep>",
    "a\u0000b\ufffd\u200b",
]


@pytest.fixture(scope="module")
def demo(demo_gguf):
    return GgufFile(demo_gguf)


@pytest.fixture(scope="module")
def files(demo):
    return files_of_gguf(demo)


@pytest.fixture(scope="module")
def oracle_tokenizer(demo_gguf):
    return oracle.load_tokenizer(demo_gguf)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_the_demo_tokenizer_equals_the_oracle(files, oracle_tokenizer, text):
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert ids == oracle_tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_digits_stand_alone_and_markers_are_one_token(files):
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert tokenizer.encode("2024").tokens == ["2", "0", "2", "4"]
    assert tokenizer.encode("<|im_start|>user<|im_end|>").ids == [1, 4093, 2]
    assert tokenizer.decode([1, 2]) == ""  # special tokens are left out unless asked for


def test_the_demo_files(files):
    config = json.loads(files["tokenizer_config.json"])
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert config["chat_template"].startswith("{% for message in messages %}")
    assert config["model_max_length"] == 8192
    assert config["add_bos_token"] is False
    assert json.loads(files["generation_config.json"])["eos_token_id"] == 2
    assert json.loads(files["config.json"])["architectures"] == ["LlamaForCausalLM"]


class Metadata:
    """A GGUF file's metadata without the file."""

    path = "m.gguf"

    def __init__(self, **changes):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        values = {"model": "gpt2", "pre": "qwen2", "tokens": [*alphabet, "<|end|>", "12"], "merges": ["1 2"]}
        types = [1] * len(alphabet) + [3, 1]
        self._values = {**values, "token_type": types, **changes}

    def field(self, key):
        return self._values.get(key.removeprefix("tokenizer.ggml."))

    required = field


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("qwen2", ["a", "Ġb", "1", "2", "3", "4", "'s", "ĠĠ", "Ġc"]),
        ("llama-bpe", ["a", "Ġb", "123", "4", "'s", "ĠĠ", "Ġc"]),
        ("smollm", ["a", "Ġb", "1", "2", "3", "4", "'s", "ĠĠ", "Ġc"]),
    ],
)
def test_how_each_kind_cuts_text(pre, pieces):
    tokenizer = build_tokenizer(Metadata(pre=pre))
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("a b1234's   c")] == pieces


def test_merges_do_not_cross_pieces():
    assert build_tokenizer(Metadata(pre="llama3")).encode("12<|end|>12").tokens == ["12", "<|end|>", "12"]
    assert build_tokenizer(Metadata(pre="qwen2")).encode("12").tokens == ["1", "2"]


@pytest.mark.parametrize(("key", "value"), [("model", "llama"), ("pre", "tekken")])
def test_other_kinds_are_refused_by_name(key, value):
    with pytest.raises(InvalidArgument, match=value) as caught:
        build_tokenizer(Metadata(**{key: value}))
    assert caught.value.field == f"tokenizer.ggml.{key}"


def test_a_folder_is_handed_on_byte_for_byte(tmp_path):
    content = {
        "config.json": b"{}",
        "tokenizer.json": b'{"a" : 1}',
        "chat_template.jinja": b"{{ messages }}",
        "preprocessor_config.json": b"{}",
    }
    for name, data in {**content, "model.safetensors": b"", "README.md": b"", "vocab.json": b"{}"}.items():
        (tmp_path / name).write_bytes(data)
    assert files_of_folder(tmp_path) == content


def test_a_folder_that_lacks_what_is_needed(tmp_path):
    with pytest.raises(NotFound, match=r"has no config\.json"):
        config_json(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InvalidArgument, match="not a JSON object"):
        config_json(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InvalidArgument, match="not JSON"):
        config_json(tmp_path)
    with pytest.raises(NotFound, match=r"has no tokenizer\.json"):
        files_of_folder(tmp_path)
