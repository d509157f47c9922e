"""`triptych simulate WORKLOAD.json`: what the engine would do with a workload, step by step, without a model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar, TextIO

from services.cli.simulate.clock import Simulation, Stuck
from services.cli.simulate.document import Document
from services.cli.simulate.observer import Observer
from services.cli.simulate.plot import Plot
from services.cli.simulate.summary import Summary
from services.cli.simulate.table import Table
from services.cli.simulate.trace import Trace
from services.cli.simulate.workload import Workload, read
from services.common.settings import Settings, SettingsError, build_parser, knob


class SimulateSettings(Settings):
    """Runs a workload through the engine's scheduler under a virtual clock. docs/simulate.md describes the file."""

    section: ClassVar[str] = "simulate"

    json_document: bool = knob(False, "one JSON object on standard output: every step, and the summary")
    static: int | None = knob(None, "static batching: so many requests are served to their end before others", ge=1)
    trace: Path | None = knob(None, "file to write a trace to, for ui.perfetto.dev")
    plot: Path | None = knob(None, "file to draw the batches over the steps to: .svg or .png")


def main(command: str, argv: Sequence[str]) -> int:
    """Prints the run. Status 1 if requests are left that can never run, or something cannot be written."""
    parser = build_parser(SimulateSettings, f"triptych {command}")
    parser.add_argument("workload", metavar="WORKLOAD.json", type=Path, help="limits, costs and requests")
    parser.add_argument("--json", dest="json_document", action="store_true", help="the same as --json-document")
    given = vars(parser.parse_args(list(argv)))
    path: Path = given.pop("workload")
    settings = SimulateSettings.resolve(given)
    workload = read(path)
    try:
        simulate(workload, settings, workload.description or path.stem)
    except BrokenPipeError:
        raise
    except (Stuck, OSError) as error:  # a file that could be opened, or standard output, may not take all of it
        print(f"triptych {command}: {error}", file=sys.stderr)
        return 1
    return 0


def simulate(workload: Workload, settings: SimulateSettings, title: str) -> None:
    """Runs a workload with all who are asked to watch it."""
    config = workload.core_config()
    if settings.static is not None and settings.static > config.max_num_seqs:
        raise SettingsError(f"--static: {settings.static} is more than max_num_seqs, {config.max_num_seqs}")
    summary = Summary(config.max_num_batched_tokens)
    plots = [Plot(settings.plot, title, config, summary)] if settings.plot else []
    with ExitStack() as files:
        traces = [Trace(files.enter_context(_opened(settings.trace, "--trace")))] if settings.trace else []
        told = Document(sys.stdout, summary) if settings.json_document else Table(title, summary)
        observers: list[Observer] = [summary, told, *plots, *traces]
        try:
            Simulation(workload, observers, settings.static).run()
        finally:
            for observer in observers:
                observer.close()


def _opened(path: Path, option: str) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"{option}: {path}: {error.strerror or error}") from None
