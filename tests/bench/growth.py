"""How a decode step's time grows with its rows and their contexts, beside its floor: the kernels alone.

python -m tests.bench.growth [--kind q4] [--threads N] [--repeats 20]

The model is that of tests.bench.kernels: SmolLM2-135M's shapes, random weights. Each cell is the least of the repeats
and, after the stroke, the floor of tests.bench.floors, in milliseconds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from kernels.native import library as native
from tests.bench import kernels
from tests.bench.floors import Costs, Machine
from tests.bench.load.table import table
from tests.bench.peers import machine

ROWS = (1, 8, 32, 64)
CONTEXTS = (64, 256, 512, 1024, 2048)


def costs(model: kernels.Model, kind: str) -> Costs:
    """What the model of tests.bench.kernels asks for."""
    weights = {id(one): one.nbytes for one in model.kept if isinstance(one, native.PackedWeight)}
    mixed, kv = kernels.HEADS * kernels.SIZE, kernels.KV_HEADS * kernels.SIZE
    layer = kernels.WIDTH * (2 * mixed + 2 * kv + 3 * kernels.INNER)
    return Costs(
        weight_bytes=sum(weights.values()),
        kv_bytes=2 * kernels.LAYERS * kv * model.cache.element_size(),
        layer_products=kernels.LAYERS * layer,
        head_products=kernels.VOCABULARY * kernels.WIDTH,
        attention_products=2 * kernels.LAYERS * mixed,
        quantized=kind not in kernels.DTYPES,
    )


def main(argv: Sequence[str]) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.growth", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--kind", choices=kernels.KINDS, default="q4")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeats", type=int, default=20)
    given = parser.parse_args(argv)
    at = Machine.measured(given.threads)
    model = kernels.Model(native.load("auto"), given.kind, given.threads)
    asked = costs(model, given.kind)
    lines = []
    for rows in ROWS:
        line: list[object] = [rows]
        for context in CONTEXTS:
            if rows * -(-context // kernels.BLOCK) > kernels.BLOCKS:
                line.append(None)  # more than the cache there holds
                continue
            seconds = kernels.least(model.step(rows, 1, context), given.repeats)
            line.append(f"{seconds * 1e3:.1f} / {asked.step_s(at, rows, context) * 1e3:.1f}")
        lines.append(line)
    of = machine.describe()
    print(f"{of['cpu']} ({of['family']}), {given.threads} threads, {given.kind}, load {machine.load()}\n")
    print(table(("rows", *(f"context {context}" for context in CONTEXTS)), lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
