"""A workload of a million requests: made as they come, forgotten as they end."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.simulate import workload

ROOT = Path(__file__).resolve().parent.parent.parent
MILLION = ROOT / "examples/workloads/million.json"

RUN = """
import json, sys
from services.cli.simulate import workload
from services.cli.simulate.clock import Simulation
from services.cli.simulate.document import Document
from services.cli.simulate.observer import Observer
from services.cli.simulate.plot import Plot
from services.cli.simulate.summary import Summary
from services.cli.simulate.table import Table
from services.cli.simulate.trace import Trace
from pathlib import Path

class Memory(Observer):
    # Resident pages, each time that so many requests have ended.
    def __init__(self, every):
        self.every, self.ended_requests, self.mib = every, 0, []
    def ended(self, live):
        self.ended_requests += 1
        if self.ended_requests % self.every == 0:
            self.mib.append(int(Path("/proc/self/statm").read_text().split()[1]) / 256)

given = workload.parse(sys.stdin.buffer.read())
config = given.core_config()
summary, memory = Summary(config.max_num_batched_tokens), Memory(given.requests[0].count // 10)
nowhere = open("/dev/null", "w")
others = [Document(nowhere, summary), Trace(nowhere), Plot(Path("p.svg"), "", config, summary), Table("", summary)]
simulation = Simulation(given, [summary, memory, *(others if sys.argv[1] == "all" else [])])
simulation.run()
core = simulation.core
print(json.dumps({
    "mib": memory.mib, "summary": summary.as_json(), "load": core.load().waiting + core.load().running,
    "free": core.load().free_blocks == core.load().total_blocks,
}))
"""


def run(count: int, watched_by: str) -> dict[str, object]:
    document = json.loads(MILLION.read_text())
    document["requests"][0]["count"] = count
    command = [sys.executable, "-c", RUN, watched_by]
    done = subprocess.run(command, input=json.dumps(document), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def check(found: dict[str, object], count: int, growth_mib: float) -> None:
    summary = found["summary"]
    assert isinstance(summary, dict)
    assert summary["completed"] == count
    assert summary["requests"] is None
    assert 0 < summary["ttft_ms"]["p50"] <= summary["ttft_ms"]["p99"] <= summary["ttft_ms"]["max"]
    assert (found["load"], found["free"]) == (0, True)
    mib = found["mib"]
    assert isinstance(mib, list)
    assert len(mib) == 10
    assert max(mib[6:]) - mib[5] < growth_mib, mib  # half of the run has filled what is kept exact while it is small


def test_the_example_is_a_million() -> None:
    assert sum(entry.count for entry in workload.read(MILLION).requests) == 1_000_000


def test_memory_does_not_grow_with_requests() -> None:
    check(run(20_000, "none"), 20_000, growth_mib=4)


@pytest.mark.slow
def test_a_million_requests_and_every_kind_of_observer() -> None:
    check(run(1_000_000, "all"), 1_000_000, growth_mib=20)
