"""The example of 64 videos, step by step: chunked prefill beside decodes, and what static batches cost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.sim.watch import Watch, watch

ENCODED = "examples/workloads/64-videos-encoded.json"
ROOT = Path(__file__).resolve().parent.parent.parent
VIDEOS = ROOT / "examples/workloads/64-videos.json"


def ones(last: int) -> dict[str, int]:
    """R1 to R`last`, each with its next token."""
    return {f"R{number}": 1 for number in range(1, last + 1)}


def test_the_command_prints_the_steps() -> None:
    command = [sys.executable, "-m", "services.cli", "simulate", str(VIDEOS), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert done.stderr == ""
    steps = document["steps"]
    assert [step["step"] for step in steps] == list(range(1, 429))
    assert [step["scheduled"] for step in steps[:6]] == [
        {"R1": 7000, "R2": 1192},
        {**ones(1), "R2": 5808, "R3": 2383},
        {**ones(2), "R3": 4617, "R4": 3573},
        {**ones(3), "R4": 3427, "R5": 4762},
        {**ones(4), "R5": 2238, "R6": 5950},
        {**ones(5), "R6": 1050, "R7": 7000, "R8": 137},
    ]
    assert [(step["running"], step["waiting"]) for step in steps[:6]] == [
        (2, 62),
        (3, 61),
        (4, 60),
        (5, 59),
        (6, 58),
        (8, 56),
    ]
    assert all(step["preempted"] == [] for step in steps)
    assert set(steps[0]) == {"step", "time_ms", "scheduled", "running", "waiting", "free_blocks", "preempted"}
    blocks = steps[0]["free_blocks"] + -(-7000 // 16) + -(-1192 // 16)
    assert steps[-1]["free_blocks"] == blocks - -(-7199 // 16)  # R64 alone, all its tokens but the last computed
    summary = document["summary"]
    assert (summary["steps"], summary["tokens"]) == (428, 460_736)
    assert (summary["full_steps"], summary["decode_only_steps"]) == (50, 371)
    assert summary["requests"]["R33"]["first_step"] == 201
    first = [summary["requests"][f"R{number}"]["first_token_step"] for number in (1, 32, 33, 64)]
    assert first == [1, 28, 201, 229]
    last = [summary["requests"][f"R{number}"]["last_step"] for number in (1, 32, 64)]
    assert last == [200, 227, 428]


def test_the_middle_of_the_run() -> None:
    steps = watch(VIDEOS).steps
    assert steps[200].scheduled == {**{f"R{number}": 1 for number in range(2, 33)}, "R33": 7000}
    assert steps[209].tokens == 8192
    assert {name: tokens for name, tokens in steps[209].scheduled.items() if tokens > 1} == {"R42": 2352, "R43": 5810}
    assert max(step.running for step in steps) == 32


def test_static_batches_of_32_take_454_steps() -> None:
    run = watch(VIDEOS, static=32)
    assert len(run.steps) == 454
    assert run.steps[227].scheduled == {"R33": 7000, "R34": 1192}
    assert (run.steps[226].waiting, run.steps[227].waiting) == (32, 30)


def test_one_at_a_time_takes_12_800_steps() -> None:
    run = watch(VIDEOS, static=1)
    assert len(run.steps) == 12_800
    assert all(len(step.scheduled) == 1 for step in run.steps)


def test_two_steps_in_flight_fill_a_place_one_step_later() -> None:
    run: Watch = watch(VIDEOS, limits={"steps_in_flight": 2})
    assert [step.scheduled for step in run.steps[:200]] == [step.scheduled for step in watch(VIDEOS).steps[:200]]
    assert run.live["R33"].first_step == 202
    assert len(run.steps) == 429


def test_each_video_is_encoded_once_in_the_step_that_starts_its_request() -> None:
    seen = watch(ROOT / ENCODED)
    begun = [(step.number, name) for step in seen.steps for name, tokens in step.scheduled.items() if tokens > 1]
    assert [number for number, _ in begun] == [*range(1, 33), *range(201, 233), *range(401, 409)]
    assert [name for _, name in begun] == [f"video-{i}" for i in range(1, 65)] + [f"again-{i}" for i in range(1, 9)]
    encodes = {step.number: step.embeddings for step in seen.steps if step.embeddings}
    assert encodes == dict.fromkeys([*range(1, 33), *range(201, 233), 401], 6900)
    assert (seen.steps[0].scheduled, seen.steps[0].waiting) == ({"video-1": 7000}, 71)
