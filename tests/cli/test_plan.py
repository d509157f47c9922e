from __future__ import annotations

from pathlib import Path

import pytest

from protos import worker_pb2
from services.cli import __main__, plan

REQUEST = worker_pb2.PlanMemoryRequest(max_num_batched_tokens=512, max_num_seqs=64, block_size=16)
SUM = worker_pb2.PlanMemoryResponse(
    weight_bytes=1_300,
    process_bytes=200_000_000,
    step_bytes=2_000_000,
    kv_cache_bytes=64_000,
    bytes_per_block=16_000,
    num_blocks=4,
)


def test_weights_are_shown_by_type_the_largest_first() -> None:
    weights = [worker_pb2.WeightMemory(type="float32", bytes=300), worker_pb2.WeightMemory(type="int4", bytes=1_000)]
    assert plan.table(worker_pb2.LoadResponse(weights=weights), SUM, REQUEST).splitlines() == [
        "weights, int4            1,000",
        "weights, float32           300",
        "process            200,000,000  Python and its libraries, as measured",
        "largest step         2,000,000  512 tokens, 64 rows, as measured",
        "KV cache                64,000  4 blocks of 16 tokens, 16,000 each: 64 tokens",
        "total              202,065,300  bytes",
    ]


def test_weights_are_one_line_where_the_worker_names_no_types() -> None:
    assert plan.table(worker_pb2.LoadResponse(), SUM, REQUEST).startswith("weights                  1,300\nprocess")


def test_the_plan_is_asked_of_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["plan", "--simulated", "--engine-kv-cache-bytes=1000000", "--max-model-len=64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["weights", "process", "largest step", "KV cache", "total"]


def test_a_plan_for_what_is_no_model_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["plan", str(tmp_path / "nothing")]) == 2
    assert "nothing lies at" in capfd.readouterr().err
