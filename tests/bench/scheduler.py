"""What the scheduler costs, without a worker: `python -m tests.bench.scheduler [--json]`.

Medians over steps in which nothing but decodes run (or, for the line, in which nobody can start):
microseconds of one `EngineCore.schedule` and of one `EngineCore.apply`. The medians do not grow with
the length of the contexts or of the line; the sizes below show it.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass

from services.cli.simulate.worker import outcome_of
from services.common.server import tune_interpreter
from services.engine.core import CoreConfig, EngineCore
from services.engine.request import RequestSpec
from tests.engine.harness import make_spec

STEPS = 320
"""Measured steps; each row takes a new block in every 16th."""
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Figure:
    """One setting and its medians, in microseconds."""

    running: int
    context: int  # prompt tokens of each running request
    waiting: int  # requests in the line that cannot start
    schedule_us: float
    apply_us: float


def spec(handle: int, prompt: int, output: int) -> RequestSpec:
    """Prompts that share nothing."""
    return make_spec(handle, [(handle * 7919 + at * 31) % 997 for at in range(prompt)], output)


def measure(running: int, context: int, waiting: int) -> Figure:
    """Prefills `running` requests, puts `waiting` behind them, and times steps of pure decode."""
    prefill_steps = running * context // 8192 + 1  # in which the first decode already
    output = STEPS + 64 + prefill_steps
    slack = 60 if waiting else running * (prefill_steps // BLOCK + 2)
    reserve = -(-output // BLOCK) + 1  # all that outputs will take is kept free, so that nobody else can start
    config = CoreConfig(
        max_num_batched_tokens=max(8192, 2 * running),
        max_num_seqs=2 * running,
        max_model_len=10 * (context + output),
        block_size=BLOCK,
        num_blocks=running * (-(-context // BLOCK) + reserve) + slack,
        vocab_size=1000,
        output_reserve_blocks=reserve,
    )
    core = EngineCore(config)
    for handle in range(running):
        core.submit(spec(handle, context, output), 0.0)
    scheduled: list[float] = []
    applied: list[float] = []
    decodes = 0
    while len(scheduled) < STEPS:
        begin = time.perf_counter()
        plan = core.schedule(0.0)
        planned = time.perf_counter()
        assert plan is not None
        answer = outcome_of(plan)
        told = time.perf_counter()
        core.apply(answer)
        end = time.perf_counter()
        if len(plan.rows) == plan.total_tokens == running:
            decodes += 1
            if decodes == 8:
                for handle in range(running, running + waiting):
                    core.submit(spec(handle, 64 * BLOCK, 8), 0.0)
            elif decodes > 12:
                scheduled.append(planned - begin)
                applied.append(end - told)
    return Figure(running, context, waiting, _median_us(scheduled), _median_us(applied))


def _median_us(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e6, 1)


SETTINGS = (
    (256, 60, 0),
    (256, 1000, 0),
    (256, 8000, 0),
    (256, 60, 1000),
    (256, 60, 10_000),
    (1024, 60, 0),
    (1024, 1000, 0),
)


REPEATS = 3


def best(running: int, context: int, waiting: int) -> Figure:
    """The lowest median of a few runs: whoever shares the machine only adds to them."""
    return min((measure(running, context, waiting) for _ in range(REPEATS)), key=lambda figure: figure.schedule_us)


def main() -> int:
    """Prints JSON, and a table unless --json is given."""
    tune_interpreter()
    figures = [best(*setting) for setting in SETTINGS]
    print(json.dumps([asdict(figure) for figure in figures]))
    if "--json" not in sys.argv[1:]:
        print("running  context  waiting  schedule us  apply us")
        for each in figures:
            sizes = f"{each.running:>7} {each.context:>8} {each.waiting:>8}"
            print(f"{sizes} {each.schedule_us:>12.1f} {each.apply_us:>9.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
