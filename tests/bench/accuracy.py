"""What fewer bits cost: every way of keeping a model's weights against the same file in float32.

python -m tests.bench.accuracy [MODEL] [--modes own,int8] [--tokens 2048] [--prompts 8] [--greedy 64] [--json FILE]

    KL          mean over positions of the sum of p log(p / q), in nats: p in float32, q in the mode
    top-1       positions whose likeliest token is float32's
    perplexity  of the text's next tokens; and how much higher than float32's
    greedy      tokens that a greedy answer has in common with float32's before the first that differs, the mean
                over prompts. Near ties end it early without being wrong: a figure to know, not to test

The text is the language reference that comes with Python, cut into windows that are read from their own start.
Nothing is served: the model is called as the worker calls it, a window as one prefill. Prints a table, then JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from kernels.native.ops import NativeOptions
from services.local import demo
from services.worker.loading import load_model
from services.worker.models.decoder import Decoder
from services.worker.step import LoadedModel
from tests.bench.rounded import ROUNDED, rounded
from tests.e2e.oracle import english_text
from tests.worker.flat import Sequences

MODES: dict[str, dict[str, Any]] = {
    "float32": {"ops": "torch", "dtype": "float32"},
    "own": {"ops": "native"},
    "own-generated": {"ops": "native", "deterministic": True},
    "float16": {"ops": "native", "dtype": "float16"},
    "bfloat16": {"ops": "native", "dtype": "bfloat16"},
    "int8": {"ops": "native", "dtype": "float32", "quantize": "int8"},
    "float16-kv8": {"ops": "native", "dtype": "float16", "kv_cache_dtype": "int8"},
    "own-kv8": {"ops": "native", "kv_cache_dtype": "int8"},
    **{mode: {"ops": "reference", "dtype": "float32"} for mode in ROUNDED},
}
"""Arguments of load_model. "own" is what the file has: GGUF's blocks, or the type of safetensors.

Texts count as prompts; "own-generated" is what generated tokens cost, where the machine multiplies the two otherwise.
gpu-int8, gpu-fp8 and gpu-int4 are `--quantize` of Triton kernels, with products by their references (rounded.py);
their bytes are those of products.
"""
EXACT = "float32"
WINDOW = 256
"""Tokens of one window."""
FIRST = 1000
"""Where the text begins, in tokens."""
PROMPT = 32
"""Tokens of a prompt that is answered greedily: the beginning of a window."""


@dataclass(slots=True)
class Figures:
    """What one mode costs and takes."""

    mode: str
    weight_bytes: int
    load_s: float
    kl: float = 0.0
    top1: float = 0.0
    perplexity: float = 0.0
    perplexity_ratio: float = 1.0
    greedy: float = 0.0  # tokens


@dataclass(slots=True)
class _Candidate:
    """A mode under measurement: sums over positions."""

    figures: Figures
    model: Decoder
    kl: float = 0.0
    same: int = 0
    surprise: float = 0.0


def measure(
    path: Path,
    modes: Sequence[str],
    *,
    tokens: int = 2048,
    window: int = WINDOW,
    prompts: int = 8,
    greedy: int = 64,
    threads: int = 0,
) -> dict[str, Figures]:
    """Figures of each mode, and of float32 first. Rounds tokens up to whole windows."""
    torch.set_num_threads(1)  # its threads and those of the native kernels would wait for one another
    threads = threads or len(os.sched_getaffinity(0))
    loaded = {mode: _load(path, mode, threads) for mode in dict.fromkeys((EXACT, *modes))}
    ids = _text(next(iter(loaded.values()))[1])
    candidates = [_Candidate(_figures(mode, facts, seconds), model) for mode, (model, facts, seconds) in loaded.items()]
    windows = [ids[FIRST + first :][:window] for first in range(0, tokens, window)]
    for piece in windows:
        _compare(candidates, piece)
    positions = len(windows) * (window - 1)
    for candidate in candidates:
        figures = candidate.figures
        figures.kl, figures.top1 = candidate.kl / positions, candidate.same / positions
        figures.perplexity = math.exp(candidate.surprise / positions)
        figures.perplexity_ratio = figures.perplexity / candidates[0].figures.perplexity
    _agree(candidates, [ids[FIRST + at * WINDOW :][:PROMPT] for at in range(prompts)], greedy)
    return {candidate.figures.mode: candidate.figures for candidate in candidates}


def _load(path: Path, mode: str, threads: int) -> tuple[Decoder, LoadedModel, float]:
    begun = time.perf_counter()
    model, facts = load_model(str(path), **MODES[mode], native=NativeOptions(threads=threads))  # type: ignore[arg-type]
    if mode in ROUNDED:
        model, weight_bytes = rounded(model, ROUNDED[mode])
        facts = replace(facts, weight_bytes=weight_bytes)
    return model, facts, time.perf_counter() - begun


def _figures(mode: str, facts: LoadedModel, seconds: float) -> Figures:
    return Figures(mode, facts.weight_bytes, seconds)


def _text(facts: LoadedModel) -> list[int]:
    tokenizer = Tokenizer.from_str(facts.text_files["tokenizer.json"].decode())
    ids: list[int] = tokenizer.encode(english_text(), add_special_tokens=False).ids
    return ids


@torch.inference_mode()
def _compare(candidates: Sequence[_Candidate], window: list[int]) -> None:
    """Adds the positions of a window, all but its last token, whose next one is not known."""
    following = torch.tensor(window[1:])
    exact: torch.Tensor | None = None
    for candidate in candidates:
        run = Sequences(candidate.model, [window], prompts=[len(window)])
        run.step([(0, len(window))])
        logs = run.all_logits(0)[:-1].log_softmax(-1)
        exact = logs if exact is None else exact
        candidate.kl += float((exact.exp() * (exact - logs)).sum(-1).double().sum())
        candidate.same += int((logs.argmax(-1) == exact.argmax(-1)).sum())
        candidate.surprise -= float(logs.gather(1, following[:, None]).double().sum())


def _agree(candidates: Sequence[_Candidate], prompts: list[list[int]], count: int) -> None:
    if not prompts or not count:
        return
    answers = [_answer(candidate.model, prompts, count) for candidate in candidates]
    for candidate, answer in zip(candidates, answers, strict=True):
        common = [_common(wanted, given) for wanted, given in zip(answers[0], answer, strict=True)]
        candidate.figures.greedy = sum(common) / len(prompts)


def _common(wanted: list[int], given: list[int]) -> int:
    """Tokens before the first that differs."""
    differ = (index for index, pair in enumerate(zip(wanted, given, strict=True)) if pair[0] != pair[1])
    return next(differ, len(wanted))


@torch.inference_mode()
def _answer(model: Decoder, prompts: list[list[int]], count: int) -> list[list[int]]:
    """`count` greedy tokens after each prompt; an end of the text does not end them."""
    run = Sequences(model, [prompt + [0] * count for prompt in prompts], prompts=list(map(len, prompts)))
    pieces = [(index, len(prompt)) for index, prompt in enumerate(prompts)]
    for _ in range(count):
        run.step(pieces)
        for index in range(len(prompts)):
            run.sequences[index][run.read[index]] = int(run.logits[index][-1].argmax())
        pieces = [(index, 1) for index in range(len(prompts))]
    return [run.sequences[index][len(prompt) :] for index, prompt in enumerate(prompts)]


def table(figures: Sequence[Figures], greedy: int) -> str:
    """Markdown, as docs/performance.md shows it."""
    lines = [
        f"| weights | bytes | KL to float32 | top-1 agreement | perplexity | | greedy, of {greedy} |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.mode} | {row.weight_bytes:,} | {row.kl:.5f} | {row.top1:.4f} | {row.perplexity:.3f}"
        f" | {row.perplexity_ratio - 1:+.2%} | {row.greedy:.1f} |"
        for row in figures
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.accuracy", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model", nargs="?", type=Path, help="GGUF file or Hugging Face folder; the demo model")
    parser.add_argument("--modes", default=",".join(MODES), help="of: %(default)s")
    parser.add_argument("--tokens", type=int, default=2048, help="of text")
    parser.add_argument("--prompts", type=int, default=8, help="that are answered greedily")
    parser.add_argument("--greedy", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--threads", type=int, default=0, help="0 takes every core")
    parser.add_argument("--json", type=Path, help="file to write the figures to")
    options = parser.parse_args(argv)
    modes = options.modes.split(",")
    if not set(modes) <= set(MODES):
        parser.error(f"--modes: these are {', '.join(MODES)}")
    path: Path = options.model or demo.fetch()
    sizes = {name: getattr(options, name) for name in ("tokens", "prompts", "greedy", "threads")}
    figures = list(measure(path, modes, **sizes).values())
    document: dict[str, Any] = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "model": path.name,
        "text": {"tokens": options.tokens, "window": WINDOW},
        "modes": [asdict(row) for row in figures],
    }
    print(table(figures, options.greedy))
    print(json.dumps(document))
    if options.json:
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
