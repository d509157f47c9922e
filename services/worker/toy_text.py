"""Text files of a model that does not exist: a byte-level tokenizer, so that a simulated worker needs
no folder. Ids 0 to 255 are the bytes, then come three special tokens.
"""

from __future__ import annotations

import json

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 256 + len(_SPECIAL)
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _byte_names() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]


def toy_text_files(max_model_len: int) -> dict[str, bytes]:
    """config.json, generation_config.json, tokenizer.json and tokenizer_config.json."""
    special = [
        {
            "id": 256 + index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, token in enumerate(_SPECIAL)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer: dict[str, object] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {name: byte for byte, name in enumerate(_byte_names())},
            "merges": [],
        },
    }
    files = {
        "config.json": {
            "model_type": "simulated",
            "vocab_size": VOCAB_SIZE,
            "max_position_embeddings": max_model_len,
            "bos_token_id": 257,
            "eos_token_id": 258,
        },
        "generation_config.json": {"bos_token_id": 257, "eos_token_id": 258},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "add_bos_token": False,
            "chat_template": _TEMPLATE,
            "model_max_length": max_model_len,
        },
    }
    return {name: json.dumps(content, ensure_ascii=False).encode() for name, content in files.items()}
