"""A local cluster starts, answers, and leaves nothing behind, however it ends."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.cli import chat, client, complete, export_text
from services.local.cluster import CHILD, Cluster, ClusterError, free_port

ROOT = Path(__file__).resolve().parent.parent.parent
PATIENCE_S = 30


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A simulated worker whose every answer is scripted."""
    folder = tmp_path_factory.mktemp("cluster")
    script = folder / "script.json"
    script.write_text(json.dumps({"otherwise": {"text": "It scatters."}}))
    with (
        (folder / "log").open("ab") as log,
        Cluster(worker={"simulated": True, "script": script}, log=log) as running,
    ):
        yield running


def serve(*options: str) -> subprocess.Popen[str]:
    ports = [f"--http-port={free_port()}", f"--grpc-port={free_port()}", "--engine-metrics-port=0"]
    return subprocess.Popen(
        [sys.executable, "-m", "services.cli", "serve", "--simulated", "--worker-metrics-port=0", *ports, *options],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_line(process: subprocess.Popen[str], beginning: str) -> str:
    assert process.stdout
    for line in process.stdout:
        if line.startswith(beginning):
            return line
    assert process.stderr
    raise AssertionError(f"ended without {beginning!r}: {process.stderr.read()}")


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def sockets_of(pids: list[int]) -> list[Path]:
    words = [word for pid in pids for word in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]
    return [Path(word.partition("unix:")[2]) for word in words if "unix:" in word]


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if alive(pid)]}"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_process_and_no_socket(number: signal.Signals) -> None:
    process = serve("--ask=Hello", "--max-model-len=512")
    wait_for_line(process, "Ready. ")
    wait_for_line(process, "Ctrl-C")
    pids = children(process.pid)
    sockets = sockets_of(pids)
    assert len(pids) == 3
    assert all(path.is_socket() for path in sockets)
    assert sockets
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    wait_gone(pids)
    assert not any(path.parent.exists() for path in sockets)


def test_children_end_when_their_parent_is_killed() -> None:
    process = serve()
    wait_for_line(process, "Ready. ")
    pids = children(process.pid)
    sockets = sockets_of(pids)
    process.kill()
    process.communicate(timeout=PATIENCE_S)
    wait_gone(pids)
    assert not any(path.parent.exists() for path in sockets)


def test_a_role_that_crashes_again_at_once_ends_the_cluster_with_a_message() -> None:
    process = serve()
    wait_for_line(process, "Ready. ")
    pids = children(process.pid)
    while process.poll() is None:  # the first time it may be started again
        for pid in children(process.pid):
            with contextlib.suppress(OSError):
                if b"services.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    _, error = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "the worker ended by SIGKILL" in error
    wait_gone(pids)


def test_a_role_that_cannot_start_is_named(tmp_path: Path) -> None:
    with (tmp_path / "log").open("ab") as log:
        broken = Cluster(engine={"no_such_knob": 1}, worker={"simulated": True}, log=log)
        with pytest.raises(ClusterError, match="the engine ended with status 2"):
            broken.start()
    assert "no-such-knob" in (tmp_path / "log").read_text()


def test_a_child_that_ends_leaves_the_folder_to_the_others(tmp_path: Path) -> None:
    with subprocess.Popen([*CHILD, str(tmp_path), "platform"], stdin=subprocess.PIPE) as child:
        assert child.wait(PATIENCE_S) == 0
    assert tmp_path.exists()


def test_modules_in_the_users_folder_are_not_run(tmp_path: Path) -> None:
    (tmp_path / "platform.py").write_text("print('not ours')")
    command = [*CHILD, str(tmp_path / "private"), "platform"]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout
        assert "not ours" not in child.stdout.read()
        assert child.wait(PATIENCE_S) == 0


def test_the_cluster_answers(cluster: Cluster) -> None:
    with urllib.request.urlopen(f"{cluster.http_url}/v1/models", timeout=10) as answer:
        assert len(json.load(answer)["data"]) == 1
    cluster.check()
    assert cluster.is_ready()


def test_complete(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    status = complete.main("complete", ["The sky is blue since", "--address", cluster.grpc_address, "--echo"])
    assert status == 0
    assert capsys.readouterr().out == "The sky is blue sinceIt scatters.\n"


def test_chat_reads_turns_from_a_pipe(cluster: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "chat", "--address", cluster.grpc_address, "--system", "Be brief."],
        cwd=ROOT,
        input="Why is the sky blue?\n\nAnd at night?\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "It scatters.\nIt scatters.\n"


def test_a_refusal_is_one_sentence(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    assert complete.main("complete", ["Hi", "--address", cluster.grpc_address, "--model=other"]) == 1
    error = capsys.readouterr().err
    assert "other" in error
    assert error.count("\n") == 1


def test_nobody_at_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert chat.main("chat", ["--address", f"127.0.0.1:{free_port()}"]) == 1
    assert "`triptych serve` starts one" in capsys.readouterr().err


async def test_an_answer_can_be_given_up(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    await client.answer(cluster.grpc_address, "Why?", give_up=lambda: True)
    assert len(capsys.readouterr().out) < len("It scatters.\n")


def exported(folder: Path, *source: str) -> dict[str, bytes]:
    assert export_text.main("export-text", [str(folder), *source]) == 0
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_export_text_from_running_processes_and_from_a_folder(cluster: Cluster, tmp_path: Path) -> None:
    engine = exported(tmp_path / "engine", f"--engine=unix:{cluster.folder}/engine")
    worker = exported(tmp_path / "worker", f"--worker=unix:{cluster.folder}/worker")
    again = exported(tmp_path / "again", f"--model={tmp_path / 'worker'}")
    assert "tokenizer.json" in engine
    assert engine == worker == again


@pytest.mark.slow
def test_export_text_from_a_gguf(demo_gguf: Path, tmp_path: Path) -> None:
    files = exported(tmp_path / "text", f"--model={demo_gguf}")
    assert json.loads(files["config.json"])["model_type"] == "llama"
    assert "tokenizer.json" in files


def test_a_port_that_another_server_has_is_said() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ClusterError, match=f"--http-port: something listens on 127.0.0.1:{port}"):
            Cluster(worker={"simulated": True}, http_port=port).start()


def test_the_environment_is_not_outranked_by_what_is_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(worker={"simulated": True})
    assert "--log-style=text" in cluster._arguments("engine")
    monkeypatch.setenv("TRIPTYCH_ENGINE_LOG_STYLE", "json")
    assert "--log-style=text" not in cluster._arguments("engine")
    assert "--log-style=text" in cluster._arguments("worker")
    assert "--log-style=text" not in Cluster(engine={"config": "file.toml"})._arguments("engine")


def test_a_model_that_cannot_be_loaded_ends_the_cluster_with_a_message(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    command = [sys.executable, "-m", "services.cli", "serve", str(broken), f"--http-port={free_port()}"]
    command += [f"--grpc-port={free_port()}", "--engine-metrics-port=0", "--worker-metrics-port=0"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 1
    assert "cannot load the model" in ended.stderr
    assert "the worker ended with status 1" in ended.stderr
