"""Rounds over servers that are there, missing or dead; medians and ratios by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from services.cli import prompts
from tests.bench.load.workloads import Workload
from tests.bench.peers import __main__ as peers
from tests.bench.peers import machine, report, servers
from tests.bench.peers.process import Running, ServerDied, Used, memory_mib
from tests.bench.peers.report import IDLE, Run
from tests.bench.peers.servers import Missing, Server
from tests.gateway.fake_engine import text_files

SERVER = """
import http.server, json, os, subprocess, sys
child = subprocess.Popen(["sleep", "60"])
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words): pass
    def answer(self, body):
        self.send_response(200); self.end_headers(); self.wfile.write(body)
    def do_GET(self):
        self.answer(b"{}")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["max_tokens"] == int(sys.argv[2]):
            print("out of memory", file=sys.stderr, flush=True); os._exit(3)
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
        events = [{"choices": [{"text": "a"}]}, {"choices": [{"text": "b"}], "usage": usage}]
        self.answer(b"".join(b"data: " + json.dumps(event).encode() + b"\\n\\n" for event in events))
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
TINY = Workload("W1", "tiny", 2, 4, 20, 16)


def peer(name: str, group: str = "vllm", dies_at: int = 0) -> Server:
    return Server(name, group, (sys.executable, "-S", "-c", SERVER, servers.PORT, str(dies_at)), model="known")


@pytest.fixture(autouse=True)
def _short_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are cut from less text, which is tokenized for every run."""
    text = prompts.reference_text()[:20_000]
    monkeypatch.setattr(prompts, "reference_text", lambda: text)


def rounds(tmp_path: Path, these: list[Server], *words: str) -> peers.Rounds:
    folder = tmp_path / "models" / servers.MODEL
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_bytes(text_files()["tokenizer.json"])
    given = peers.options(["--lab", str(tmp_path), "--out", str(tmp_path / "out.json"), "--idle", "0.1", *words])
    given.logs, given.workloads = tmp_path, [TINY]
    return peers.Rounds(given, these)


def test_rounds_go_to_and_fro(tmp_path: Path) -> None:
    measured = rounds(tmp_path, [peer("a", servers.OURS), peer("b")], "--rounds", "2")
    measured.go()
    order = [(run.round, run.server, run.workload) for run in measured.runs]
    assert order == [
        (i, server, work) for i, both in enumerate(("ab", "ba")) for server in both for work in ("W1", IDLE)
    ]
    assert all(run.counts and run.start_s and run.memory_mib for run in measured.runs)
    asked = [run for run in measured.runs if run.workload == "W1"]
    assert {(run.figures["prompt_tokens"], run.figures["output_tokens"]) for run in asked} == {(80, 64)}
    kept = json.loads((tmp_path / "out.json").read_text())
    assert len(kept["runs"]) == 8
    assert kept["medians"]["a"]["W1"]["rounds"] == 2
    assert [(row["server"], row["peer"]) for row in kept["ratios"]] == [("a", "vllm")]
    assert kept["servers"]["b"]["command"][-2:] == ["{port}", "0"]


def test_servers_that_die_are_said_and_the_rest_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = Server("broken", "llama", (sys.executable, "-S", "-c", "raise SystemExit('no such option')"))
    measured = rounds(tmp_path, [broken, peer("dies", dies_at=16), peer("lives", servers.OURS)], "--rounds", "2")
    measured.go()
    said = capsys.readouterr().err
    assert said.count("broken ended with status 1\n    no such option") == 1
    assert said.count("dies ended with status 3\n    out of memory") == 2
    assert said.count("W1 4 requests failed, the first: ") == 2
    assert set(report.medians(measured.runs)) == {"lives"}


def test_no_process_is_left(tmp_path: Path) -> None:
    with Running(peer("a"), tmp_path / "log", 30) as running:
        members = running.processes()
        assert [Path(f"/proc/{member.pid}/comm").read_text().strip()[:5] for member in members][1:] == ["sleep"]
        used = Used.of(members)
        assert [name for name, _ in used.by_process.values()] == [Path(sys.executable).name, "sleep"]
        assert set(used.since(used).values()) == {0.0}
        fine = sum(Used.finely(members).since(Used({})).values())
        assert abs(fine - sum(Used.of(members).since(Used({})).values())) < 0.1
        assert memory_mib(members) > 0
    assert not any(member.lives for member in members)


def test_a_server_that_never_answers(tmp_path: Path) -> None:
    silent = Server(
        "silent", "vllm", (sys.executable, "-S", "-c", "print('hm', flush=True); import time; time.sleep(60)")
    )
    running = Running(silent, tmp_path / "log", 0.5)
    with pytest.raises(ServerDied, match=r"silent does not answer after 0 s\n    hm"), running:
        pass
    assert running._seen
    assert not any(member.lives for member in running._seen)


def test_our_own_processes_are_told_by_role(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.bench.peers import process

    lines = {
        "python -P -m services.local.child /tmp/x services.engine --listen unix:/tmp/x/engine": "engine",
        "python -m services.cli serve model.gguf": "cli",
        "VLLM::Worker": "VLLM::Worker",
        "/venv/bin/python3 /venv/bin/vllm serve /models/m": "vllm",
        "/build/bin/llama-server -m x.gguf": "llama-server",
    }
    for line, name in lines.items():
        monkeypatch.setattr(process.Path, "read_text", lambda self, line=line: line.replace(" ", "\0") + "\0")
        assert process.role(1) == name


def executable(path: Path, says: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{says}\n")
    path.chmod(0o755)


def test_peers_are_found_where_they_are(tmp_path: Path) -> None:
    none = servers.find(None, ["vllm"], [], 2)
    assert none == [Missing("vllm", "no folder with peers: LAB in the environment, or --lab")]
    assert [one.name for one in servers.find(tmp_path, list(servers.PEERS), [], 2)] == list(servers.PEERS)
    assert all(isinstance(one, Missing) for one in servers.find(tmp_path, list(servers.PEERS), [], 2))
    two_each = ["vllm", "vllm", "llama", "llama"]
    assert [one.name for one in servers.find(tmp_path, list(servers.SETTINGS), [], 2)] == two_each
    executable(tmp_path / "peers/llama/build/bin/llama-server", "echo 'version: 7 (abc)' >&2")
    executable(tmp_path / "peers/vllm-venv/bin/vllm", "")
    executable(tmp_path / "peers/vllm-venv/bin/python", "echo 1.2.3")
    executable(tmp_path / "peers/vllm-venv/bin/transformers", "")
    (tmp_path / "models/gguf").mkdir(parents=True)
    (tmp_path / "models/gguf/m-Q4_0.gguf").touch()
    (tmp_path / "models" / servers.MODEL).mkdir()
    found = {one.name: one for one in servers.find(tmp_path, list(servers.PEERS), [], 4)}
    assert list(found) == ["vllm-bf16", "vllm-f32", "llama-q4_0", "llama-q4_1", "transformers"]
    assert [one.name for one in servers.find(tmp_path, ["llama-q4_0", "vllm-f32"], [], 4)] == ["llama-q4_0", "vllm-f32"]
    assert servers.find(tmp_path, ["llama-q4_1"], [], 4) == [found["llama-q4_1"]]
    missing = found.pop("llama-q4_1")
    assert isinstance(missing, Missing)
    assert "no *Q4_1.gguf" in missing.why
    assert {name: one.version for name, one in found.items() if isinstance(one, Server)} == {
        "vllm-bf16": "1.2.3",
        "vllm-f32": "1.2.3",
        "llama-q4_0": "7 (abc)",
        "transformers": "1.2.3",
    }
    llama = found["llama-q4_0"]
    assert isinstance(llama, Server)
    assert llama.at(81)[:7] == [*llama.command[:5], "--port", "81"]


@pytest.mark.parametrize(
    ("text", "name", "model", "rest"),
    [
        ("plain=/m.gguf", "plain", "/m.gguf", []),
        ("bf16={lab}/folder --dtype float32", "bf16", "/lab/folder", ["--dtype", "float32"]),
        ("fast=--worker-threads 1", "fast", "DEMO", ["--worker-threads", "1"]),
        ("", "triptych", "DEMO", []),
    ],
)
def test_configurations_of_ours(
    text: str, name: str, model: str, rest: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers.demo, "fetch", lambda: Path("DEMO"))
    ours = servers.our_server(text, Path("/lab"))
    assert (ours.name, ours.command[4]) == (name, model)
    assert list(ours.command[len(ours.command) - len(rest) :]) == rest
    assert ours.version


def test_ours_from_another_checkout(tmp_path: Path) -> None:
    ours = servers.our_server(f"old@{tmp_path}=/m.gguf")
    assert (ours.name, ours.folder, ours.environ) == ("old", tmp_path, {"PYTHONPATH": str(tmp_path)})


def run(server: str, group: str, out: float, ttft: float | None, **other) -> Run:
    figures = dict.fromkeys(report.FIGURES, 1.0) | {"output_tokens_per_s": out, "ttft_p50_ms": ttft, "failed": 0}
    return Run(server, group, "W1", 0, 2.0, {**figures, **other}, {"worker": 1.0, "engine": 0.5})


def test_medians_and_ratios() -> None:
    runs = [
        *(run("ours", "ours", out, ttft) for out, ttft in ((100, 30), (300, 10), (120, 20))),
        *(run("vllm-bf16", "vllm", out, 80) for out in (20, 40)),
        run("vllm-f32", "vllm", 24, 40),
        run("vllm-f32", "vllm", 9999, 1, failed=2),
        run("llama", "llama", 240, None),
    ]
    found = report.medians(runs)
    assert found["ours"]["W1"]["output_tokens_per_s"] == 120
    assert found["ours"]["W1"]["cpu_percent"] == 75
    assert (found["vllm-f32"]["W1"]["output_tokens_per_s"], found["vllm-f32"]["W1"]["rounds"]) == (24, 1)
    groups = {run.server: run.group for run in runs} | {"transformers": "transformers"}
    rows = {row["peer"]: row for row in report.ratios(found, groups)}
    # Of vLLM the better of both in each figure: 30 tokens/s, and 40 ms.
    assert (rows["vllm"]["output_tokens_per_s"], rows["vllm"]["ttft_p50_ms"]) == (4.0, 0.5)
    assert (rows["llama"]["output_tokens_per_s"], rows["llama"]["ttft_p50_ms"]) == (0.5, None)
    assert rows["transformers"]["output_tokens_per_s"] is None
    printed = report.tables(runs, groups, ["W1"])
    assert "| W1  | ours | vllm             | 4.00      |" in printed
    assert "nothing is asked" not in printed
    assert printed.splitlines()[-3:] == [
        "|     | ours | worker | engine | client |",
        "| --- | ---- | ------ | ------ | ------ |",
        "| W1  | ours | 1.00   | 0.50   | 0.00   |",
    ]


def test_the_machine() -> None:
    first = "model name\t: Some CPU\ncpu family\t: 25\nmodel\t\t: 1\nflags\t\t: fpu avx2 avx512_vnni\n"
    found = machine.describe(f"{first}\nmodel name\t: Another\n")
    assert (found["cpu"], found["family"]) == ("Some CPU", "family 25, model 1")
    assert found["flags"] == ["avx2", "avx512_vnni"]
    assert machine.describe()["cores"] >= 1
    earlier, later = machine.Clock.now(), machine.Clock.now()
    assert later.busy_s >= earlier.busy_s > 0


@pytest.mark.parametrize("words", [["--peers", "ollama"], ["--workloads", "W0"]])
def test_unknown_names_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        peers.options(words)
    assert words[1] in capsys.readouterr().err


def test_two_servers_of_one_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert peers.main(["--peers", "", "--ours", "a=/m", "--ours", "a=/n"]) == 2
    assert "two servers are named a" in capsys.readouterr().err
