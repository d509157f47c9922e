"""The files that say how a model speaks (tokenizer, template, defaults): from a folder as they are, or out of GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from services.common.errors import InvalidArgument, NotFound
from services.worker.gguf_file import GgufFile

NAMES = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""What is handed on from a folder, where it is there; the first two must be."""

_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Llama 3 and Qwen 2 cut text; they differ in how many digits stay together."""
_LLAMA3_SPLIT, _QWEN2_SPLIT = _SPLIT.replace("DIGITS", "{1,3}"), _SPLIT.replace("DIGITS", "")
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
"""Values of tokenizer.ggml.token_type that a byte-level vocabulary has."""


def config_json(folder: Path) -> dict[str, Any]:
    """The folder's config.json."""
    path = folder / "config.json"
    if not path.is_file():
        raise NotFound(f"{folder} has no config.json: it is not a model folder", field="model")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidArgument(f"{path} is not JSON: {error}", field="model") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path} is not a JSON object", field="model")
    return config


def files_of_folder(folder: Path) -> dict[str, bytes]:
    """The text files of a Hugging Face folder."""
    files = {name: (folder / name).read_bytes() for name in NAMES if (folder / name).is_file()}
    if "tokenizer.json" not in files:
        raise NotFound(
            f"{folder} has no tokenizer.json; other tokenizer files (tokenizer.model, vocab.json) are not read: "
            "save it with a fast tokenizer",
            field="model",
        )
    return files


def files_of_gguf(file: GgufFile) -> dict[str, bytes]:
    """The text files that a GGUF file's metadata amounts to."""
    tokens: list[str] = file.required("tokenizer.ggml.tokens")
    special = {
        name: tokens[index]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if (index := file.field(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    config = file.config()
    tokenizer_config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": bool(file.field("tokenizer.ggml.add_bos_token")),
        **{f"{name}_token": token for name, token in special.items()},
    }
    template = file.field("tokenizer.chat_template")
    if template is not None:
        tokenizer_config["chat_template"] = template
    generation: dict[str, Any] = {
        key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config
    }
    return {
        "config.json": _json(config),
        "tokenizer.json": build_tokenizer(file).to_str().encode(),
        "tokenizer_config.json": _json(tokenizer_config),
        "generation_config.json": _json(generation),
    }


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """The byte-level BPE tokenizer that a GGUF file describes. Other kinds are refused by name."""
    kind = file.required("tokenizer.ggml.model")
    if kind != "gpt2":
        raise InvalidArgument(
            f"{file.path}: tokenizer.ggml.model = {kind!r} is not served", field="tokenizer.ggml.model"
        )
    tokens: list[str] = file.required("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.required("tokenizer.ggml.merges")]
    types: list[int] = file.field("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    _set_splitting(tokenizer, file)
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _set_splitting(tokenizer: Tokenizer, file: GgufFile) -> None:
    kind = file.required("tokenizer.ggml.pre")
    if kind == "smollm":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        return
    patterns = {"llama-bpe": _LLAMA3_SPLIT, "llama3": _LLAMA3_SPLIT, "qwen2": _QWEN2_SPLIT}
    if kind not in patterns:
        served = ", ".join(["smollm", *patterns])
        raise InvalidArgument(
            f"{file.path}: tokenizer.ggml.pre = {kind!r} is not served; these are: {served}", field="tokenizer.ggml.pre"
        )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(patterns[kind]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=2).encode()
