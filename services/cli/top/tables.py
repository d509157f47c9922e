"""The overview as a person reads it: a table for each role."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table

from services.cli.top.overview import EngineRow, GatewayRow, Overview, WorkerRow

_NOTHING = "–"


def tables(seen: Overview) -> Group:
    """The tables, one over the other."""
    engines = _table("engine", "run", "wait", "in tok/s", "out tok/s", "KV", "hits", "preempt", "queue", "model")
    for engine in seen.engines:
        _row(engines, engine.address, engine.name, engine.up, _of_engine(engine))
    gateways = _table("gateway", "ready", "live", "done/s", "TTFT p50", "ITL p50", "whole p50", "replays")
    for gateway in seen.gateways:
        _row(gateways, gateway.address, gateway.name, gateway.up, _of_gateway(gateway))
    workers = _table("worker", "rows", "steps/s", "tok/step", "step p50", "memory")
    for worker in seen.workers:
        _row(workers, worker.address, worker.name, worker.up, _of_worker(worker))
    return Group(*(table for table in (engines, gateways, workers) if table.row_count))


def _table(role: str, *columns: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name in (role, "address", *columns):
        number = name not in (role, "address", "model", "ready")
        table.add_column(name, justify="right" if number else "left", no_wrap=name != "model", overflow="ellipsis")
    return table


def _row(table: Table, address: str, name: str | None, up: bool, cells: Sequence[str]) -> None:
    if up:
        table.add_row(name or _NOTHING, address, *cells)
    else:
        table.add_row("[red]no answer[/red]", address)


def _of_engine(row: EngineRow) -> list[str]:
    stuck = f" [red]stuck for {row.silence_s:.0f} s[/red]" if row.silence_s and row.silence_s >= 1 else ""
    return [
        _count(row.running),
        _count(row.waiting),
        _rate(row.prompt_tokens_per_s),
        _rate(row.output_tokens_per_s),
        _share(row.kv_use),
        _share(row.prefix_hit_rate),
        _count(row.preemptions),
        _time(row.queue_p50_ms),
        (row.model or "[yellow]no worker yet[/yellow]") + stuck,
    ]


def _of_gateway(row: GatewayRow) -> list[str]:
    ready = {True: "yes", False: "[red]no[/red]", None: _NOTHING}[row.ready]
    times = (row.ttft_p50_ms, row.itl_p50_ms, row.e2e_p50_ms)
    return [ready, _count(row.live), _rate(row.finished_per_s), *map(_time, times), _count(row.replays)]


def _of_worker(row: WorkerRow) -> list[str]:
    memory = _NOTHING if row.memory_bytes is None else f"{row.memory_bytes / 2**20:,.0f} MiB"
    rates = (row.steps_per_s, row.tokens_per_step)
    return [_count(row.rows), *map(_rate, rates), _time(row.step_p50_ms), memory]


def _count(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:,.0f}"


def _rate(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _share(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:.0%}"


def _time(value: float | None) -> str:
    if value is None:
        return _NOTHING
    return f"{value:.1f} ms" if value < 1000 else f"{value / 1000:.1f} s"
