"""Our server and others on the same model and machine, one at a time and in turn.

python -m tests.bench.peers [--lab LAB] [--workloads W1,W2] [--rounds 3] [--peers vllm,llama] [--out FILE]
    [--ours gguf] [--ours "bf16={lab}/models/smollm2-135m"] [--ours "before@/other/checkout=--dtype float16"]

Every round starts each server by itself on a free port, with the settings of tests/bench/peers/servers.py, sends it
every workload, lets it idle, and ends it; every other round goes backwards. All servers of a round get the same
prompts, every round has its own. Builds and installs nothing: a peer that is not there is named and left out.
One of our configurations is NAME=OPTIONS of `triptych serve`.

Nothing else should run meanwhile. What did is counted: `others` in the lines on standard error is CPU time that
neither server nor client used, `stolen` what the host gave to other machines, in percent of one core.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from tests.bench.load.workloads import Workload, measure, named
from tests.bench.peers import machine, report
from tests.bench.peers.process import Running, ServerDied, Used, memory_mib
from tests.bench.peers.report import IDLE, Run
from tests.bench.peers.servers import PEERS, SETTINGS, Missing, Server, find, tokenizer

_SETTLE_S = 1.0
_PEERS_HELP = f"of {', '.join(PEERS)}, or one setting of theirs: {', '.join(SETTINGS)}; none of them if empty"


def options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lab", type=Path, default=os.environ.get("LAB"), help="the folder with peers and models")
    parser.add_argument("--peers", default=",".join(PEERS), help=_PEERS_HELP)
    parser.add_argument("--ours", action="append", metavar="NAME[@CHECKOUT][=OPTIONS]", help="may be repeated")
    parser.add_argument("--workloads", default="all", help="W1 to W6 with commas between them")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, help="at most so many requests of each workload, for a trial")
    parser.add_argument("--idle", type=float, default=10.0, metavar="SECONDS", help="of nothing asked; 0 for none")
    parser.add_argument("--ready", type=float, default=600.0, metavar="SECONDS", help="for a server to start")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the prompts; another each time")
    parser.add_argument("--out", type=Path, help="takes all figures as JSON, anew after each server")
    parser.add_argument("--logs", type=Path, help="keeps what the servers print; a folder of its own by default")
    given = parser.parse_args(argv)
    try:
        given.workloads = [workload.at_most(given.requests) for workload in named(given.workloads.split(","))]
    except ValueError as error:
        parser.error(str(error))
    given.peers = [name for name in given.peers.split(",") if name]
    if unknown := set(given.peers) - {*PEERS, *SETTINGS}:
        parser.error(f"no peer {min(unknown)!r}: {', '.join((*PEERS, *SETTINGS))}")
    given.lab = given.lab and Path(given.lab).resolve()
    return given


class Rounds:
    """All that is measured, and who is measured."""

    def __init__(self, given: argparse.Namespace, servers: list[Server]) -> None:
        self.given = given
        self.servers = {server.name: server for server in servers}
        self.runs: list[Run] = []
        self.began = time.strftime("%Y-%m-%d %H:%M:%S")

    @property
    def groups(self) -> dict[str, str]:
        """Server → peer, ours too."""
        return {name: server.group for name, server in self.servers.items()}

    def go(self) -> None:
        """Every round. A server that does not start is tried no more; one that dies is, in the next round."""
        left = list(self.servers.values())
        for number in range(self.given.rounds):
            for server in left[:: -1 if number % 2 else 1]:
                log = self.given.logs / f"{server.name}.log"
                running = Running(server, log, self.given.ready)
                _say(f"round {number + 1}, {server.name}")
                try:
                    with running:
                        self._measure(running, number)
                except ServerDied as error:
                    _say(str(error))
                    if not running.start_s:
                        left.remove(server)
                self._write()

    def _measure(self, running: Running, number: int) -> None:
        for workload in self.given.workloads:
            run = self._run(running, number, workload)
            self.runs.append(run)
            _say(_line(run))
            running.check()
        if self.given.idle:
            time.sleep(min(_SETTLE_S, self.given.idle))
            self.runs.append(self._run(running, number, None))
            _say(_line(self.runs[-1]))
            running.check()

    def _run(self, running: Running, number: int, workload: Workload | None) -> Run:
        """One workload, or nothing asked. The CPU time is that of warming up and measuring."""
        server, processes = running.server, running.processes()
        count = Used.of if workload else Used.finely
        load, clock, own, used = machine.load(), machine.Clock.now(), time.process_time(), count(processes)
        begin = time.monotonic()
        figures: dict[str, Any] = {}
        if workload is None:
            time.sleep(self.given.idle)
        else:
            figures = self._ask(running, workload, self.given.seed + number)
        seconds = time.monotonic() - begin
        own, after = time.process_time() - own, machine.Clock.now()
        processes = running.processes()
        cpu = count(processes).since(used)
        return Run(
            server=server.name,
            group=server.group,
            workload=workload.name if workload else IDLE,
            round=number,
            seconds=round(seconds, 3),
            figures=figures,
            cpu_s=cpu,
            client_cpu_s=round(own, 2),
            other_cpu_s=round(max(0.0, after.busy_s - clock.busy_s - own - sum(cpu.values())), 2),
            stolen_s=round(after.stolen_s - clock.stolen_s, 2),
            load_before=load,
            memory_mib=memory_mib(processes),
            start_s=running.start_s,
        )

    def _ask(self, running: Running, workload: Workload, seed: int) -> dict[str, Any]:
        server, folder = running.server, tokenizer(self.given.lab)
        try:
            found = measure(
                running.url, workload, seed, tokenizer=folder, model=server.model, extra_body=server.extra_body
            )
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return {"failed": workload.requests, "first_error": repr(error)}
        return found.as_dict()

    def _write(self) -> None:
        if self.given.out:
            self.given.out.write_text(json.dumps(self.as_json(), indent=1) + "\n")

    def as_json(self) -> dict[str, Any]:
        """All figures."""
        found = report.medians(self.runs)
        return {
            "began": self.began,
            "machine": machine.describe(),
            "command": sys.argv[1:],
            "seed": self.given.seed,
            "workloads": [asdict(workload) for workload in self.given.workloads],
            "servers": {
                name: {"version": server.version, "command": server.command, "environment": server.environ}
                for name, server in self.servers.items()
            },
            "medians": found,
            "ratios": report.ratios(found, self.groups),
            "runs": [report.as_json(run) for run in self.runs],
        }


def _line(run: Run) -> str:
    """A run while it is new."""
    figures = run.figures
    noise = f"load {run.load_before}, others {_percent(run.other_cpu_s, run)}, stolen {_percent(run.stolen_s, run)}"
    used = f"CPU s: {report.roles(run)}; client {run.client_cpu_s}; {noise}"
    if run.workload == IDLE:
        return f"  idle {run.seconds:.0f} s: {100 * sum(run.cpu_s.values()) / run.seconds:.2f} % of a core; {used}"
    if not run.counts:
        return f"  {run.workload} {figures['failed']} requests failed, the first: {figures['first_error']}"
    return (
        f"  {run.workload} {figures['output_tokens_per_s']:8.1f} out {figures['total_tokens_per_s']:8.1f} all tok/s,"
        f" TTFT {figures['ttft_p50_ms']:.0f} ms, TPOT {figures['tpot_p50_ms'] or 0:.1f} ms; {used}"
    )


def _percent(seconds: float, run: Run) -> str:
    return f"{100 * seconds / run.seconds:.1f} %"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _leave(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def main(argv: Sequence[str]) -> int:
    """Prints tables. Status 1 where a server that was there has a workload without one good run."""
    given = options(argv)
    found = find(given.lab, given.peers, given.ours or ["triptych"], len(os.sched_getaffinity(0)))
    names = [one.name for one in found]
    if twice := [name for name in names if names.count(name) > 1]:
        _say(f"--ours: two servers are named {twice[0]}")
        return 2
    for missing in found:
        if isinstance(missing, Missing):
            _say(f"{missing.name} is left out: {missing.why}")
    signal.signal(signal.SIGTERM, _leave)  # so that the server that runs is ended too
    rounds = Rounds(given, [server for server in found if isinstance(server, Server)])
    with ExitStack() as stack:
        given.logs = given.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-peers-")))
        given.logs.mkdir(parents=True, exist_ok=True)
        rounds.go()
    of = machine.describe()
    print(f"{rounds.began}, {of['cpu']} ({of['family']}), {of['cores']} cores: {' '.join(of['flags'])}\n")
    print("\n".join(f"{name}: {server.version}" for name, server in rounds.servers.items()) + "\n")
    print(report.tables(rounds.runs, rounds.groups, [workload.name for workload in given.workloads]))
    measured = report.medians(rounds.runs)
    whole = all(workload.name in measured.get(name, {}) for name in rounds.servers for workload in given.workloads)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
