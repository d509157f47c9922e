"""The workload file: what is read from it, and what is said about a wrong one."""

from __future__ import annotations

import dataclasses
import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from services.cli import __main__
from services.cli.simulate import amount, workload
from services.cli.simulate.arrivals import Specs, arrivals
from services.common.settings import SettingsError
from services.engine.config import EngineSettings
from services.engine.core import CoreConfig

ROOT = Path(__file__).resolve().parent.parent.parent
ONE = {"prompt_tokens": 5, "output_tokens": 2}


def parse(*requests: dict[str, Any], **given: Any) -> workload.Workload:
    return workload.parse(json.dumps({"requests": list(requests), **given}).encode())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "requests: missing"),
        ({"requests": []}, "requests: "),
        ({"requests": [ONE, ONE, ONE, {"output_tokens": 2}]}, "requests[3].prompt_tokens: missing"),
        (
            {"requests": [{**ONE, "prompt_token": 2}]},
            "requests[0].prompt_token: unknown field; did you mean 'prompt_tokens'?",
        ),
        ({"requests": [{**ONE, "prompt_tokens": "7"}]}, "requests[0].prompt_tokens: "),
        ({"requests": [{**ONE, "prompt_tokens": True}]}, "requests[0].prompt_tokens: "),
        (
            {"requests": [{**ONE, "prompt_tokens": 0}]},
            "requests[0].prompt_tokens: a whole number of tokens, at least 1",
        ),
        ({"requests": [{**ONE, "prompt_tokens": 2.5}]}, "requests[0].prompt_tokens: a whole number"),
        ({"requests": [{**ONE, "prompt_tokens": 1e8}]}, "requests[0].prompt_tokens: at most 16777216 tokens"),
        ({"requests": [{**ONE, "output_tokens": -1}]}, "requests[0].output_tokens: "),
        ({"requests": [{**ONE, "output_tokens": {"uniform": [1]}}]}, "requests[0].output_tokens.uniform: "),
        ({"requests": [{**ONE, "output_tokens": {"uniform": [5, 1]}}]}, "uniform goes from the lower to the higher"),
        ({"requests": [{**ONE, "output_tokens": {"max": 5}}]}, "requests[0].output_tokens: give a number, or one of"),
        ({"requests": [{**ONE, "output_tokens": {"uniform": [1, 2], "choice": [1]}}]}, "give a number, or one of"),
        ({"requests": [{**ONE, "output_tokens": {"uniform": [1, 2], "min": 3, "max": 2}}]}, "min is more than max"),
        ({"requests": [{**ONE, "interval": -0.1}]}, "requests[0].interval: "),
        ({"requests": [{**ONE, "arrival": -1}]}, "requests[0].arrival: "),
        ({"requests": [{**ONE, "count": 0}]}, "requests[0].count: "),
        ({"requests": [{**ONE, "count": 99_999_999}, {**ONE, "count": 9}]}, "100000008 in all, more than 100000000"),
        ({"requests": [{**ONE, "priority": 1.5}]}, "requests[0].priority: "),
        ({"requests": [{**ONE, "deadline_ms": 0}]}, "requests[0].deadline_ms: "),
        ({"requests": [{**ONE, "name": ""}]}, "requests[0].name: "),
        ({"requests": [{**ONE, "name": "a"}, {**ONE, "name": "a"}]}, "requests[1].name: 'a' is taken"),
        ({"requests": [{**ONE, "name": "R2"}, ONE]}, "the name 'R2' is also that of another request"),
        ({"requests": [{**ONE, "name": "a", "count": 3}, {**ONE, "name": "a-3"}]}, "the name 'a-3' is also"),
        ({"requests": [{**ONE, "shared_prefix": {"name": "p", "tokens": 6}}]}, "shared_prefix has 6 tokens"),
        ({"requests": [{**ONE, "shared_prefix": {"tokens": 6}}]}, "requests[0].shared_prefix.name: missing"),
        ({"requests": [{**ONE, "media": [{"embeddings": 4, "offset": 2}]}]}, "media reach to token 6"),
        ({"requests": [{**ONE, "media": [{"embeddings": 2}, {"embeddings": 2, "offset": 1}]}]}, "media[1] begins at 1"),
        ({"requests": [{**ONE, "media": [{"embedings": 2}]}]}, "requests[0].media[0].embe"),
        (
            {"requests": [ONE], "limits": {"max_num_seq": 4}},
            "limits.max_num_seq: unknown field; did you mean 'max_num_seqs'?",
        ),
        ({"requests": [ONE], "limits": {"max_num_seqs": 0}}, "limits.max_num_seqs: "),
        ({"requests": [ONE], "limits": {"policy": "lifo"}}, "limits.policy: "),
        ({"requests": [ONE], "limits": {"steps_in_flight": 3}}, "limits.steps_in_flight: "),
        ({"requests": [ONE], "limits": {"num_blocks": 10**9}}, "limits.num_blocks: more than 4194304"),
        ({"requests": [ONE], "limits": {"kv_windows": [0]}}, "limits.kv_windows: "),
        ({"requests": [ONE], "limits": {"vocab_size": 9}}, "limits.vocab_size: unknown field"),
        ({"requests": [ONE], "cost": {"step_ms": -1}}, "cost.step_ms: "),
        ({"requests": [ONE], "cost": {"steps_ms": 1}}, "cost.steps_ms: unknown field; did you mean 'step_ms'?"),
        ({"requests": [ONE], "speed": 2}, "speed: unknown field"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        workload.parse(json.dumps(given).encode())
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not JSON"),
        (b"[]", "a workload is a JSON object"),
        (b"\xff", "not JSON"),
        (b"[" * 200_000, "not JSON: nested too deeply"),
        (b'{"requests": [{"prompt_tokens": NaN, "output_tokens": 1}]}', "NaN is no number of JSON"),
        (b'{"requests": [{"prompt_tokens": 1e999, "output_tokens": 1}]}', "requests[0].prompt_tokens"),
        (
            b'{"requests": [{"prompt_tokens": 1, "output_tokens": 1, "prompt_tokens": 2}]}',
            "'prompt_tokens' stands twice",
        ),
    ],
)
def test_what_is_no_workload(text: bytes, message: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(message)):
        workload.parse(text)


def test_the_command_says_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "bad.json"
    file.write_text('{"requests": [{"prompt_tokens": 1}]}')
    assert __main__.main(["simulate", str(file)]) == 2
    assert capsys.readouterr().err == f"triptych simulate: {file}: requests[0].output_tokens: missing\n"
    assert __main__.main(["simulate", str(tmp_path / "none.json")]) == 2
    assert "none.json: No such file" in capsys.readouterr().err
    assert __main__.main(["simulate", str(tmp_path)]) == 2
    assert __main__.main(["simulate"]) == 2


def test_limits_are_those_of_the_core_with_the_engines_defaults() -> None:
    config = parse(ONE).core_config()
    for each in dataclasses.fields(CoreConfig):
        knob = EngineSettings.model_fields.get(each.name)
        if knob is not None and knob.default is not None and each.name in workload.Limits.model_fields:
            assert getattr(config, each.name) == knob.default
    assert config.num_blocks * config.block_size == config.max_num_seqs * config.max_model_len
    given = {"max_num_seqs": 7, "max_model_len": 100, "policy": "fair", "steps_in_flight": 1, "kv_windows": [None, 64]}
    config = parse(ONE, limits=given).core_config()
    assert {name: getattr(config, name) for name in given} == {**given, "kv_windows": (None, 64)}
    assert config.num_blocks == 7 * 7
    fields = {each.name for each in dataclasses.fields(CoreConfig)}
    assert fields - set(workload.Limits.model_fields) == workload._NOT_HERE


def test_requests_come_by_time_and_are_named_by_place() -> None:
    given = parse(
        {**ONE, "arrival": 2, "count": 2, "interval": 1},
        {**ONE, "name": "one", "arrival": 2.5},
        {**ONE, "name": "many", "count": 2, "arrival": 3},
        ONE,
    )
    assert [(each.at_ns / 1e9, each.name) for each in arrivals(given)] == [
        (0, "R6"),
        (2, "R1"),
        (2.5, "one"),
        (3, "R2"),
        (3, "many-1"),
        (3, "many-2"),
    ]


def test_equal_seeds_draw_equal_workloads() -> None:
    drawn = {
        "prompt_tokens": {"lognormal": [50, 1]},
        "output_tokens": {"uniform": [1, 9]},
        "interval": {"exponential": 0.1},
    }

    def draw(seed: int) -> list[tuple[int, int, int]]:
        given = parse({**drawn, "count": 50}, {**drawn, "count": 50}, seed=seed)
        return [(each.at_ns, each.prompt_tokens, each.output_tokens) for each in arrivals(given)]

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert [time for time, _, _ in draw(1)] == sorted(time for time, _, _ in draw(1))
    assert len(set(draw(1))) > 90  # each entry has chances of its own


@pytest.mark.parametrize(
    ("given", "low", "high", "mean"),
    [
        ({"uniform": [10, 20]}, 10, 20, 15),
        ({"exponential": 30}, 1, 1000, 30),
        ({"lognormal": [20, 0.5]}, 1, 1000, 20 * 2.718 ** (0.5**2 / 2)),
        ({"lognormal": [20, 0.5], "min": 15, "max": 25}, 15, 25, 20),
        ({"choice": [3, 3, 9]}, 3, 9, 5),
    ],
)
def test_amounts_have_their_mean_and_bounds(given: dict[str, Any], low: int, high: int, mean: float) -> None:
    many = parse({"prompt_tokens": given, "output_tokens": 1, "count": 4000})
    drawn = [each.prompt_tokens for each in arrivals(many)]
    assert low <= min(drawn)
    assert max(drawn) <= high
    assert sum(drawn) / len(drawn) == pytest.approx(mean, rel=0.05)
    assert int(many.requests[0].prompt_tokens.least) <= min(drawn)


def test_a_file_stands_for_many_requests_without_making_them() -> None:
    given = parse({**ONE, "count": 100_000_000, "interval": 0.001})
    assert [each.name for each in islice(arrivals(given), 3)] == ["R1", "R2", "R3"]


def test_prompts_share_what_was_said_and_nothing_else() -> None:
    prefix = {"name": "system", "tokens": 4}
    shared = {**ONE, "prompt_tokens": 9, "shared_prefix": prefix}
    given = parse(shared, shared, {**ONE, "prompt_tokens": 9}, {**shared, "shared_prefix": {**prefix, "name": "other"}})
    specs = Specs()
    first, second, alone, other = [list(specs.make(each, 0).prompt) for each in arrivals(given)]
    assert [len(prompt) for prompt in (first, second, alone, other)] == [9] * 4
    assert first[:4] == second[:4]
    assert first[4] != second[4]
    assert len({prompt[0] for prompt in (first, alone, other)}) == 3


def test_media_stand_where_they_were_put() -> None:
    media = [{"embeddings": 3, "offset": 2}, {"embeddings": 4}, {"embeddings": 1, "name": "logo"}]
    given = parse({**ONE, "prompt_tokens": 12, "media": media, "count": 2})
    first, second = [Specs().make(each, 0).media for each in arrivals(given)]
    assert [(item.offset, item.length, item.embeddings) for item in first] == [(2, 3, 3), (5, 4, 4), (9, 1, 1)]
    assert [a.hash == b.hash for a, b in zip(first, second, strict=True)] == [False, False, True]


@pytest.mark.parametrize("path", sorted((ROOT / "examples/workloads").glob("*.json")), ids=lambda path: path.stem)
def test_the_examples_can_be_read_and_are_explained(path: Path) -> None:
    assert workload.read(path).description
    assert f"`{path.name}`" in (ROOT / "docs/simulate.md").read_text()


def test_the_page_names_every_field() -> None:
    text = (ROOT / "docs/simulate.md").read_text()
    models = (workload.Workload, workload.Costs, workload.Entry, workload.Media, workload.Limits)
    fields = {name for model in models for name in model.model_fields}
    assert {name for name in fields if f"`{name}`" not in text} == set()
    kinds = set(amount.Amount.model_fields) - {"fixed"}
    assert {kind for kind in kinds if kind not in text} == set()
