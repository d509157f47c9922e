"""What the runs came to: medians over rounds, and ours over the best of each peer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tests.bench.load.table import number, table
from tests.bench.peers.servers import OURS

MORE_IS_BETTER = ("output_tokens_per_s", "total_tokens_per_s")
LESS_IS_BETTER = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "itl_p50_ms", "itl_p99_ms")
FIGURES = (*MORE_IS_BETTER, *LESS_IS_BETTER)
IDLE = "idle"
"""The workload of which nothing is asked."""


@dataclass(frozen=True, slots=True)
class Run:
    """One workload on one server in one round. CPU times are seconds."""

    server: str
    group: str
    workload: str
    round: int
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)  # of the server, by role
    client_cpu_s: float = 0.0
    other_cpu_s: float = 0.0  # what the machine did besides
    stolen_s: float = 0.0  # what its host gave to others
    load_before: float = 0.0
    memory_mib: int = 0
    start_s: float = 0.0  # until the server answered

    @property
    def counts(self) -> bool:
        """Whether every request was answered."""
        return not self.figures.get("failed")


Medians = dict[str, dict[str, dict[str, float | None]]]
"""Server → workload → figure."""


def medians(runs: Iterable[Run]) -> Medians:
    """Of the runs that count. `cpu_percent` is that of one core, all roles together."""
    kept: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        if run.counts:
            kept.setdefault((run.server, run.workload), []).append(run)
    found: Medians = {}
    for (server, workload), same in kept.items():
        figures = {name: _median([run.figures.get(name) for run in same]) for name in FIGURES}
        figures["cpu_percent"] = _median([100 * sum(run.cpu_s.values()) / run.seconds for run in same])
        figures["memory_mib"] = _median([run.memory_mib for run in same])
        figures["rounds"] = len(same)
        found.setdefault(server, {})[workload] = figures
    return found


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 4) if known else None


def ratios(found: Medians, groups: dict[str, str]) -> list[dict[str, Any]]:
    """For each workload, server of ours and peer: ours over the peer's best, figure by figure.

    `groups` says to which peer a server belongs. The best is that of the median, in each figure by itself.
    """
    rows = []
    for server, group in groups.items():
        for workload, own in found.get(server, {}).items():
            if group != OURS or workload == IDLE:
                continue
            for peer in dict.fromkeys(name for name in groups.values() if name != OURS):
                theirs = [
                    found[name][workload] for name in groups if groups[name] == peer and workload in found.get(name, {})
                ]
                row: dict[str, Any] = {"workload": workload, "server": server, "peer": peer}
                for names, best in ((MORE_IS_BETTER, max), (LESS_IS_BETTER, min)):
                    for name in names:
                        row[name] = _over(own[name], [one[name] for one in theirs], best)
                rows.append(row)
    return rows


def _over(own: float | None, theirs: Sequence[float | None], best: Callable[[list[float]], float]) -> float | None:
    known = [value for value in theirs if value]
    return round(own / best(known), 3) if own and known else None


def tables(runs: Sequence[Run], groups: dict[str, str], workloads: Sequence[str]) -> str:
    """Medians of each server, ratios, and what idle servers use."""
    found = medians(runs)
    head = ("", "server", "out tok/s", "all tok/s", "TTFT p50/p99", "TPOT p50", "ITL p50/p99", "CPU %", "MiB", "rounds")
    rows = [
        _row(workload, server, found[server][workload])
        for workload in workloads
        for server in groups
        if workload in found.get(server, {})
    ]
    parts = ["Medians; times in ms, CPU in % of one core.", table(head, rows)]
    if compared := ratios(found, groups):
        head = ("", "ours", "over the best of", "out tok/s", "all tok/s", "TTFT p50", "TPOT p50")
        names = ("output_tokens_per_s", "total_tokens_per_s", "ttft_p50_ms", "tpot_p50_ms")
        order = sorted(compared, key=lambda row: workloads.index(row["workload"]))
        lines = [
            [row["workload"], row["server"], row["peer"], *(number(row[name], 2) for name in names)] for row in order
        ]
        parts += ["Ratios of medians, by the best setting of each peer.", table(head, lines)]
    if ours := by_role(run for run in runs if run.group == OURS and run.workload != IDLE):
        names = list(dict.fromkeys(name for seconds in ours.values() for name in seconds))
        lines = [
            [workload, server, *(number(ours[workload, server].get(name), 2) for name in names)]
            for workload in workloads
            for server in groups
            if (workload, server) in ours
        ]
        parts += ["CPU seconds of a workload by role, its warm-up among them.", table(("", "ours", *names), lines)]
    if idle := [run for run in runs if run.workload == IDLE]:
        head = ("server", "idle CPU %", "by role, seconds", "MiB", "answers after s")
        lines = []
        for server in groups:
            if own := [run for run in idle if run.server == server]:
                percent = found[server][IDLE]["cpu_percent"]
                last = own[-1]
                start = statistics.median(run.start_s for run in own)
                lines.append([server, number(percent, 2), roles(last), last.memory_mib, number(start, 1)])
        parts += ["While nothing is asked; CPU in % of one core.", table(head, lines)]
    return "\n\n".join(parts)


def by_role(runs: Iterable[Run]) -> dict[tuple[str, str], dict[str, float]]:
    """(workload, server) → role → median of its CPU seconds; the client is a role too."""
    kept: dict[tuple[str, str], dict[str, list[float]]] = {}
    for run in runs:
        roles_of = kept.setdefault((run.workload, run.server), {})
        for name, seconds in {**run.cpu_s, "client": run.client_cpu_s}.items():
            roles_of.setdefault(name, []).append(seconds)
    return {
        key: {name: round(statistics.median(seconds), 2) for name, seconds in roles_of.items()}
        for key, roles_of in kept.items()
    }


def roles(run: Run) -> str:
    """CPU time by role."""
    return ", ".join(f"{name} {round(seconds, 3):g}" for name, seconds in run.cpu_s.items())


def _row(workload: str, server: str, figures: dict[str, float | None]) -> list[object]:
    pairs = {
        what: [number(figures[f"{what}_{part}_ms"], 0 if what == "ttft" else 1) for part in ("p50", "p99")]
        for what in ("ttft", "itl")
    }
    ttft, itl = (None if None in pair else " / ".join(map(str, pair)) for pair in pairs.values())
    return [
        workload,
        server,
        number(figures["output_tokens_per_s"], 1),
        number(figures["total_tokens_per_s"], 1),
        ttft,
        number(figures["tpot_p50_ms"], 1),
        itl,
        number(figures["cpu_percent"]),
        number(figures["memory_mib"]),
        number(figures["rounds"]),
    ]


def as_json(run: Run) -> dict[str, Any]:
    """For the file."""
    return asdict(run)
