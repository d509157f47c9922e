"""Checks and times every kernel and whole steps on this machine's GPU; see the package.

python -m tests.bench.gpu [--only kernels steps] [--seconds 450] [--out gpu.json]
TRITON_INTERPRET=1 python -m tests.bench.gpu --toy          without a GPU, to test this script
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from kernels.dispatch import choose_ops
from kernels.examples import launches
from kernels.graphs.graphed import GraphOptions, with_graphs
from kernels.launch import Launch, chip_of
from kernels.shapes import SHAPES, Shape
from services.worker.compiled import Compiled
from tests.bench.gpu import choosing, models, replays, rooms, steps
from tests.bench.gpu.case import Case, Result, check, measure
from tests.bench.gpu.clock import Ceilings, Clock
from tests.bench.gpu.rooms import PAGE, Work

PARTS = ("kernels", "steps")
_KERNELS = 0.6
"""Of the time: what is left is for steps."""
_TOY = Shape("toy", torch.float16, 64, 4, 2, 16, 96, 200)
_WAYS: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphs": {"graphs": "full"},
    "graphs, fp8": {"graphs": "full", "quantize": "fp8"},
    "graphs, int8": {"graphs": "full", "quantize": "int8"},
    "graphs, int4": {"graphs": "full", "quantize": "int4"},
    "pieces and graphs": {"graphs": "both", "compiled": True},
}


class Bench:
    """What is measured, and how much time is left for it."""

    def __init__(self, *, toy: bool, seconds: float, device: torch.device, match: Sequence[str] = ()) -> None:
        """`match`: only what has one of these words in its name."""
        self.toy, self.device, self._match = toy, device, tuple(match)
        self.clock = Clock(device)
        self.ceilings: Ceilings = self.clock.ceilings()
        self.started: set[str] = set()  # kernels, by name
        self.kernels: list[Result] = []
        self.steps: list[steps.Figures] = []
        self.notes: list[str] = []
        self._begun, self._seconds = time.monotonic(), seconds

    def _late(self, part: float = 1.0) -> bool:
        """Whether this part of the time is over."""
        return time.monotonic() > self._begun + part * self._seconds

    @property
    def complete(self) -> bool:
        """Whether every case was run."""
        return not self._match and bool(self.kernels) and not any("out of time" in note for note in self.notes)

    def _wanted(self, name: str) -> bool:
        return not self._match or any(word in name for word in self._match)

    def work(self) -> Work:
        """What kernels are given."""
        if self.toy:
            return Work(_TOY, self.device, (1, 5), (3,), (1, 3), (3, 40), 600, 20, (5, 203))
        return Work(SHAPES[0], self.device, (1, 63, 100), (64, 8192), (1, 32, 256, 8192), (64, 4096), 65536, 8192,
                    (256, 128256))  # fmt: skip

    def run_kernels(self) -> None:
        """Each case: whether it is right, then how long it takes. An error is one row of the table."""
        for case in self._cases():
            if not self._wanted(case.name):
                continue
            if self._late(_KERNELS):
                self.notes.append(f"out of time before {case.name}")
                return
            self.kernels.append(self._tried(case))

    def _cases(self) -> Iterator[Case]:
        yield from choosing.cases(self.work())
        yield from rooms.cases(self.work())
        if self._wanted("graphs"):
            yield from replays.cases(self.device, toy=self.toy)

    def _tried(self, case: Case) -> Result:
        try:
            result = check(case)
            if case.timed:
                result.seconds, result.floor_s, result.measured = measure(case, self.clock, self.ceilings)
        except Exception as error:
            traceback.print_exc()
            return Result(case.name, float("nan"), False, why=f"{type(error).__name__}: {error}"[:300])
        finally:
            self._free()
        return result

    def run_steps(self) -> None:
        """Both models at each batch size, in every way."""
        for how, options in _WAYS.items():
            for name in models.CONFIGS:
                if not self._wanted(f"{name} {how}"):
                    continue
                if self._late():
                    self.notes.append(f"out of time before {name}, {how}")
                    continue
                try:
                    self._steps_of(name, how, **options)
                except Exception as error:
                    traceback.print_exc()
                    self.notes.append(f"{name}, {how}: {type(error).__name__}: {error}"[:300])
                finally:
                    self._free()

    def _steps_of(
        self, name: str, how: str, *, graphs: str = "none", quantize: str = "none", compiled: bool = False
    ) -> None:
        config = models.config_of(name, toy=self.toy)
        dtype = torch.float16 if self.toy else torch.bfloat16
        ops = choose_ops("triton", device=str(self.device), quantize=quantize)
        pieces = Compiled(ops, self.device, deterministic=False) if compiled else None
        ops = with_graphs(ops, GraphOptions(graphs), self.device, None if pieces is None else pieces.over)
        model = models.Maker(config, ops, dtype, self.device).model()
        sizes, context, count = ((2,), 20, 2) if self.toy else ((1, 32, 256), 1024, 30)
        sizes = tuple(rows for rows in sizes if steps.fits(model, rows, context))
        last = context + count + 2
        shape = steps.shape_for(model, max(sizes), last)
        cache = steps.cache_for(model, shape)
        begun = time.monotonic()
        made = model.warm(steps.limits_of(cache, shape, last))
        if graphs != "none":
            seconds = time.monotonic() - begun
            self.notes.append(f"{name}, {how}: {made.graphs} graphs, {made.bytes / 2**20:.0f} MiB, {seconds:.1f} s")
        served = steps.Served(model, cache, shape)

        def note(what: str, rows: int, step_s: float, beside: int = 0, parts: dict[str, float] | None = None) -> None:
            floors = steps.floors(model, self.ceilings, rows, context, beside)
            self.steps.append(steps.Figures(name, how, what, rows, context, step_s, *floors, parts or {}))

        for rows in sizes:
            parts = steps.Loop(model, cache, rows, context).parts(self.clock) if how == "eager" else None
            note("greedy", rows, steps.measure(model, served, self.clock, (rows, context, count)), parts=parts)
        note("cut", rows, steps.measure(model, served, self.clock, (rows, context, count), **steps.CUT))
        chunk, beside = (8, sizes[-1]) if self.toy else (steps.CHUNK, sizes[min(1, len(sizes) - 1)])
        first_block = shape.num_blocks - -(-chunk // PAGE)
        seconds = steps.measure_beside(served, self.clock, beside, context, chunk, first_block)
        note(f"beside {chunk}", beside, seconds, chunk)

    def _free(self) -> None:
        if self.clock.on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()

    def not_started(self) -> list[str]:
        """Kernels that are compiled for this chip (kernels.examples) and that nothing here has started."""
        shape = _TOY if self.toy else SHAPES[0]
        known = {launch.kernel.__name__ for _, launch in launches(shape, chip_of(self.device))}
        return sorted(known - self.started)


def note_started(started: set[str]) -> None:
    """From now on every launch leaves its kernel's name."""
    run: Callable[[Launch], None] = Launch.run

    def noted(self: Launch) -> None:
        started.add(self.kernel.__name__)
        run(self)

    Launch.run = noted  # type: ignore[method-assign]


def tables(bench: Bench) -> Iterator[str]:
    """What was measured, to read."""
    ceilings = bench.ceilings
    yield f"copy {ceilings.bandwidth / 1e12:.3f} TB/s, products of 16 bits {ceilings.rate / 1e12:.1f} TFLOP/s"
    if bench.kernels:
        yield f"{'kernel':52} {'error':>9} {'us':>10} {'floor us':>9} {'reached':>7}"
    for each in bench.kernels:
        if each.right and each.seconds is None:
            continue
        times = "" if each.seconds is None else f" {each.seconds * 1e6:10.1f} {(each.floor_s or 0) * 1e6:9.1f}"
        reached = f" {each.of_floor:7.0%}" if each.of_floor else ""
        yield f"{each.name:52} {each.error:9.1e}{times}{reached}{'' if each.right else f'  WRONG {each.why}'}"
    if bench.steps:
        yield f"{'steps':28} {'':10} {'rows':>4} {'ms':>8} {'tokens/s':>9} {'weights':>8} {'floor ms':>8}  parts in ms"
    for step in bench.steps:
        parts = ", ".join(f"{name} {seconds * 1e3:.3f}" for name, seconds in step.parts.items())
        yield (
            f"{step.model + ' ' + step.how:28} {step.what:10} {step.rows:4} {step.step_s * 1e3:8.3f}"
            f" {step.tokens_s:9.0f} {step.weights_floor_s * 1e3:8.3f} {step.floor_s * 1e3:8.3f}  {parts}"
        )
    yield from bench.notes
    right = sum(each.right for each in bench.kernels)
    yield f"{right} of {len(bench.kernels)} cases are right"
    if bench.complete:
        yield f"kernels that nothing has started: {', '.join(bench.not_started()) or 'none'}"
    yield from aims(bench)


def aims(bench: Bench) -> Iterator[str]:
    """What kernels and steps are to reach, and what they do."""
    by_name = {each.name: each for each in bench.kernels}

    def reached(start: str) -> float | None:
        return next((each.of_floor for name, each in by_name.items() if name.startswith(start)), None)

    work = bench.work()
    wanted = [
        ("attention, decode: 80 % of bandwidth", reached(f"attention, decode {work.decode[0]} x"), 0.8),
        ("attention, prefill: 60 % of the rate", reached("attention, prefill"), 0.6),
        ("sampling under 1.5 reads of the logits, drawn", reached("sample, drawn"), 1 / 1.5),
        ("sampling under 1.5 reads of the logits, cut", reached("sample, cut"), 1 / 1.5),
    ]
    wanted += [
        ("step of 8 B, one row, within 1.25 reads of the weights", step.weights_floor_s / step.step_s, 1 / 1.25)
        for step in bench.steps
        if (step.rows, step.model, step.how, step.what) == (1, "llama-3-8b", "graphs", "greedy")
    ]
    for what, found, aim in wanted:
        if found is not None:
            yield f"{what}: {found:.0%} of {aim:.0%}, {'reached' if found >= aim else 'not reached'}"


def main() -> int:
    """Prints the tables and writes the JSON; 1 where something is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--match", nargs="+", default=[], metavar="WORDS", help="only what has one of them in its name")
    parser.add_argument("--seconds", type=float, default=420.0, help="no new case begins after so many")
    parser.add_argument("--out", type=Path, default=None, help="file of the JSON")
    parser.add_argument("--toy", action="store_true", help="small sizes in Triton's interpreter: a test of this script")
    given = parser.parse_args()
    if not given.toy and not torch.cuda.is_available():
        print("torch sees no CUDA GPU; --toy runs small sizes in the interpreter", file=sys.stderr)
        return 2
    began = time.monotonic()
    torch.manual_seed(0)
    with torch.inference_mode():
        device = torch.device("cpu") if given.toy else torch.device("cuda", 0)
        bench = Bench(toy=given.toy, seconds=given.seconds, device=device, match=given.match)
        note_started(bench.started)
        for part, run in (("kernels", bench.run_kernels), ("steps", bench.run_steps)):
            if part in given.only:
                run()
            lines = [*header(device), *tables(bench), f"{time.monotonic() - began:.0f} s"]
            if given.out is not None:  # after each part: whoever stops the script has what was measured
                given.out.write_text(json.dumps(report(bench, lines), indent=1))
    print("\n".join(lines))
    return 0 if all(each.right for each in bench.kernels) else 1


def header(device: torch.device) -> list[str]:
    """Where and when."""
    card = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU: Triton's interpreter"
    return [f"{datetime.now(UTC):%Y-%m-%d}, {card}, torch {torch.__version__}, triton {triton.__version__}"]


def report(bench: Bench, lines: list[str]) -> dict[str, Any]:
    """All of it, times in seconds."""
    return {
        "lines": lines,
        "ceilings": asdict(bench.ceilings),
        "kernels": [{**asdict(each), "of_floor": each.of_floor} for each in bench.kernels],
        "steps": [{**asdict(each), "tokens_s": each.tokens_s} for each in bench.steps],
        "not_started": bench.not_started(),
        "notes": bench.notes,
    }


if __name__ == "__main__":
    sys.exit(main())
