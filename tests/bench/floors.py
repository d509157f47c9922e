"""What this machine allows at best: its bandwidth and its peak, and from them floors for the time of a model's step.

python -m tests.bench.floors [MODEL] [--dtype auto] [--quantize none] [--threads N] [--json FILE]

A step of B tokens reads all weights once and the keys and values of every context, and multiplies:

    floor = max( (weights + B × context × KV bytes) / bandwidth ,  B × (products / peak + attention / float peak) )

The peak of quantized weights is that of byte products, of all others that of float32: a 16 bit weight is multiplied in
float32. A prompt's tokens take no head but for the last. Prompts that share a prefix compute it once, and a step reads
it once. Nothing is counted for what the three roles do besides, nor for activations, which stay in caches.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from ctypes import c_double, c_int, c_int64
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kernels.native.build import COMPILERS
from services.local import demo
from services.worker.loading import load_model
from services.worker.models.config import ModelConfig
from tests.bench.load.table import number, table
from tests.bench.load.workloads import WORKLOADS, Workload
from tests.bench.peers import machine

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread")
STEPS = (1, 8, 32, 64)
CONTEXT = 192
"""Tokens before a decoded one, the mean of 128 in and 128 out."""
PREFILL = 512
_READ = 256 << 20
_TIMES = 1_000_000
_WINDOWS = 120


@dataclass(frozen=True, slots=True)
class Machine:
    """All threads together, a second."""

    bytes: float
    float_products: float
    byte_products: float  # 0 where the processor has no instruction for them

    @classmethod
    def measured(cls, threads: int, *, read: int = _READ, times: int = _TIMES, windows: int = _WINDOWS) -> Machine:
        """Builds floors.cpp for this processor and runs it. Raises RuntimeError where there is no compiler."""
        compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
        if compiler is None:
            raise RuntimeError(f"there is no C++ compiler ({', '.join(COMPILERS)})")
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "floors.so"
            subprocess.run([compiler, *FLAGS, str(SOURCE), "-o", str(library)], check=True)
            calls = ctypes.CDLL(str(library))
        found = []
        for name, size, turns in (
            ("bytes_per_s", read, windows // 3 + 1),
            ("float_products_per_s", times, windows),
            ("byte_products_per_s", times, windows),
        ):
            call = calls[name]
            call.restype, call.argtypes = c_double, (c_int64, c_int, c_int)
            found.append(call(size, threads, turns))
        return cls(*found)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a model asks for. Products are multiply-adds."""

    weight_bytes: int
    kv_bytes: int  # of a token
    layer_products: int  # of a token, all layers
    head_products: int
    attention_products: int  # of a token and each token that it sees
    quantized: bool

    @classmethod
    def of(cls, config: ModelConfig, weight_bytes: int, kv_bytes: int, *, quantized: bool) -> Costs:
        """From its shapes. A table that is no head is looked up and not read: its share of the bytes is left out."""
        wide, mixed = config.hidden_size, config.num_heads * config.head_dim
        layer = wide * (mixed + 2 * config.kv_width) + mixed * wide + 3 * wide * config.intermediate_size
        layers, head = config.num_layers * layer, config.vocab_size * wide
        table_share = 0 if config.tie_word_embeddings else head / (layers + 2 * head)
        attention = 2 * config.num_layers * mixed
        return cls(round(weight_bytes * (1 - table_share)), kv_bytes, layers, head, attention, quantized)

    def step_s(self, at: Machine, tokens: int, context: float, *, heads: int | None = None, reads: float = 0) -> float:
        """Seconds of a step of `tokens` that see `context` tokens each, of which `heads` (all) ask for logits.

        `reads` are keys and values that it reads in all, in tokens; by default each token reads its own context.
        """
        peak = at.byte_products if self.quantized and at.byte_products else at.float_products
        asked = tokens if heads is None else heads
        products = tokens * self.layer_products + asked * self.head_products
        seen = tokens * context * self.attention_products
        moved = self.weight_bytes + (reads or tokens * context) * self.kv_bytes
        return max(moved / at.bytes, products / peak + seen / at.float_products)

    def prompt_s(self, at: Machine, tokens: int, before: int = 0) -> float:
        """Seconds of a prompt's `tokens` after `before` that are there already."""
        return self.step_s(at, tokens, before + tokens / 2, heads=1, reads=before + tokens)

    def workload_s(self, at: Machine, work: Workload) -> float:
        """Seconds of a whole workload: its prompts, then steps in which every client has a token."""
        shared = work.shared_prefix_tokens
        prompts = work.requests * self.prompt_s(at, work.prompt_tokens - shared, shared)
        prompts += self.prompt_s(at, shared) if shared else 0.0
        context = work.prompt_tokens + work.output_tokens / 2
        reads = work.clients * (context - shared) + shared
        steps = work.requests / work.clients * (work.output_tokens - 1)
        return prompts + steps * self.step_s(at, work.clients, context, reads=reads)


def report(at: Machine, costs: Costs, workloads: Sequence[Workload] = WORKLOADS) -> dict[str, Any]:
    """Floors in milliseconds and what they come to in tokens per second."""
    steps = {f"{rows} x 1": (rows, costs.step_s(at, rows, CONTEXT)) for rows in STEPS}
    steps[f"prefill {PREFILL}"] = (PREFILL, costs.prompt_s(at, PREFILL))
    return {
        "machine": asdict(at),
        "costs": asdict(costs),
        "steps": {
            name: {"ms": seconds * 1e3, "tokens_per_s": tokens / seconds} for name, (tokens, seconds) in steps.items()
        },
        "workloads": {
            work.name: {
                "output_tokens_per_s": work.requests * work.output_tokens / costs.workload_s(at, work),
                "prompt_ms": 1e3
                * costs.prompt_s(at, work.prompt_tokens - work.shared_prefix_tokens, work.shared_prefix_tokens),
            }
            for work in workloads
        },
    }


def text(found: dict[str, Any]) -> str:
    """For a person."""
    at, costs = found["machine"], found["costs"]
    weights = f"{costs['weight_bytes']:,} bytes of weights, {costs['kv_bytes']:,} of keys and values a token"
    products = f"{(costs['layer_products'] + costs['head_products']) / 1e6:.1f} M products a token"
    steps = [[name, number(step["ms"], 2), number(step["tokens_per_s"])] for name, step in found["steps"].items()]
    work = [
        [name, number(one["output_tokens_per_s"]), number(one["prompt_ms"], 1)]
        for name, one in found["workloads"].items()
    ]
    return "\n\n".join(
        (
            f"{at['bytes'] / 1e9:.1f} GB/s read, {at['float_products'] / 1e9:.0f} G float products/s, "
            f"{at['byte_products'] / 1e9:.0f} G byte products/s",
            f"{weights}; {products}",
            table((f"step, {CONTEXT} tokens before", "floor ms", "tok/s at most"), steps),
            table(("workload", "out tok/s at most", "a prompt's floor ms"), work),
        )
    )


def main(argv: Sequence[str]) -> int:
    """Prints the floors of a model on this machine."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.floors", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", help="GGUF file or Hugging Face folder; the demo model if left out")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    decoder, loaded = load_model(given.model or str(demo.fetch()), dtype=given.dtype, quantize=given.quantize)
    quantized = loaded.dtype not in ("float32", "float16", "bfloat16")
    (group,) = loaded.kv_groups
    costs = Costs.of(decoder.config, loaded.weight_bytes, group.bytes_per_token, quantized=quantized)
    found = report(Machine.measured(given.threads), costs)
    of = machine.describe()
    print(f"{of['cpu']} ({of['family']}), {given.threads} threads, load {machine.load()}\n\n{text(found)}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
