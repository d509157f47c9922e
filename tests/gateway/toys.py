"""Small tokenizers of every kind that is served, and the text files of a toy model around one."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from services.gateway.vocabulary import Vocabulary, read_joining

SPECIALS = ("<|im_start|>", "<|im_end|>")
WORDS = ("the quick brown fox jumps over the lazy dog own observation gamma delta END. naïve żółw 日本 🔥 " * 20,)
CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = """{%- if tools %}{{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- if documents %}{{- 'documents: ' + documents | tojson }}{%- endif %}
{%- for m in messages %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.reasoning_content %}{{- '<think>\\n' + m.reasoning_content + '\\n</think>\\n' }}{%- endif %}
    {{- m.content }}
    {%- for call in m.tool_calls %}
        {{- '\\n<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}
    {%- else %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}
"""
"""As Qwen 3 has it, shorter: tools, calls, reasoning that the prompt begins, and a switch for it."""
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


def byte_level() -> Tokenizer:
    """As Llama 3, Qwen and the demo model have it: every id is a run of bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=340, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("ß→", special=False)])
    return tokenizer


def marked() -> Tokenizer:
    """The same, with the marks of reasoning and calls as special tokens, and one that begins every text."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(list(MARKS))
    tokenizer.post_processor = processors.TemplateProcessing(f"{SPECIALS[0]} $A", special_tokens=[(SPECIALS[0], 0)])
    return tokenizer


def _fallback_bpe(extra: tuple[str, ...] = ()) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", *"abcdefghijklmnopqrstuvwxyz.,é", "▁▁", "▁H", "▁He", "▁Hel", "▁Hell", "▁Hello", "H", "▁a", *extra]
    merges = [("▁", "H"), ("▁H", "e"), ("▁He", "l"), ("▁Hel", "l"), ("▁Hell", "o"), ("▁", "a"), ("▁", "▁")]
    tokenizer = Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


def llama2() -> Tokenizer:
    """Sentencepiece in the spelling of Llama 2: bytes where there is no piece, a first space that is dropped."""
    tokenizer = _fallback_bpe()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def gemma() -> Tokenizer:
    """The same without a first space."""
    tokenizer = _fallback_bpe()
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def metaspace(scheme: str = "always") -> Tokenizer:
    """Sentencepiece in the older spelling, without bytes."""
    tokenizer = _fallback_bpe()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    return tokenizer


def words() -> Tokenizer:
    """No decoder at all: words with spaces between them."""
    return Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "fox": 2, "ran": 3}, unk_token="<unk>"))


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    "byte_level": byte_level,
    "llama2": llama2,
    "gemma": gemma,
    "metaspace": metaspace,
    "metaspace_never": functools.partial(metaspace, "never"),
    "words": words,
}


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    """One of KINDS, or "marked", made once."""
    return marked() if kind == "marked" else KINDS[kind]()


@functools.cache
def vocabulary(kind: str) -> Vocabulary:
    """Its vocabulary as the gateway sees it."""
    made = tokenizer(kind)
    pieces = [made.id_to_token(token_id) for token_id in range(made.get_vocab_size())]
    added = made.get_added_tokens_decoder()
    special = [token_id for token_id, token in added.items() if token.special]
    joining = read_joining(json.loads(made.to_str())["decoder"])
    return Vocabulary(pieces, special, joining, added={token.content: token_id for token_id, token in added.items()})


def ids(kind: str, text: str) -> tuple[int, ...]:
    """The ids of a text."""
    return tuple(tokenizer(kind).encode(text, add_special_tokens=False).ids)


def files(kind: str = "byte_level", template: str = CHATML, **changes: object) -> Mapping[str, bytes]:
    """The text files of a toy model; `changes` go into generation_config.json."""
    config = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}, "chat_template": template}
    return {
        "tokenizer.json": tokenizer(kind).to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
        "generation_config.json": json.dumps(changes).encode(),
        "config.json": json.dumps({"eos_token_id": [1]}).encode(),
    }
