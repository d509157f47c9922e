"""The oracle: transformers' own model in float32, reading the demo GGUF with transformers' own reader.

Two known faults of that reader are mended: it splits numbers wrongly and takes another rms_norm_eps.
"""

from __future__ import annotations

import functools
import pydoc_data.topics
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer, pre_tokenizers

LEGAL_MARGIN = 1e-3
"""In the default mode a differing token is legal where the oracle's top two logits are this close."""
EXACT = {"dtype": "float32"}
"""The worker's settings under which it computes what the oracle does; left alone it keeps the file's 4 bits."""
EOS = 2
"""`<|im_end|>` of the demo model."""


class _PlainReader(gguf.GGUFReader):
    """The library's reader; slices of np.memmap, which it takes by the hundred thousand, are three times slower."""

    @property
    def data(self) -> Any:
        return self._view

    @data.setter
    def data(self, mapped: Any) -> None:
        self._view = mapped.view(np.ndarray)


_reader = functools.cache(_PlainReader)
_name_map = functools.cache(gguf.get_tensor_name_map)


@contextmanager
def _read_once() -> Iterator[None]:
    """transformers reads the whole file three times, and the names of a model's tensors once for each module."""
    with mock.patch.object(gguf, "GGUFReader", _reader), mock.patch.object(gguf, "get_tensor_name_map", _name_map):
        yield


@functools.cache
def load_model(path: Path) -> Any:
    """LlamaForCausalLM in float32."""
    with warnings.catch_warnings(), _read_once():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM
        from transformers.utils.quantization_config import GgufConfig

        config = GgufConfig(gguf_file=path.name, dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32, quantization_config=config
        )
    for module in model.modules():
        if type(module).__name__ == "LlamaRMSNorm":
            module.variance_epsilon = 1e-5
    model.config.rms_norm_eps = 1e-5
    return model.eval()


@functools.cache
def load_tokenizer(path: Path) -> Tokenizer:
    """The GGUF's tokenizer with single digits split first."""
    with warnings.catch_warnings(), _read_once():
        warnings.simplefilter("ignore")
        from transformers import AutoTokenizer

        backend: Tokenizer = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name).backend_tokenizer
    tokenizer = Tokenizer.from_str(backend.to_str())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    return tokenizer


@functools.cache
def english_text() -> str:
    """The language reference that ships with Python: plain prose, the same on every machine."""
    topics: dict[str, str] = pydoc_data.topics.topics
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode("ascii", "ignore").decode()
    for pattern, replacement in ((r"[*=\-]{4,}", ""), (r"[ \t]+", " "), (r"\n{3,}", "\n\n")):
        text = re.sub(pattern, replacement, text)
    return text


@dataclass(frozen=True)
class Continuation:
    """What the oracle says after a prompt: greedy ids, and how far the top two logits were apart."""

    token_ids: tuple[int, ...]
    margins: tuple[float, ...]


def generate(path: Path, prompt: tuple[int, ...], max_new_tokens: int) -> Continuation:
    """transformers' own greedy `generate`."""
    model = load_model(path)
    ids = torch.tensor([prompt])
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
            eos_token_id=EOS,
            pad_token_id=EOS,
        )
    tops = [torch.topk(step[0].float(), 2).values for step in out.logits]
    return Continuation(tuple(out.sequences[0, len(prompt) :].tolist()), tuple(float(top[0] - top[1]) for top in tops))


def assert_equal(ours: tuple[int, ...], oracle: Continuation) -> None:
    """Token for token with `generate`, up to a legal difference; what follows one is another text."""
    for index, (got, wanted) in enumerate(zip(ours, oracle.token_ids, strict=False)):
        if got != wanted:
            margin = oracle.margins[index]
            assert margin < LEGAL_MARGIN, f"token {index}: {got}, oracle {wanted}, {margin=}"
            return
    assert len(ours) == len(oracle.token_ids)


@functools.cache
def assert_greedy(path: Path, prompt: tuple[int, ...], ours: tuple[int, ...], max_tokens: int) -> None:
    """Each of our tokens is the oracle's own choice after the prompt and our tokens before it.

    By induction that is what `generate` gives, token for token; and unlike a comparison with it, the
    check goes on behind a legal difference. One forward pass instead of one per token.
    """
    assert len(ours) == max_tokens or (len(ours) < max_tokens and ours[-1] == EOS)
    with torch.inference_mode():
        logits = load_model(path)(torch.tensor([prompt + ours]), logits_to_keep=len(ours) + 1).logits[0, :-1].float()
    behind = logits.max(dim=-1).values - logits.gather(1, torch.tensor(ours)[:, None])[:, 0]
    wrong = [index for index, margin in enumerate(behind.tolist()) if margin >= LEGAL_MARGIN]
    assert not wrong, f"tokens {wrong} after a prompt of {len(prompt)} are not greedy"
