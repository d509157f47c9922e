"""Triton kernels without a GPU: interpreted and compiled, each in a process of its own, else refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.dispatch import choose_ops
from kernels.native.build import Unavailable
from services.common.errors import FailedPrecondition
from services.worker.config import WorkerSettings
from services.worker.runner import TorchRunner
from tests.worker.tiny_llama import tiny_llama

ROOT = Path(__file__).resolve().parents[2]


def start(*arguments: str, interpret: bool) -> str:
    """What a Python process says, which must end well."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def interpret(*options: str) -> str:
    folders = ("tests/kernels/interpreted", "tests/worker/interpreted")
    files = sorted(str(path) for folder in folders for path in (ROOT / folder).glob("*.py"))
    return start("pytest", "-q", "-p", "no:cacheprovider", *options, *files, interpret=True)


def test_interpreted_kernels_are_what_their_references_say():
    assert " passed" in interpret()


@pytest.mark.slow
def test_more_of_them_are():
    assert " passed" in interpret("-m", "slow")


def test_a_sample_compiles_and_spills_nothing():
    kernels = ["add_rms_norm", "attention, decode, split", "linear int8, decode, split", "linear int4, decode"]
    options = ("--shape", "8B", "--target", "90", *(part for kernel in kernels for part in ("--kernel", kernel)))
    found = json.loads(start("kernels.compiled", "--json", *options, interpret=False))
    assert [each["kernel"] for each in found] == kernels
    for each in found:
        assert each["spilled"] == 0
        assert 0 < each["registers"] <= 255
        assert 0 < each["shared"] <= 227 * 1024


@pytest.mark.slow
def test_all_compile_spill_nothing_and_are_as_the_table_says():
    table = start("kernels.compiled", interpret=False)  # its status is 1 where a kernel spills
    assert table in (ROOT / "kernels/README.md").read_text(), "make kernels"


@pytest.mark.slow
def test_launches_bind_as_they_are_compiled():
    assert " passed" in start("pytest", "-q", "-p", "no:cacheprovider", "tests/kernels/bound.py", interpret=False)


@pytest.fixture
def no_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("no_interpreter")
def test_auto_is_triton_on_a_gpu_and_it_is_refused_without():
    assert choose_ops("auto", device="cuda").name == "triton"
    assert choose_ops("auto", device="cpu").name != "triton"
    with pytest.raises(Unavailable, match=r"run on a CUDA GPU, and device is 'cpu'; with TRITON_INTERPRET=1"):
        choose_ops("triton")


@pytest.mark.usefixtures("no_interpreter")
def test_a_worker_without_a_gpu_refuses_them_by_the_name_of_the_setting(tmp_path):
    runner = TorchRunner(WorkerSettings.build(ops="triton"))
    with pytest.raises(FailedPrecondition, match="--ops triton cannot be had: Triton kernels run on a CUDA") as caught:
        runner.load(str(tiny_llama(tmp_path / "tiny")), None)
    assert caught.value.field == "ops"
