"""Compiled pieces: what a start takes without and with a cache, and a step with and without them.

python -m tests.bench.compiled [MODEL] [--ops torch] [--device cpu] [--rows 1 8] [--context 128] [--rounds 7] [--json]

MODEL is a folder or a GGUF file; without one it is the demo model. Each start is a process of its own, with a cache
that is empty before the first. A step is a greedy decode step: likeliest tokens of so many rows, each at the context.
Times of a step are medians; both kinds run in turn in one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import torch

from services.local import demo
from services.worker.batch import Batch
from services.worker.cache import KVCache
from services.worker.loading import load_model
from services.worker.models.decoder import Decoder
from services.worker.step import CacheShape

BLOCK = 16
_LOAD = """
import json, logging, sys, time
seconds = {}
class Note(logging.Handler):
    def emit(self, record):
        if record.getMessage() == "pieces":
            seconds.update(record.fields)
logging.getLogger().addHandler(Note())
logging.getLogger().setLevel("INFO")
from services.worker.loading import load_model
begun = time.monotonic()
load_model(sys.argv[1], ops=sys.argv[2], device=sys.argv[3], compile=sys.argv[4] == "compile")
print(json.dumps({**seconds, "load": time.monotonic() - begun}))
"""


def start(model: str, arguments: argparse.Namespace, how: str, cache: str) -> dict[str, float]:
    """Seconds of a load in a process of its own, and how many pieces were compiled and found."""
    command = [sys.executable, "-c", _LOAD, model, arguments.ops, arguments.device, how]
    environment = os.environ | {"TRIPTYCH_CACHE": cache}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def batch_of(model: Decoder, rows: int, context: int) -> tuple[Batch, KVCache]:
    """One token of each row, at the end of its context."""
    blocks = -(-context // BLOCK)
    cache = KVCache(model.kv_layout, CacheShape(rows * blocks, BLOCK, rows, context, rows), model.device)
    cache.tensor.zero_()
    table = torch.arange(rows * blocks, dtype=torch.int32).view(rows, blocks)
    batch = Batch(
        input_ids_T=torch.arange(rows) + 5,
        positions_T=torch.full((rows,), context - 1),
        slots_T=table[:, -1].long() * BLOCK + (context - 1) % BLOCK,
        row_starts=tuple(range(rows + 1)),
        context_lens=(context,) * rows,
        block_table_RB=table,
        logits_at_S=None,
    )
    return batch, cache


@torch.inference_mode()
def steps(models: dict[str, Decoder], rows: int, context: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a step of each, in turn."""
    given = {name: batch_of(model, rows, context) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in models}
    for round_ in range(rounds + 1):
        for name, model in models.items():
            begun = time.monotonic()
            for _ in range(5):
                model.likeliest(*given[name])
            if round_:  # the first warms
                times[name].append((time.monotonic() - begun) / 5 * 1000)
    return {name: statistics.median(taken) for name, taken in times.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--ops", default="torch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    model = given.model or str(demo.fetch())
    with tempfile.TemporaryDirectory() as cache:
        starts = {
            name: start(model, given, how, cache)
            for name, how in (("without", "plain"), ("cold", "compile"), ("warm", "compile"))
        }
        os.environ["TRIPTYCH_CACHE"] = cache
        load = {"ops": given.ops, "device": given.device}
        models = {"without": load_model(model, **load)[0], "with": load_model(model, **load, compile=True)[0]}
        measured = {rows: steps(models, rows, given.context, given.rounds) for rows in given.rows}
    if given.json:
        print(json.dumps({"starts": starts, "steps_ms": measured}))
        return
    print("start     load s   of it pieces s   compiled   found")
    for name, found in starts.items():
        pieces = [found.get(key, 0) for key in ("seconds", "compiled", "found")]
        print(f"{name:<8} {found['load']:7.1f} {pieces[0]:16.1f} {pieces[1]:10} {pieces[2]:7}")
    print("\nrows   without ms   with ms")
    for rows, taken in measured.items():
        print(f"{rows:4} {taken['without']:12.2f} {taken['with']:9.2f}")


if __name__ == "__main__":
    main()
