"""The package as a user gets it: built, installed elsewhere, running without the repository."""

from __future__ import annotations

import os
import shutil
import signal
import site
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from services.local.cluster import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
PACKED = (
    "pyproject.toml",
    "setup.py",
    "constraints.txt",
    "README.md",
    "LICENSE",
    "protos",
    "services",
    "kernels",
    "third_party",
)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy without stubs, as a fresh clone would."""
    source = tmp_path_factory.mktemp("source")
    for name in PACKED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("*_pb2*", "__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(source / "dist"), str(source)],
        check=True,
        capture_output=True,
    )
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel in it; the dependencies are the ones that are installed here."""
    folder = tmp_path_factory.mktemp("elsewhere")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(packages), str(wheel)],
        check=True,
        capture_output=True,
    )
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()))
    return folder


def triptych(installed: Path, *words: str) -> list[str]:
    return [str(installed / "venv/bin/python"), "-P", "-m", "services.cli", *words]


def test_the_wheel_holds_stubs_and_contracts_and_no_tests(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"protos/common.proto", "protos/common_pb2.py", "protos/gateway_pb2_grpc.py"} <= names
    assert "services/worker/models/__init__.py" in names
    assert not [name for name in names if name.startswith("tests")]
    listed = subprocess.run(
        ["git", "ls-files", "services", "kernels"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    packed = {name for name in listed.stdout.split() if name.endswith((".py", ".cpp", ".jinja"))}
    modules = {name for name in packed if (ROOT / name).exists()}
    assert modules <= names


def test_it_runs_outside_the_repository(installed: Path) -> None:
    done = subprocess.run(triptych(installed, "--version"), cwd=installed, capture_output=True, text=True, check=False)
    assert done.stdout == "triptych 0.1.0\n", done.stderr
    code = "import services; print(services.__file__)"
    python = triptych(installed)[0]
    where = subprocess.run([python, "-P", "-c", code], cwd=installed, capture_output=True, text=True, check=True)
    assert str(installed) in where.stdout


def test_it_serves_outside_the_repository(installed: Path) -> None:
    options = ["--simulated", "--engine-metrics-port=0", "--worker-metrics-port=0", f"--grpc-port={free_port()}"]
    process = subprocess.Popen(
        triptych(installed, "serve", f"--http-port={free_port()}", "--ask=Hello", *options),
        cwd=installed,
        stdout=subprocess.PIPE,
        text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert process.stdout
    lines = iter(process.stdout)
    assert any(line.startswith("Ready. ") for line in lines)
    assert any(line.startswith("Ctrl-C") for line in lines)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 0
