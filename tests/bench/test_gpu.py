"""The script for a GPU, at toy size in Triton's interpreter, where nothing of the wire can be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.attention import reference
from tests.bench.gpu.__main__ import main
from tests.bench.gpu.case import Case, check
from tests.bench.gpu.clock import Ceilings
from tests.bench.gpu.rooms import dense_attention
from tests.kernels.paged import make_case

ROOT = Path(__file__).resolve().parents[2]
MISSING = ("grpc", "google", "pydantic", "pydantic_settings", "gguf", "tokenizers", "prometheus_client", "uvloop")
START = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({MISSING}))
sys.argv[0] = "gpu"
runpy.run_module("tests.bench.gpu", run_name="__main__")
"""


def toy(tmp_path: Path, *options: str) -> dict[str, Any]:
    """The JSON of a run, which must end well."""
    out = tmp_path / "gpu.json"
    command = [sys.executable, "-c", START, "--toy", "--out", str(out), *options]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-4000:]}"
    found: dict[str, Any] = json.loads(out.read_text())
    assert done.stdout.splitlines() == found["lines"]
    return found


def test_a_sample_runs_without_the_wire(tmp_path: Path) -> None:
    found = toy(tmp_path, "--match", "silu_mul, 5", "states, append", "attention, decode 3 x 40, window")
    assert {each["name"] for each in found["kernels"]} >= {"silu_mul, 5", "states, append 3"}
    assert all(each["right"] for each in found["kernels"])
    timed = [each for each in found["kernels"] if each["name"] == "states, append 3"]
    assert all(each["seconds"] > 0 and each["floor_s"] > 0 for each in timed)
    assert found["ceilings"]["bandwidth"] > 0


@pytest.mark.slow
def test_steps_run_without_the_wire(tmp_path: Path) -> None:
    found = toy(tmp_path, "--only", "steps", "--match", "qwen3-0.6b eager")
    assert [(step["rows"], step["what"]) for step in found["steps"]] == [(2, "greedy"), (2, "cut"), (2, "beside 8")]
    assert set(found["steps"][0]["parts"]) >= {"gather", "forward", "head", "append"}
    assert all(step["tokens_s"] > 0 and step["floor_s"] >= step["weights_floor_s"] > 0 for step in found["steps"])


@pytest.mark.slow
def test_all_of_it_runs_and_every_kernel_is_started(tmp_path: Path) -> None:
    found = toy(tmp_path, "--seconds", "1000")
    assert [each for each in found["kernels"] if not each["right"]] == []
    assert found["not_started"] == []
    assert len(found["steps"]) == 2 * 6 * 3


@pytest.mark.parametrize("window", [None, 20])
def test_dense_attention_is_the_reference(window: int | None) -> None:
    case = make_case([(40, 1), (0, 20), (3, 5)], heads=4, kv_heads=2, size=8)
    expected = reference.Attention(case.rows, window)(case.q, case.k_cache, case.v_cache, 0.3)
    cache = torch.stack((case.k_cache, case.v_cache))
    torch.testing.assert_close(dense_attention(case.rows, window, case.q, cache, 0.3), expected, atol=1e-5, rtol=1e-5)


def test_a_wrong_kernel_is_found() -> None:
    def case(run: Any, **options: Any) -> Case:
        return Case("x", lambda: (torch.randn(3, 8), torch.arange(4)), run, lambda x, i: (x * 2, i + 1), **options)

    assert check(case(lambda x, i: (x * 2, i + 1), tolerance=None)).right
    assert check(case(lambda x, i: (x * 2.001, i + 1))).right
    assert not check(case(lambda x, i: (x * 2.001, i + 1), tolerance=None)).right
    assert not check(case(lambda x, i: (x * 2.1, i + 1))).right
    assert not check(case(lambda x, i: (x * 2, i + (i == 3) + 1), tolerance=None)).right
    assert not check(case(lambda x, i: (torch.empty_like(x), i + 1))).right  # what was not written is NaN
    assert not check(case(lambda x, i: (x[:1] * 2, i + 1))).right


def test_a_floor_is_of_bytes_or_of_operations() -> None:
    ceilings = Ceilings(bandwidth=100.0, rate=1000.0, cache=0)
    assert ceilings.floor_s(200, 1000) == 2.0
    assert ceilings.floor_s(200, 4000) == 4.0
    assert ceilings.floor_s(200, 4000, bits=8) == 2.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu"])
    assert main() == 2
    assert "no CUDA GPU; --toy" in capsys.readouterr().err
