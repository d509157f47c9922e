"""What `triptych simulate` prints and writes: table, JSON, trace and picture."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from services.cli import __main__
from services.cli.figures import percentile
from services.cli.simulate import spread, summary
from services.cli.simulate.plot import Columns, ticks
from services.engine.core import EngineCore

CROWD = {
    "description": "A crowd & a <small> pool",
    "limits": {
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "max_model_len": 400,
        "num_blocks": 40,
        "block_size": 4,
        "output_reserve_blocks": 0,
        "max_waiting_requests": 12,
    },
    "requests": [
        {
            "name": "chat",
            "count": 20,
            "interval": 0.01,
            "prompt_tokens": {"uniform": [5, 40]},
            "output_tokens": 12,
            "tenant": "a",
        },
        {
            "name": "late",
            "arrival": 0.1,
            "count": 3,
            "prompt_tokens": 30,
            "output_tokens": 40,
            "deadline_ms": 40,
            "tenant": "b",
        },
        {"name": "huge", "prompt_tokens": 4000, "output_tokens": 4},
    ],
}


@pytest.fixture
def crowd(tmp_path: Path) -> str:
    path = tmp_path / "crowd.json"
    path.write_text(json.dumps(CROWD))
    return str(path)


def output(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert __main__.main(["simulate", *words]) == 0
    return capsys.readouterr().out


def test_json_adds_up(crowd: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(output([crowd, "--json"], capsys))
    steps, totals = document["steps"], document["summary"]
    assert len(steps) == totals["steps"]
    assert sum(sum(step["scheduled"].values()) for step in steps) == totals["tokens"]
    assert all(sum(step["scheduled"].values()) <= 64 and step["running"] <= 8 for step in steps)
    assert sum(len(step["preempted"]) for step in steps) == totals["preemptions"] > 0
    assert min(step["free_blocks"] for step in steps) == totals["least_free_blocks"]
    requests = totals["requests"]
    assert len(requests) == 24
    for finish, kind in (("length", "completed"), ("expired", "expired"), ("refused", "refused")):
        assert sum(line["finish"] == finish for line in requests.values()) == totals[kind] > 0
    assert "4000 tokens" in requests["huge"]["reason"]
    assert sum(reason["count"] for reason in totals["reasons"]) == totals["expired"] + totals["refused"]
    done = [line for line in requests.values() if line["finish"] == "length"]
    waits = sorted(line["wait_ms"] for line in done)
    assert totals["wait_ms"]["max"] == waits[-1]
    assert totals["ttft_ms"]["p50"] == pytest.approx(percentile([line["ttft_ms"] for line in done], 50), abs=0.001)
    assert all(line["wait_ms"] <= line["ttft_ms"] <= line["total_ms"] for line in done)
    for name, line in requests.items():
        if line["first_step"]:
            assert name in steps[line["first_step"] - 1]["scheduled"]
            assert not any(name in step["scheduled"] for step in steps[: line["first_step"] - 1])
    assert set(totals["groups"]) == {"chat", "late"} & {
        name.split("-")[0] for name in requests if requests[name]["finish"] == "length"
    }
    assert totals["tenants"]["a"]["completed"] == totals["groups"]["chat"]["completed"]


def test_json_of_no_step_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "huge.json"
    file.write_text('{"requests": [{"prompt_tokens": 40000, "output_tokens": 1}]}')
    document = json.loads(output([str(file), "--json"], capsys))
    assert document["steps"] == []
    assert document["summary"]["refused"] == 1
    assert document["summary"]["ttft_ms"] is None
    assert "1 refused" in output([str(file), f"--plot={tmp_path / 'p.svg'}"], capsys)


def test_many_requests_are_not_listed(
    crowd: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(summary, "LISTED", 23)
    assert json.loads(output([crowd, "--json"], capsys))["summary"]["requests"] is None
    monkeypatch.setattr(summary, "LISTED", 24)
    assert len(json.loads(output([crowd, "--json"], capsys))["summary"]["requests"]) == 24


def test_the_table_folds_steps_and_shows_both_ends(crowd: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(output([crowd, "--json"], capsys))
    text = output([crowd], capsys)
    lines = text.splitlines()
    assert lines[0].strip() == "A crowd & a <small> pool"
    last = document["summary"]["steps"]
    assert any(line.split()[0].split("–")[0] == "1" for line in lines if line.strip())
    assert any(line.strip().startswith((f"{last} ", f"{last - 1}–{last}")) for line in lines) or f"–{last} " in text
    assert f"{last:,} steps" in text
    assert "more lines" in text
    assert "preempted" in text
    assert "tenant a" in text
    assert len(lines) < 80


def test_the_trace_is_one_that_perfetto_reads(crowd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "trace.json"
    document = json.loads(output([crowd, "--json", f"--trace={file}"], capsys))
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "C", "b", "e", "i"}
    assert all(event["ts"] >= 0 for event in events if event["ph"] != "M")
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    for slices in tracks.values():
        slices.sort(key=lambda event: event["ts"])
        assert all(event["dur"] > 0 for event in slices)
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1e-3 for a, b in itertools.pairwise(slices)), "slices overlap"
    assert len(tracks[1, 0]) == document["summary"]["steps"]
    rows = [event["args"] for (pid, _), slices in tracks.items() if pid == 2 for event in slices]
    assert sum(args["tokens"] for args in rows) == document["summary"]["tokens"]
    opened: dict[int, int] = defaultdict(int)
    for event in events:
        if event["ph"] in "be":
            opened[event["id"]] += 1 if event["ph"] == "b" else -1
            assert opened[event["id"]] in (0, 1)
    assert set(opened) == set(range(1, 25))
    assert not any(opened.values())
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert counters == {"tokens", "running", "waiting", "free blocks"}


def test_the_picture_is_drawn_in_both_kinds(crowd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output([crowd, f"--plot={tmp_path / 'p.svg'}"], capsys)
    root = ET.fromstring((tmp_path / "p.svg").read_text())
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "A crowd & a <small> pool"
    assert {"tokens per step", "rows per step", "waiting requests", "preempted", "budget 64"} <= set(texts)
    for element in root.iter("{http://www.w3.org/2000/svg}polygon"):
        points = [float(number) for pair in element.attrib["points"].split() for number in pair.split(",")]
        assert all(0 <= number <= 1100 for number in points)
    output([crowd, f"--plot={tmp_path / 'p.png'}"], capsys)
    with Image.open(tmp_path / "p.png") as image:
        image.load()
        assert image.size == (2200, 1740)
        colours = {colour for _, colour in image.getcolors(1 << 24) or []}
        assert {(76, 127, 184), (242, 165, 65)} <= colours, "prefill and decode are there"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--plot=p.gif", "ends neither in .svg nor in .png"),
        ("--plot=/no/such/p.svg", "there is no folder /no/such"),
        ("--trace=/no/such/t.json", "--trace: /no/such/t.json: No such file"),
        ("--static=9", "--static: 9 is more than max_num_seqs, 8"),
        ("--static=0", "--static"),
        ("--statics=1", "did you mean '--static'?"),
    ],
)
def test_options_that_make_no_sense(crowd: str, option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert __main__.main(["simulate", crowd, option]) == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.out == ""


def test_a_png_needs_pillow_and_says_so(
    crowd: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert __main__.main(["simulate", crowd, "--plot=p.png"]) == 2
    assert "a PNG needs Pillow" in capsys.readouterr().err


def test_names_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever a terminal's markup, or XML, would make of them."""
    request = {"name": "[red]x[/]", "count": 2, "tenant": "[/bold]", "prompt_tokens": 3, "output_tokens": 2}
    path, picture = tmp_path / "names.json", tmp_path / "p.svg"
    path.write_text(json.dumps({"description": "\x1b[1m & \0", "requests": [request]}))
    said = output([str(path), f"--plot={picture}"], capsys)
    assert "[red]x[/]-1" in said
    assert "tenant [/bold]" in said
    assert "\N{REPLACEMENT CHARACTER}[1m & \N{REPLACEMENT CHARACTER}" in "".join(ET.parse(picture).getroot().itertext())


def test_what_cannot_be_written_is_told_in_one_line(
    crowd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.svg").mkdir()
    assert __main__.main(["simulate", crowd, f"--plot={tmp_path / 'p.svg'}"]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert __main__.main(["simulate", crowd, "--trace=/dev/full"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@settings(max_examples=40)
@given(st.lists(st.floats(0, 1e9) | st.just(0.0), min_size=1, max_size=200), st.floats(0, 100))
def test_quantiles_of_many_values_are_within_a_percent(values: list[float], percent: float) -> None:
    many = spread.Spread()
    for value in values * (spread.EXACT // len(values) + 1):
        many.add(value)
    assert many.count > spread.EXACT
    ordered = sorted(values * (many.count // len(values)))
    true = ordered[math.floor((len(ordered) - 1) * percent / 100)]
    assert many.quantile(percent) == pytest.approx(true, rel=0.0101, abs=1e-12)
    assert many.mean == pytest.approx(sum(values) / len(values))
    assert many.largest == max(values)


def test_few_values_have_exact_quantiles_and_none_have_no_figures() -> None:
    few = spread.Spread()
    assert few.figures() is None
    for value in range(5):
        few.add(value)
    assert few.figures() == {"mean": 2.0, "p50": 2.0, "p90": 3.6, "p99": 3.96, "max": 4}


def test_columns_halve_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Columns, "MOST", 8)
    columns = Columns(1)
    for value in range(21):
        columns.add([value])
    columns.flush()
    assert columns.span == 4
    assert list(columns.values[0]) == [1.5, 5.5, 9.5, 13.5, 17.5, 20]


@pytest.mark.parametrize(
    ("most", "count", "expected"),
    [(428, 9, list(range(0, 401, 50))), (3, 5, [0, 1, 2, 3]), (8192, 5, [0, 2000, 4000, 6000, 8000]), (1, 9, [0, 1])],
)
def test_ticks_are_round(most: float, count: int, expected: list[float]) -> None:
    assert ticks(most, count) == expected


def test_a_run_that_gets_stuck_shows_what_it_came_to(
    crowd: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = EngineCore.schedule
    monkeypatch.setattr(EngineCore, "schedule", lambda core, now: schedule(core, now) if now < 0.05 else None)
    trace = tmp_path / "trace.json"
    assert __main__.main(["simulate", crowd, "--json", f"--trace={trace}"]) == 1
    said = capsys.readouterr()
    assert "waits for ever" in said.err
    assert json.loads(said.out)["summary"]["steps"] == len(json.loads(said.out)["steps"]) > 0
    assert json.loads(trace.read_text())["traceEvents"]
