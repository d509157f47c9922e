"""The named workloads, and the generator against our own gateway."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from services.cli import bench
from services.cli.load import Target
from tests.bench.load.__main__ import main
from tests.bench.load.table import table
from tests.bench.load.workloads import WORKLOADS, named
from tests.gateway.fake_engine import FakeEngine, text_files
from tests.gateway.stack import gateway_stack


async def test_a_workload_against_our_own_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.json").write_bytes(text_files()["tokenizer.json"])
    engine = FakeEngine(script=lambda submit, choice: [97] * 200, per_step=8)
    async with gateway_stack(engine) as stack:
        words = [
            "--base-url",
            str(stack.http.base_url).rstrip("/"),
            "--workloads",
            "W1",
            "--requests",
            "3",
            "--runs",
            "2",
        ]
        out = tmp_path / "out.json"
        status = await asyncio.to_thread(main, [*words, "--tokenizer", str(tmp_path), "--json", str(out)])
    assert status == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["workload"], line["run"], line["failed"]) for line in lines] == [("W1", 0, 0), ("W1", 1, 0)]
    assert {(line["prompt_tokens"], line["output_tokens"]) for line in lines} == {(3 * 128, 3 * 128)}
    measured = [bytes(submit.prompt_id_i32le) for submit in engine.submits if submit.sampling.max_tokens == 128]
    assert len(set(measured)) == 6
    assert {submit.sampling.min_tokens for submit in engine.submits} == {8, 128}
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 4
    assert printed[2].startswith("| W1 ")
    assert "| 3/3 " in printed[2]


def test_workloads_by_name() -> None:
    assert named(["all"]) == list(WORKLOADS)
    assert [workload.name for workload in named(["W6", "W2"])] == ["W6", "W2"]
    assert named(["W4"])[0].at_most(5).requests == 5
    assert named(["W1"])[0].at_most(None) is WORKLOADS[0]
    with pytest.raises(ValueError, match="no workload 'W7': W1, W2"):
        named(["W7"])


def test_an_unknown_workload_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--workloads", "w1"])
    assert "no workload 'w1'" in capsys.readouterr().err


def test_nobody_at_the_address(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--base-url", "http://127.0.0.1:9", "--workloads", "W1"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().err


def test_fields_are_put_in_and_left_out() -> None:
    body = Target("x", "m", False, 3, {"ignore_eos": None, "top_k": 1}).body("hello")
    assert body["top_k"] == 1
    assert "ignore_eos" not in body
    assert body["min_tokens"] == 3


@pytest.mark.parametrize("text", ["[]", "{"])
def test_extra_fields_are_an_object(text: str) -> None:
    with pytest.raises(bench.SettingsError, match="extra-body"):
        bench.BenchSettings.build(extra_body=text)


def test_a_table() -> None:
    assert table(("a", "long"), [(1, None)]) == "| a   | long |\n| --- | ---- |\n| 1   | –    |"
