"""A model's text files, read: special tokens, end-of-sequence ids, sampling defaults, chat template.

Files are a mapping from name to content, as the engine passes them on. What is broken in them is
told by file and key when the model loads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from services.common.errors import FailedPrecondition, InvalidArgument
from services.gateway.fields import Api, accepted


@dataclass(slots=True, frozen=True)
class TextFiles:
    """What the files say, apart from the tokenizer itself. Values keep their names from the files."""

    tokenizer_json: bytes
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    eos_tokens: tuple[int | str, ...] = ()
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)
    chat_template: str | None = None
    tool_template: str | None = None  # for conversations with tools, where the model has one of its own for them


def read_files(files: Mapping[str, bytes]) -> TextFiles:
    """Reads all of them; only tokenizer.json must be there."""
    if "tokenizer.json" not in files:
        raise FailedPrecondition("the model has no tokenizer.json", field="tokenizer.json")
    tokenizer = read_json(files, "tokenizer_config.json")
    generation = read_json(files, "generation_config.json")
    special = _special_tokens({**read_json(files, "special_tokens_map.json"), **tokenizer})
    eos = _id_list(generation, "generation_config.json") or _id_list(read_json(files, "config.json"), "config.json")
    tokenizer_eos = special.get("eos_token")
    return TextFiles(
        files["tokenizer.json"],
        special,
        (*eos, tokenizer_eos) if tokenizer_eos else tuple(eos),
        _sampling_defaults(generation),
        *_chat_templates(files, tokenizer),
    )


def read_text(files: Mapping[str, bytes], name: str) -> str:
    """A file as text."""
    try:
        return files[name].decode()
    except UnicodeDecodeError as error:
        raise FailedPrecondition(f"{name}: {error}", field=name) from None


def read_json(files: Mapping[str, bytes], name: str) -> Mapping[str, Any]:
    """A file with a JSON object; {} where it is missing."""
    if name not in files:
        return {}
    try:
        value = json.loads(files[name])
    except ValueError as error:
        raise FailedPrecondition(f"{name}: {error}", field=name) from None
    if not isinstance(value, dict):
        raise FailedPrecondition(f"{name}: a JSON object is needed", field=name)
    return value


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and their like, as chat templates use them."""
    tokens: dict[str, str] = {}
    for name, value in tokenizer_config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _id_list(config: Mapping[str, Any], name: str) -> list[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) for token_id in ids):
        raise FailedPrecondition(f"{name}: eos_token_id must be an id or an array of ids", field=name)
    return ids


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float | int]:
    """The defaults that generation_config.json sets, under the names of our fields."""
    rows = accepted(Api.GRPC)
    names = {name: name for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}
    names["max_new_tokens"] = "max_tokens"
    defaults: dict[str, float | int] = {}
    for name, ours in names.items():
        if generation.get(name) is None:
            continue
        try:
            defaults[ours] = rows[ours].kind.read(generation[name], name)
        except InvalidArgument as error:
            raise FailedPrecondition(
                f"generation_config.json: {error.message}", field="generation_config.json"
            ) from None
    return defaults


def _chat_templates(files: Mapping[str, bytes], tokenizer_config: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """The template for all conversations, and the one for those with tools where that is another."""
    if "chat_template.jinja" in files:
        return read_text(files, "chat_template.jinja"), None
    template = read_json(files, "chat_template.json").get("chat_template") or tokenizer_config.get("chat_template")
    named: dict[object, object] = {"default": template}
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
    default, tools = (text if isinstance(text, str) else None for text in (named.get("default"), named.get("tool_use")))
    return default, tools
