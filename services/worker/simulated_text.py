"""The text files of a simulated model, and what the simulation reads in them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from services.common.errors import InvalidArgument
from services.worker.toy_text import toy_text_files

_WORD = re.compile(r"[Ġ▁]?[A-Za-z]+|Ġ")
_TEXT_FILE = (".json", ".jinja")
_WEIGHT_INDEX = ".index.json"


class Text:
    """The files of a folder, or toy ones where none is named. Raises InvalidArgument for a folder without them."""

    def __init__(self, folder: str, max_model_len: int) -> None:
        self.files = _read(folder) if folder else toy_text_files(max_model_len)
        config = json.loads(self.files.get("config.json", b"{}"))
        self.architecture = str(config.get("model_type", "simulated"))
        self.sees = "vision_config" in config  # whether the model takes images and videos
        config = {**config, **config.get("text_config", {})}
        self.max_model_len = int(config.get("max_position_embeddings", max_model_len))
        self.tokenizer = Tokenizer.from_str(self.files["tokenizer.json"].decode())
        self.vocab_size = int(config.get("vocab_size", 0)) or self.tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without the tokens that a template adds."""
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    @cached_property
    def words(self) -> list[int]:
        """Ids whose text is a word, for random answers."""
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=False)
        ids = sorted(token for name, token in vocabulary.items() if _WORD.fullmatch(name))
        return ids or sorted(vocabulary.values())


def _read(folder: str) -> dict[str, bytes]:
    path = Path(folder)
    if not path.is_dir():
        raise InvalidArgument(
            f"{folder!r} is not a folder with text files of a model (`triptych export-text` makes one)",
            field="model_path",
        )
    names = sorted(item.name for item in path.iterdir() if item.name.endswith(_TEXT_FILE))
    files = {name: (path / name).read_bytes() for name in names if not name.endswith(_WEIGHT_INDEX)}
    if "tokenizer.json" not in files:
        raise InvalidArgument(f"{folder!r} has no tokenizer.json", field="model_path")
    return files
